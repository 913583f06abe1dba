"""k replies at once; the m that finish thinking first vote, and the others are cancelled (short-m@k, arXiv 2505.17813).

``on``: the text that ends thinking, for example ``</think>``; "eos" for models that do not mark it. Ties go to the
shorter reply.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    m: int = 3
    k: int = 8
    on: str = "eos"
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, m=self.m)
        if self.m > self.k:
            raise ConfigError(f"short_m_at_k: m={self.m} of k={self.k} replies cannot vote")


class ShortMAtK(Strategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        samples = await context.sample(
            context.endpoint(self.config.model),
            problem.messages,
            self.config.k,
            finish_after=self.config.m,
            on=self.config.on,
        )
        first = [s for s in samples if s.met is not None]
        return by_majority(problem, first or samples, stopped=sum(s.finish == "group" for s in samples))
