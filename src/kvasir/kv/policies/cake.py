"""CAKE: layers whose attention is spread and changing keep more tokens (arXiv 2503.12491).

Lossy. A layer's preference is its dispersion (the entropy of the window's attention) to the power of 1 / tau1, times
its shift (the variance over rows) to the power of 1 / tau2. The layers share one budget by it. A token's score is the
mean of its attention and ``gamma`` times the variance over the window's rows, smoothed.

All layers are decided at once when the prompt is computed. The paper shrinks earlier layers again and again while later
ones run, which gives the same tokens, because the best of the best are the best of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kv.policy import Memory
from kvasir.kv.prompt_window import PromptWindow, WindowConfig, smooth, whole_shares

TINY = 1e-10  # inside the logarithm of the entropy


@dataclass(frozen=True)
class Config(WindowConfig):
    window: int = 32  # last rows that are asked, whose tokens always stay
    tau1: float = 1.0  # temperature of the dispersion; the paper tunes both by model
    tau2: float = 1.0  # temperature of the shift
    gamma: float = 200.0  # weight of the variance in a score

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau1 <= 0 or self.tau2 <= 0 or self.gamma < 0:
            raise ConfigError("tau1 and tau2 are above 0, gamma is at least 0")


class Cake(PromptWindow):
    """Shares a budget among layers by how their attention looks. It reads one number a layer from the device."""

    by_layer = True

    def asked(self, attention_GRWM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c, p = self.config, attention_GRWM
        entropy = -(p * torch.log(p + TINY)).sum()
        variance_GRM = p.var(2, correction=0)
        scores_GM = smooth((p.mean(2) + c.gamma * variance_GRM).flatten(0, 1), c.pool).view(variance_GRM.shape).mean(1)
        return scores_GM, entropy.clamp(min=0) ** (1 / c.tau1) * variance_GRM.sum() ** (1 / c.tau2)

    def scores(self, noted: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return noted[0]

    def allot(self, memories: Sequence[Memory], left: int) -> list[int]:
        preferences = torch.stack([memory.notes[memory.layer][1] for memory in memories]).double().tolist()
        total, whole = len(memories) * (left - self.rows), sum(preferences)
        shares = [total * p / whole if whole > 0 else total / len(memories) for p in preferences]
        return [self.rows + n for n in whole_shares(shares, total, memories[0].count - self.rows)]
