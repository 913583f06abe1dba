"""n replies, and the answer that most of them give (self-consistency, Wang et al. 2022, arXiv 2203.11171).

The baseline of all strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    """``model``: its name; "" is the strongest."""

    n: int = 8
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n)


class Majority(Strategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        samples = await context.sample(context.endpoint(self.config.model), problem.messages, self.config.n)
        return by_majority(problem, samples)
