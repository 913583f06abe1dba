"""LayerSkip's recipe (arXiv 2404.16710): losses at nested exits and layer dropout, so that early layers can draft.

Every exit reads its layer's output with the model's own final norm and head. Layer l = 0 .. L-1 has the weight s (0 + 1
+ ... + l), the last one L - 1 more than that of its predecessor; weights are divided by their sum over the exits that a
step trains. The last layer is always trained; of the others every ``rotation``-th, one further each step (rotational
curriculum), or all from a depth on that sinks during the first half of the run (gradual). Layer l is left out of a text
with the chance p (2^(l / (L-1)) - 1). Not exact: the result is another model, whose task scores must be measured.

Legend: B texts, T tokens, L layers, M rows that predict a token of a reply, E model dim, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.learn import walk
from kvasir_lab import export
from kvasir_lab.drafters import acceptance
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import BATCH_TOKENS, Batch, Texts, reply_rows
from kvasir_lab.drafters.kind import Kind, size_of
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model

DEPTH = 6  # Most drafts of a forward that are measured.


@dataclass(frozen=True)
class Config:
    """``scale`` of the weights of early exits; ``dropout``: chance to leave out the last layer; ``curriculum``: which
    exits a step trains; ``rotation``: every how many layers (0: half of them); ``data``: replies of the target, or
    those that the tasks give."""

    scale: float = 0.2
    dropout: float = 0.1
    curriculum: Literal["rotational", "gradual", "all"] = "rotational"
    rotation: int = 0
    data: Literal["self", "text"] = "self"

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1 or not 0 <= self.dropout < 1 or self.rotation < 0:
            raise ConfigError(
                f"exits:scale={self.scale},dropout={self.dropout},rotation={self.rotation}: scale must be above 0 and "
                "at most 1, dropout from 0 to below 1, and rotation at least 0"
            )


class EarlyExits(Kind):
    title = "Early exits by LayerSkip's recipe (arXiv 2404.16710)"
    rate = 3e-4
    places = 2
    depth = DEPTH
    loss_name = "CE"
    loss_text = "The loss is the\ncross-entropy at nested exits with LayerSkip's weights and layer dropout."
    config: Config
    module: Model

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data = config.data
        self.exit = 0  # layers before the exit that drafts, once it is measured

    @classmethod
    def intro(cls, run: dict[str, Any]) -> str:
        best, size, base = run["acceptance"]["best"], size_of(run["parameters"]), run["target"]["name"]
        return f"""A model for kvasir whose first layers draft: `kvasir serve FOLDER --drafter layer_skip`. All its
{size} weights were trained on, so it is another model than `{base}`: compare them
with `kvasir eval FOLDER`. The tables are those of an exit after {best["exit"]} layers that always drafts
{best["drafts"]}."""

    @classmethod
    def more(cls, found: dict[str, Any]) -> str:
        lines = []
        for exit, row in found["exits"].items():
            right, tokens, cost = row["right"], row["tokens_per_forward"], row["of_plain"]
            lines.append(f"| {exit} | {right:.3f} | {row['drafts']} | {tokens:.2f} | {cost:.3f} |")
        rows = "\n".join(lines)
        return f"""
Every exit with the fixed number of drafts that is best for it; layers computed for a token, head included, over plain:

| exit | right drafts | drafts | tokens a forward | layers over plain |
|---|---|---|---|---|
{rows}
"""

    def begin(self, target: Target, seed: int) -> None:
        self.target, self.seed = target, seed
        self.module = copy.deepcopy(target.source).float().to(target.device).train().requires_grad_(True)

    def outputs(self, ids_BT: torch.Tensor, kept_LB: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield the final norm of every layer's output [B, T, E]. ``kept_LB``: texts that a layer is not left out
        of."""
        trunk, rope = self.module.model, self.module.rope(ids_BT.shape[1])
        x = trunk.embed_tokens(ids_BT)
        for i, layer in enumerate(trunk.layers):
            y = layer(x, rope, None)
            x = y if kept_LB is None else torch.where(kept_LB[i][:, None, None], y, x)
            yield trunk.norm(x)

    def weights(self, step: int, share: float) -> np.ndarray:
        """The weight of each exit's loss [L]; they sum to 1."""
        count = len(self.module.model.layers)
        early = self.config.scale * np.arange(count).cumsum()
        weights = early.copy()
        weights[-1] = count - 1 + (early[-2] if count > 1 else 0.0)
        layers = np.arange(count)
        if self.config.curriculum == "rotational":
            enabled = (layers + step) % (self.config.rotation or max(1, count // 2)) == 0
        elif self.config.curriculum == "gradual":
            enabled = layers >= count - 1 - int(2 * count * share)
        else:
            enabled = layers >= 0
        enabled[-1] = True
        weights = np.where(enabled, weights, 0.0)
        return weights / weights.sum() if weights.sum() else np.eye(count)[-1]

    def kept(self, step: int, count: int) -> torch.Tensor:
        """Whether layer l computes a text [L, B]."""
        layers = len(self.module.model.layers)
        chance = self.config.dropout * (2 ** (np.arange(layers) / max(1, layers - 1)) - 1)
        drawn = np.random.default_rng([self.seed, step]).random((layers, count))
        return torch.from_numpy(drawn >= chance[:, None])

    def losses(self, batch: Batch, step: int = 0, share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted cross-entropy; shown is that of each exit [L], 0 where this step does not train it."""
        ids = batch.ids.to(self.target.device)
        text_of, at = reply_rows(batch, ids.device)
        wanted, weights = ids[text_of, at + 1], self.weights(step, share)
        total, shown = torch.zeros((), device=ids.device), torch.zeros(len(weights), device=ids.device)
        with self.target.autocast():
            for i, normed in enumerate(self.outputs(ids, self.kept(step, len(ids)).to(ids.device))):
                if weights[i]:
                    loss = F.cross_entropy(self.logits(normed[text_of, at]), wanted)
                    total = total + float(weights[i]) * loss
                    shown[i] = loss.detach()
        return total, shown

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return F.linear(normed, self.module.model.embed_tokens.weight).float()

    @torch.no_grad()
    def guesses(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Guess j of root p is what the exit draws in row p + 1 + j, the drafts before it being right."""
        with self.target.autocast():
            drawn = self.drawn(batch)[self.exit - 1]
        for j in range(self.depth):
            yield torch.roll(drawn, -1 - j, 1)

    def drawn(self, batch: Batch) -> torch.Tensor:
        """The likeliest next token of every exit [L, B, T]."""
        ids = batch.ids.to(self.target.device)
        return torch.stack([self.logits(normed).argmax(-1) for normed in self.outputs(ids)])

    @torch.no_grad()
    def measure(self, texts: Texts) -> dict[str, Any]:
        """Acceptance at the best exit and length, and for ``exits`` the best fixed length of each: ``of_plain`` counts
        the layers computed for a token, with the head as a layer's share of weights, over those of plain decoding."""
        served = self.served()
        assert isinstance(served, EarlyExits)
        trunk = self.module.model
        layers = len(trunk.layers)
        head = trunk.embed_tokens.weight.numel() / sum(p.numel() for p in trunk.layers[0].parameters())
        tokens, rights = 0, np.zeros((layers, 2))
        counts = np.zeros((layers, DEPTH + 1))
        for batch in drafter_data.batches(texts, BATCH_TOKENS[self.target.device.type], 0, 0):
            ids = batch.ids
            with self.target.autocast():
                hits = (served.drawn(batch)[:, :, :-1].cpu() == ids[:, 1:]).numpy()
            for i, (begin, length) in enumerate(zip(batch.begins.tolist(), batch.lengths.tolist())):
                tokens += max(0, length - 1 - begin)
                for layer in range(layers - 1):
                    hit = hits[layer, i]
                    rights[layer] += hit[begin : length - 1].sum(), max(0, length - 1 - begin)
                    right = np.stack([np.roll(hit, -1 - j) for j in range(DEPTH)])
                    for drafts in range(1, DEPTH + 1):
                        counts[layer, drafts] += sum(1 for _ in walk.forwards(right[:drafts], begin, length))
        exits = {}
        for layer in range(layers - 1):
            # Layers of a forward: the drafts, then all layers, each with the head.
            costs = [drafts * (layer + 1 + head) + layers + head for drafts in range(1, DEPTH + 1)]
            of_plain = np.array(costs) * counts[layer, 1:] / max(1, tokens) / (layers + head)
            best = int(of_plain.argmin())
            exits[layer + 1] = {
                "right": rights[layer, 0] / max(1.0, rights[layer, 1]),
                "drafts": best + 1,
                "tokens_per_forward": tokens / max(1.0, counts[layer, best + 1]),
                "of_plain": float(of_plain[best]),
            }
        served.exit = min(exits, key=lambda exit: exits[exit]["of_plain"])
        served.depth = exits[served.exit]["drafts"]
        found = acceptance.acceptance(served.guesses, served.depth, texts, self.target.device)
        return found | {"exits": exits, "best": {"exit": served.exit, "drafts": served.depth}, "head_layers": head}

    def whole_model(self) -> Model:
        return self.served().module

    def write(self, folder: Path, tokenizer: Any) -> None:
        export.export(self.module, tokenizer, folder)
