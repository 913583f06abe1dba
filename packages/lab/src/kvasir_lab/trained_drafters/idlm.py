"""I-DLM's adapter for mask rows (arXiv 2604.11035, R-ISD): the base model is frozen, and only its mask rows have it.

The paper leaves the adapter's recipe open. This one trains LoRA of all seven matrices with alpha = 2 r and the mask's
embedding, on the mask rows' loss alone: the clean half has nothing to train, so it runs once, without gradients.

Legend: B texts, T tokens, R mask rows of a text, E model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir_lab.drafters import mask_rows, prompt_rows
from kvasir_lab.drafters.data import Batch
from kvasir_lab.drafters.gated_adapter import GatedAdapter
from kvasir_lab.drafters.mask_kind import MaskConfig, MaskKind
from kvasir_lab.drafters.mask_rows import Layout
from kvasir_lab.drafters.prompt_rows import Keys
from kvasir_lab.drafters.target import Target


@dataclass(frozen=True)
class Config(MaskConfig):
    """``rank`` of the adapter, and what every kind with mask rows has."""

    rank: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rank <= 256:
            raise ConfigError(f"idlm:rank={self.rank}: must be from 1 to 256")


class TrainedMaskAdapter(MaskKind):
    title = "I-DLM adapter for mask rows (arXiv 2604.11035)"
    config: Config
    module: GatedAdapter

    def begin(self, target: Target, seed: int) -> None:
        super().begin(target, seed)
        rank = self.config.rank
        self.module = GatedAdapter(target.model, rank, 2.0 * rank, seed).to(target.device)

    @torch.no_grad()
    def text(self, ids_BT: torch.Tensor) -> tuple[torch.Tensor, list[Keys]]:
        return prompt_rows.read(self.target.model, ids_BT)

    def masks(self, rows: Layout, text: list[Keys]) -> torch.Tensor:
        model = self.target.model
        return mask_rows.run(model, self.module.mask_E.to(self.target.dtype), rows, text, self.module.product)

    def log_probs(self, normed: torch.Tensor) -> torch.Tensor:
        return self.target.logits(normed).log_softmax(-1)

    def losses(self, batch: Batch, step: int = 0, share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        normed, text = self.text(batch.ids.to(self.target.device))
        with self.target.autocast():
            return self.mask_losses(batch, step, share, normed, text)

    def groups(self) -> list[dict[str, Any]]:
        # The embedding's numbers are as large as those of other embeddings: it needs larger steps than the matrices.
        matrices = [p for name, p in self.module.named_parameters() if name != "mask_E"]
        return [{"params": matrices}, {"params": [self.module.mask_E], "scale": 10.0}]

    def write(self, folder: Path, tokenizer: Any) -> None:
        self.module.write(folder, self.target.facts, self.config.stride)
