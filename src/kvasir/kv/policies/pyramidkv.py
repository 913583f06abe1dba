"""PyramidKV: SnapKV's scores, with more tokens in low layers than in high ones (arXiv 2406.02069).

Lossy. Budgets fall in equal steps from the first layer to the last, whose share is the ``beta``-th part of the mean.
Their mean is ``budget``. Where the first layers would keep more than there is, the others get the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kv.policy import Memory
from kvasir.kv.prompt_window import PromptWindow, WindowConfig, mean_scores, whole_shares


@dataclass(frozen=True)
class Config(WindowConfig):
    beta: int = 20  # the last layer keeps a beta-th of the mean share; 1: all layers keep the same

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ConfigError("beta is at least 1")


class PyramidKV(PromptWindow):
    """Keeps fewer tokens from layer to layer."""

    by_layer = True

    def asked(self, attention_GRWM: torch.Tensor) -> torch.Tensor:
        return mean_scores(attention_GRWM, self.config.pool)

    def allot(self, memories: Sequence[Memory], left: int) -> list[int]:
        layers, mean = len(memories), left - self.rows
        most = memories[0].count - self.rows
        last, first = mean / self.config.beta, 2 * mean - mean / self.config.beta
        if first > most:  # as many as there are, and the mean stays
            first, last = float(most), 2.0 * mean - most
        fall = (first - last) / max(1, layers - 1)
        shares = [first - fall * i for i in range(layers)] if layers > 1 else [float(mean)]
        return [self.rows + n for n in whole_shares(shares, layers * mean, most)]
