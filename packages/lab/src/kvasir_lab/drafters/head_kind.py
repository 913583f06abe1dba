"""Trained heads: the kinds whose weights are a `kvasir.speculation.head.Head` beside the frozen model.

Step (or head) j at a row guesses the token j + 2 places on. Its loss is KL(target || head), weighted 0.8^j as in
Medusa and EAGLE-3. The target's distribution is conditioned on the tokens really written, as the verifying draw will
be.

Shape suffixes: B texts, T tokens, E model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvasir.learn import losses
from kvasir.speculation import heads
from kvasir.speculation.head import Head
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.kind import Kind
from kvasir_lab.drafters.target import Target


class HeadKind(Kind):
    """A head of the kind in ``kvasir.speculation.head_kinds`` that has the same name."""

    module: Head

    def begin(self, target: Target, seed: int) -> None:
        self.target, cls = target, heads.class_of(self.name)
        self.module = cls(cls.shape_for(target.model.shape.dim, target.model.shape.layers))
        trunk = target.model.model
        self.module.begin_with(
            trunk.norm.weight.float().cpu(),
            trunk.embed_tokens.weight.float().cpu(),
            torch.Generator().manual_seed(seed),
        )
        self.module.to(target.device)
        self.depth = self.module.shape.depth

    def outputs(self, batch: Batch) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        """The final norm's output [B, T, E], and an iterator over the head's outputs: number j [B, T, E] predicts in
        row p the token p + 2 + j."""
        features, normed, following = self.target.features(
            batch.ids.to(self.target.device, non_blocking=True), self.module.shape.layers
        )
        return normed, self.module.unroll(features, normed, following)

    def losses(self, batch: Batch, step: int = 0, share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean KL(target || head) in nats of every step j [D], over the reply tokens that it can predict."""
        normed, outputs = self.outputs(batch)
        # Row n predicts token n + 1. The first token of a reply is drawn before any draft.
        place = torch.arange(batch.ids.shape[1] - 1)
        predicts = (place >= batch.begins[:, None]) & (place < batch.lengths[:, None] - 1)
        row, at = (x.to(self.target.device) for x in predicts.nonzero(as_tuple=True))
        first = batch.begins.to(self.target.device)[row] - 1  # root of the first draft of a reply
        wanted = losses.Target.of(self.target.logits(normed[row, at]))
        out = []
        with self.target.autocast():
            for j, x_BTE in enumerate(outputs):
                root = at - 1 - j
                weight = (root >= first).float()
                nats = wanted.divergence(self.target.logits(x_BTE[row, root.clamp(min=0)]))
                out.append(losses.weighted_mean(nats, weight))
        found = torch.stack(out)
        return losses.discounted(found), found.detach()

    @torch.no_grad()
    def guesses(self, batch: Batch) -> Iterator[torch.Tensor]:
        for x_BTE in self.outputs(batch)[1]:
            yield self.target.logits(x_BTE).argmax(-1)

    def write(self, folder: Path, tokenizer: Any) -> None:
        heads.write(self.module, folder, self.target.facts)

    def about(self) -> str:
        return f"{super().about()}, reads layers {', '.join(map(str, self.module.shape.layers)) or 'none'}"
