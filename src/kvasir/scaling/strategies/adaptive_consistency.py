"""Majority that stops when the leader is unlikely to be caught (Aggarwal et al. 2023, arXiv 2305.11860), in waves.

With v and w votes for the leader and the runner-up, P(leader > runner-up) under a flat prior is the mass of Beta(v+1,
w+1) above one half, a sum of binomials. Sampling stops when it exceeds ``threshold``, or after ``n`` replies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem, votes
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


def certainty(leader: int, second: int) -> float:
    """P(X > 1/2) for X ~ Beta(leader + 1, second + 1)."""
    total = leader + second + 1
    return sum(math.comb(total, i) for i in range(leader + 1)) / 2**total


@dataclass(frozen=True)
class Config:
    """``wave``: replies drawn at a time."""

    n: int = 16
    threshold: float = 0.95
    wave: int = 2
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n, wave=self.wave)
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"adaptive_consistency:threshold={self.threshold:g} must lie in [0, 1]")


class AdaptiveConsistency(Strategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        samples: list[Sample] = []
        while len(samples) < self.config.n:
            wave = await context.sample(
                context.endpoint(self.config.model),
                problem.messages,
                min(self.config.wave, self.config.n - len(samples)),
            )
            samples += wave
            context.keep(by_majority(problem, samples))
            top = [count for _, count in votes(problem, samples).most_common(2)] + [0, 0]
            if not wave or certainty(top[0], top[1]) > self.config.threshold:
                break
        return by_majority(problem, samples, drawn=len(samples))
