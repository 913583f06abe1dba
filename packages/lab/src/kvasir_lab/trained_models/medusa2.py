"""Medusa-2 (arXiv 2401.10774): a model and its Medusa heads are trained together, so that its states suit the heads.

The loss is that of the model plus lambda times the heads', each head's weighted 0.8^k. On the target's own replies the
model's loss is KL(target || model), the paper's self-distillation; on texts that the tasks give, cross-entropy. At
first only the heads are trained, on frozen states. The heads learn faster than the model. Not exact: the result is
another model, whose task scores must be measured; drafts for it change no token.

Legend: B texts, T tokens, M rows that predict a token of a reply, E model dim, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.learn.losses import DISCOUNT
from kvasir.speculation import heads
from kvasir.speculation.head import Head
from kvasir_lab import export
from kvasir_lab.drafters.data import Batch, reply_rows
from kvasir_lab.drafters.kind import Kind, size_of
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model

FASTER = 4.0  # learning rate of the heads over that of the model, as published
FOLDER = "medusa"  # the heads' folder inside the model's


@dataclass(frozen=True)
class Config:
    """``scale``: lambda, the weight of the heads' loss; ``warmup``: share of the run that trains the heads alone;
    ``data``: replies of the target, or those that the tasks give."""

    scale: float = 0.2
    warmup: float = 0.25
    data: Literal["self", "text"] = "self"

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1 or not 0 <= self.warmup < 1:
            raise ConfigError(
                f"medusa2:scale={self.scale},warmup={self.warmup}: scale must be above 0 and at most 1, warmup from 0 "
                "to below 1"
            )


class Joint(nn.Module):
    """A model and its heads."""

    def __init__(self, backbone: Model, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head


class JointlyTrained(Kind):
    title = "Medusa-2: a model and its heads, trained together (arXiv 2401.10774)"
    rate = 3e-4
    places = 2
    loss_name = "loss"
    loss_text = (
        "The loss is the model's (KL from the target on its own replies)\nplus lambda times the heads' cross-entropy, "
        "weighted by 0.8 to the power of the depth; the last value is the model's."
    )
    config: Config
    module: Joint

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data = config.data

    @classmethod
    def intro(cls, run: dict[str, Any]) -> str:
        return f"""A model for kvasir with Medusa heads of its own:
`kvasir serve FOLDER --drafter medusa:model=FOLDER/{FOLDER}`. All its {size_of(run["parameters"])} weights were trained
on, so it is another model than `{run["target"]["name"]}`: compare them with `kvasir eval FOLDER`."""

    def begin(self, target: Target, seed: int) -> None:
        self.target, cls = target, heads.class_of("medusa")
        head = cls(cls.shape_for(target.model.shape.dim, target.model.shape.layers))
        backbone = copy.deepcopy(target.source).float()
        self.module = Joint(backbone, head).to(target.device).train().requires_grad_(True)
        self.depth = head.shape.depth

    def normed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The final norm's output [B, T, E]."""
        trunk, rope = self.module.backbone.model, self.module.backbone.rope(ids_BT.shape[1])
        x = trunk.embed_tokens(ids_BT)
        for layer in trunk.layers:
            x = layer(x, rope, None)
        return trunk.norm(x)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return F.linear(normed, self.module.backbone.model.embed_tokens.weight).float()

    def losses(self, batch: Batch, step: int = 0, share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The joint loss; shown are the cross-entropy of every head and the model's loss."""
        ids = batch.ids.to(self.target.device)
        text_of, at = reply_rows(batch, ids.device)
        alone = share < self.config.warmup
        with self.target.autocast():
            with torch.set_grad_enabled(not alone):
                normed = self.normed(ids)
                own = self._own_loss(ids, normed, text_of, at)
            by_head = self._head_losses(ids, normed, text_of, at, frozen=alone)
        heads_loss = (by_head * DISCOUNT ** torch.arange(1, len(by_head) + 1, device=ids.device)).sum()
        total = heads_loss if alone else own + self.config.scale * heads_loss
        return total, torch.cat([by_head.detach(), own.detach()[None]])

    def _own_loss(
        self, ids: torch.Tensor, normed: torch.Tensor, text_of: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        logits = self.logits(normed[text_of, at])
        if self.config.data == "text":
            return F.cross_entropy(logits, ids[text_of, at + 1])
        with torch.no_grad():
            wanted = self.target.logits(self.target.features(ids, (0,))[1][text_of, at]).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")

    def _head_losses(
        self, ids: torch.Tensor, normed: torch.Tensor, text_of: torch.Tensor, at: torch.Tensor, frozen: bool
    ) -> torch.Tensor:
        """The cross-entropy of each head [K]: head k at row p predicts token p + 2 + k, as far as it is in the
        reply. ``frozen``: without gradients for the output matrix."""
        matrix = self.module.backbone.model.embed_tokens.weight
        matrix = matrix.detach() if frozen else matrix
        replies = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        replies[text_of, at + 1] = True
        found = []
        for k, x_ME in enumerate(self.module.head(normed[text_of, at]).unbind(1)):
            place = (at + 2 + k).clamp(max=ids.shape[1] - 1)
            there = replies[text_of, place] & (at + 2 + k < ids.shape[1])
            loss = F.cross_entropy(F.linear(x_ME, matrix).float(), ids[text_of, place], reduction="none")
            found.append((loss * there).sum() / there.sum().clamp(min=1))
        return torch.stack(found)

    @torch.no_grad()
    def guesses(self, batch: Batch) -> Iterator[torch.Tensor]:
        with self.target.autocast():
            normed = self.normed(batch.ids.to(self.target.device))
            for x_BTE in self.module.head(normed).unbind(2):
                yield self.logits(x_BTE).argmax(-1)

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.module.backbone.parameters())},
            {"params": list(self.module.head.parameters()), "scale": FASTER},
        ]

    def whole_model(self) -> Model:
        return self.served().module.backbone

    def write(self, folder: Path, tokenizer: Any) -> None:
        backbone = self.module.backbone
        export.export(backbone, tokenizer, folder)
        weights = heads.fingerprint(backbone.model.norm.weight)
        heads.write(self.module.head, folder / FOLDER, self.target.facts | {"name": folder.name, "weights": weights})
