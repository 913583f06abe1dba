"""Prompt tokens for parallel prompt decoding (arXiv 2405.18628): embeddings that the frozen model reads as rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvasir_lab.drafters import prompt_rows
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.head_kind import HeadKind
from kvasir_lab.drafters.target import Target


class TrainedPrompts(HeadKind):
    title = "Prompt tokens for parallel prompt decoding (arXiv 2405.18628)"
    # Half the spread of the embeddings of a lab model, for these weights are embeddings.
    rate = 5e-2

    def begin(self, target: Target, seed: int) -> None:
        super().begin(target, seed)
        # Each prompt token is a row of the whole model, whose activations are kept for the backward pass.
        self.places = self.module.shape.depth * self.module.shape.ensemble

    def outputs(self, batch: Batch) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        ids = batch.ids.to(self.target.device, non_blocking=True)
        with torch.no_grad():
            normed, keys = prompt_rows.read(self.target.model, ids)
        return normed, prompt_rows.unroll(self.target.model, self.module.weight, batch, keys)
