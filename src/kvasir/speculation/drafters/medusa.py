"""Heads on the last hidden state, each guessing one token further ahead; a tree of the most likely products. Exact.

Medusa (arXiv 2401.10774) with a frozen model (Medusa-1), or with one that was trained together with its heads
(Medusa-2, ``kvasir train medusa2``). The heads do not see each other's tokens, so the estimate of a node is the product
of the weights along its path. The tree takes the largest products, best first: the paper's sparse tree, chosen again at
every step. The weights include the noise of their positions, as draws do.

``typical=0.09`` accepts by the paper's other rule, which is lossy (`kvasir.decoding.typical`). It is off by default.

Legend: B sequences, K heads, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvasir.decoding.max_accept import DRAWN, Typical
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask, Capture, Drafter, ServedModel
from kvasir.speculation.tree import DraftTree, products
from kvasir.types import Sequence

KEPT = (
    16  # largest step, in rows, of which a view is kept: a view keeps the whole step's memory, so later rows are copied
)


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of trained heads (default: those in the package; new: random weights, for
    --learn); ``width``: guesses of each head; ``typical``: epsilon of typical acceptance, 0: exact."""

    model: str = ""
    width: int = 4
    typical: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"medusa:width={self.width}: at least 1")
        if not 0.0 <= self.typical < 1.0:
            raise ConfigError(f"medusa:typical={self.typical}: from 0, which is exact, to below 1; published: 0.09")


class MedusaDrafter(Drafter):
    place = "same_device"
    topology = "tree"
    learns = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.exact = not self.config.typical

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        if self.config.typical:
            if model.place.exact:
                raise ConfigError(
                    f"medusa:typical={self.config.typical} changes tokens and their distribution, and exact mode "
                    "promises the tokens. Leave it out, or --batch-invariant."
                )
            log.warning(
                "medusa:typical=%g is lossy: tokens at a temperature above 0 are not drawn from the model's "
                "distribution",
                self.config.typical,
            )
        self._head, self._model = heads.load_for("medusa", self.config.model, model), model
        self.hidden_layers = self._head.shape.layers

    def device_bytes(self, model: ServedModel) -> int:
        return heads.planned("medusa", self.config.model, model)[1] * model.place.dtype.itemsize

    def ingest(self, seq: Sequence, hidden: torch.Tensor, start: int) -> None:
        last = hidden[-1:, 0]
        seq.state["medusa"] = start + len(hidden), last.clone() if len(hidden) > KEPT else last

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        trees = [DraftTree() for _ in asks]
        ready = [
            (i, ask, seen[1])
            for i, ask in enumerate(asks)
            if (seen := ask.seq.state.get("medusa")) and seen[0] == len(ask.seq.tokens) - 1
        ]
        if not ready:
            return trees
        seqs = [ask.seq for _, ask, _ in ready]
        states_BKE = self._head(self._model.norm(torch.cat([last for _, _, last in ready])))
        depth = states_BKE.shape[1]
        # The anchor is known, and its row is the next to be computed; head k is drawn by the row k places behind it.
        given = heads.send(
            np.concatenate([heads.Draws.numbers(seqs), [[len(s.tokens) - 1 for s in seqs]]]), states_BKE.device
        )
        positions_BK = given[2, :, None] + torch.arange(depth, device=given.device)
        log_BKV = heads.guess(
            self._model.read_out(states_BKE), heads.Draws.of(given[:2], heads.hot(seqs)), positions_BK
        )
        logs, ids = log_BKV.topk(min(self.config.width, log_BKV.shape[-1]), -1)
        found = torch.stack([logs.exp(), ids.float()]).cpu().tolist()  # ids below 2^24 are exact
        for (i, ask, _), est_KC, ids_KC in zip(ready, *found):
            tree = products(est_KC, [[int(token) for token in row] for row in ids_KC], ask.max_nodes, ask.max_depth)
            trees[i] = tree.keep(range(len(tree)))
            if self.config.typical:
                ask.seq.state[DRAWN] = len(ask.seq.tokens) - 1, Typical(self.config.typical)
        return trees

    def close(self, seq: Sequence) -> None:
        seq.state.pop("medusa", None)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self._head.named_parameters())

    def export(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        heads.write_tensors(self._head, weights, folder, heads.facts_of(self._model))
