"""n replies at once, of which the first to end wins (First Finish Search, arXiv 2505.18149).

Replies run in step, so the first is the shortest. The others are cancelled and their tokens paid. Only a reply with an
answer counts; one cut off by the limit never does. This helps when right replies are shorter than wrong ones; check
that they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    n: int = 4
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n)


class FirstFinish(Strategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        samples = await context.sample(
            context.endpoint(self.config.model),
            problem.messages,
            self.config.n,
            finish_after=1,
            accept=lambda text: problem.answer(text) is not None,
        )
        first = [s for s in samples if s.met is not None]
        return by_majority(problem, first or samples, stopped=sum(s.finish == "group" for s in samples))
