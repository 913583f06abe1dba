"""Trained prompt tokens behind the verified rows: their outputs are the next guesses. Exact; needs no draft model.

PPD, parallel prompt decoding (arXiv 2405.18628): K embeddings stand behind a row as if they were tokens. The model's
output for number j guesses the token j + 2 places after that row. They are guest rows of the step
(`kvasir.types.Span`): no row of the text sees them, and only their outputs remain. Each candidate may carry prompt
tokens of its own, so the next guesses are there whichever path is accepted; drafting only reads them with the output
matrix.

The sparse tree is dynamic. ``rows`` rows are divided between candidates and prompt tokens so that they promise the most
tokens: candidates for this step, prompt tokens for the next one. A candidate carries as many prompt tokens as it is
likely to be the last accepted one. Where a step left no guess (the first step, after a pause, or where the last token's
row had no prompt tokens), the anchor's row carries all of them, and nothing is verified.

Legend: N guesses, K prompt tokens, C members of an ensemble, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask, Capture, Drafter, ServedModel
from kvasir.speculation.tree import DraftTree, products
from kvasir.types import Sequence

LEAST = 0.02  # tokens that a prompt token must promise to be worth a row
SIZES = 16  # number of candidate tree sizes that are tried
PRIOR, PRIOR_WEIGHT = 0.5, 8.0  # prior hazard of a depth, and the observations that it counts for
FORGETTING = 0.998  # factor of the counts, at each observation


@dataclass(frozen=True, slots=True)
class Config:
    """``model``: folder of trained prompt tokens (default: those in the package); ``width``: guesses of each prompt
    token; ``rows``: most rows of a sequence in a step, candidates and prompt tokens together."""

    model: str = ""
    width: int = 4
    rows: int = 24


class PromptDrafter(Drafter):
    place = "same_device"
    topology = "tree"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._counts: list[list[float]] = []  # by depth: [accepted, tried]

    def attach(self, model: ServedModel, capture: Capture | None = None) -> None:
        self._head, self._model = heads.load_for("ppd", self.config.model, model), model
        shape = self._head.shape
        if not torch.isfinite(self._head.weight).all():
            raise ConfigError(
                f"the prompt tokens of ppd:model={self.config.model} hold NaN or infinity. Train them again with "
                f"`kvasir train drafter ppd --target MODEL --out FOLDER`."
            )
        if self.config.rows < shape.depth * shape.ensemble or self.config.width < 1:
            raise ConfigError(
                f"ppd:rows={self.config.rows},width={self.config.width}: rows must be at least "
                f"{shape.depth * shape.ensemble}, for {shape.depth} prompt tokens of {shape.ensemble}, and "
                "width at least 1"
            )
        self.guests = self._head.weight.detach().flatten(0, 1)
        self._counts = [[0.0, 0.0] for _ in range(shape.depth)]

    def answer(self, seq: Sequence, tree: DraftTree, node: int, outputs: torch.Tensor) -> None:
        if len(outputs):
            seq.state["ppd"] = len(seq.tokens), outputs
        else:
            seq.state.pop("ppd", None)

    def observe(self, seq: Sequence, tree: DraftTree, path: list[int], hidden: Any = None) -> None:
        if not tree.tokens:
            return
        deepest = 1 + max(tree.depths[node] for node, parent in enumerate(tree.parents) if parent in {-1, *path})
        for depth, counts in enumerate(self._counts[: min(deepest, len(path) + 1)]):
            counts[0] = FORGETTING * counts[0] + (depth < len(path))
            counts[1] = FORGETTING * counts[1] + 1.0

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        guesses = self._guesses([ask.seq for ask in asks])
        gains, gain = [], 1.0  # by prompt token j: the tokens that it adds to the next step
        for right, tried in self._counts:
            gain *= (right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            gains.append(gain)
        return [self._tree(*guesses.get(ask.seq, ([], [])), ask, gains) for ask in asks]

    def _guesses(self, seqs: list[Sequence]) -> dict[Sequence, tuple[list[list[float]], list[list[int]]]]:
        """Return, for each sequence with guesses, estimates and tokens of the most likely ones by depth, best first."""
        ready = [(seq, seen[1]) for seq in seqs if (seen := seq.state.get("ppd")) and seen[0] == len(seq.tokens)]
        if not ready:
            return {}
        ensemble = self._head.shape.ensemble
        counts = [len(outputs) // ensemble for _, outputs in ready]
        normed = self._model.norm(torch.cat([outputs for _, outputs in ready]))
        if ensemble > 1:
            normed = torch.cat(
                [
                    part.view(ensemble, count, -1).mean(0)
                    for part, count in zip(normed.split([ensemble * n for n in counts]), counts)
                ]
            )
        # The anchor is known, and its row is the next to be computed; guess j is drawn by the row j places behind it.
        positions = np.concatenate([len(seq.tokens) - 1 + np.arange(count) for (seq, _), count in zip(ready, counts)])
        chosen = [seq for seq, _ in ready]
        given = heads.send(
            np.concatenate([np.repeat(heads.Draws.numbers(chosen), counts, 1), positions[None]]), normed.device
        )
        log_NV = heads.guess(
            self._model.read_out(normed)[:, None], heads.Draws.of(given[:2], heads.hot(chosen)), given[2, :, None]
        )[:, 0]
        logs, ids = log_NV.topk(min(self.config.width, log_NV.shape[-1]), -1)
        est, tokens = torch.stack([logs.exp(), ids.float()]).cpu().tolist()  # ids below 2^24 are exact
        found, first = {}, 0
        for seq, count in zip(chosen, counts):
            part = slice(first, first + count)
            found[seq] = est[part], [[int(token) for token in row] for row in tokens[part]]
            first += count
        return found

    def _tree(self, est: list[list[float]], ids: list[list[int]], ask: Ask, gains: list[float]) -> DraftTree:
        whole = products(est, ids, ask.max_nodes, ask.max_depth)
        count, carried = dynamic_tree(whole, gains, self.config.rows, self._head.shape.ensemble)
        whole.guests = {
            node: tuple(tuple(range(c * len(gains), c * len(gains) + num)) for c in range(self._head.shape.ensemble))
            for node, num in sorted(carried.items())
        }
        return whole.keep(range(count))

    def close(self, seq: Sequence) -> None:
        seq.state.pop("ppd", None)

    @torch.inference_mode()
    def load(self, weights: Any, version: int) -> None:
        if not torch.isfinite(weights["weight"]).all():
            raise ValueError("the new prompt tokens hold NaN or infinity")
        super().load(weights, version)
        self._head.load_state_dict(weights)  # in place, since ``guests`` is a view of this memory


def dynamic_tree(tree: DraftTree, gains: Many[float], rows: int, ensemble: int) -> tuple[int, dict[int, int]]:
    """Return how many leading nodes of a best-first tree to verify, and how many prompt tokens each node carries.

    The key -1 is the anchor; all fit into ``rows`` rows. The value of a node is its chance to be accepted. The value of
    a node's prompt token j is the chance that the walk ends at the node times ``gains[j]`` (falling), which is what it
    adds to the next step. A prompt token takes ``ensemble`` rows."""
    survival: list[float] = []
    for parent, est in zip(tree.parents, tree.est):
        survival.append(est * (survival[parent] if parent >= 0 else 1.0))
    best, found = -1.0, (0, {})
    ends = {-1: 1.0}  # by node: the chance that the walk ends there, if the tree has only the nodes so far
    most = min(len(tree), rows)
    step = max(1, most // SIZES)
    for count in range(most + 1):
        if count:
            node = count - 1
            ends[node] = survival[node]
            ends[tree.parents[node]] -= survival[node]
        if count % step and count < most:
            continue
        worth = sorted(
            ((chance * gain, -node, -j) for node, chance in ends.items() for j, gain in enumerate(gains)), reverse=True
        )
        chosen = [entry for entry in worth[: (rows - count) // ensemble] if entry[0] >= LEAST]
        total = sum(survival[:count]) + sum(value for value, _, _ in chosen)
        if total > best:
            carried: dict[int, int] = {}
            for _, node, _ in chosen:
                carried[-node] = carried.get(-node, 0) + 1
            best, found = total, (count, carried)
    return found
