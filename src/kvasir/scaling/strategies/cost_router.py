"""Send each problem to the cheapest model that will probably solve it (after EllieSQL, arXiv 2503.22402).

The classifier is a reward model of the cheapest model: its score at the end of the prompt is the chance that this model
solves the problem (``kvasir train prm --labels outcome``). It costs one prompt and no token. ``by=random`` is the
control: it sends a share of the problems to the strongest model without looking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import ConfigError
from kvasir.scaling.difficulty import predicted
from kvasir.scaling.endpoint import Endpoint
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import check_scorer
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    """``prm``: the classifier. ``threshold``: chance from which the cheapest model answers; 0: always, above 1: never.
    ``by``: prm or random; ``share``: of the problems that go to the strongest model at random. ``n``: replies, of which
    the majority counts."""

    prm: str = ""
    threshold: float = 0.5
    by: Literal["prm", "random"] = "prm"
    share: float = 0.5
    n: int = 1

    def __post_init__(self) -> None:
        at_least(0, threshold=self.threshold, share=self.share)
        at_least(1, n=self.n)


class CostRouter(Strategy):
    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        if len(self.endpoints(all_)) < 2:
            raise ConfigError("cost_router needs two models, the cheap one first: --model small --model large")
        if self.config.by == "prm":
            if not self.config.prm:
                raise ConfigError(
                    "cost_router needs a classifier: cost_router:prm=NAME, from 'kvasir train prm --target SMALL', or "
                    "by=random"
                )
            check_scorer(self.name, self.config, all_)

    async def run(self, context: Context, problem: Problem) -> Result:
        c, writers = self.config, self.endpoints(context.endpoints)
        if c.by == "random":
            chance = float(context.rng("tier").random())
            cheap = chance >= c.share
        else:
            chance = await predicted(context.child("difficulty"), problem, context.endpoint(c.prm), writers[0], pilot=0)
            cheap = chance >= c.threshold
        found = writers[0] if cheap else writers[-1]
        replies = await context.sample(found, problem.messages, c.n)
        return by_majority(problem, replies, tier=0 if cheap else len(writers) - 1, chance=round(chance, 5))
