"""Ask the cheapest model for a few replies, and the next model unless enough of them agree.

This is an agreement cascade (after EllieSQL's cascade, arXiv 2503.22402). It needs no training, so it is the control
for every learned router. The cheap replies are paid in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    """Options of the cascade.

    ``n``: replies of every tier. ``agree``: how many must give the same answer to stop there. ``last``: replies of the
    strongest model.
    """

    n: int = 4
    agree: int = 3
    last: int = 4

    def __post_init__(self) -> None:
        at_least(1, n=self.n, agree=self.agree, last=self.last)
        if self.agree > self.n:
            raise ConfigError(f"cascade: agree={self.agree} of n={self.n} replies never agree")


class Cascade(Strategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        *cheap, strongest = context.endpoints
        for tier, endpoint in enumerate(cheap):
            found = by_majority(problem, await context.sample(endpoint, problem.messages, self.config.n), tier=tier)
            if max(found.votes.values(), default=0) >= self.config.agree:
                return found
            context.keep(found)
        return by_majority(
            problem, await context.sample(strongest, problem.messages, self.config.last), tier=len(cheap)
        )
