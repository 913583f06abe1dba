"""Recursive self-aggregation (arXiv 2509.26626): N replies, each replaced T - 1 times by an aggregation of K of them.

The same as `squeeze_evolve` with one model, written without its operators. A test compares the two call by call.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority


@dataclass(frozen=True)
class Config:
    """``T`` counts the first replies as a loop: T=1 is a majority of N."""

    N: int = 16
    K: int = 4
    T: int = 10
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, K=self.K, T=self.T)
        if self.K > self.N:
            raise ConfigError(f"rsa: K={self.K} of N={self.N} replies cannot be aggregated")


class RSA(Strategy):
    def check(self, all_, prompts) -> None:
        super().check(all_, prompts)
        if prompts.most < self.config.K:
            raise ConfigError(
                f"rsa: K={self.config.K} is more than the {prompts.most} candidates a prompt of this task may hold"
            )

    async def run(self, context: Context, problem: Problem) -> Result:
        c, endpoint = self.config, context.endpoint(self.config.model)
        population = await context.sample(endpoint, problem.messages, c.N)
        populations = [[s.text for s in population]]
        for t in range(1, c.T):
            context.keep(by_majority(problem, population))
            if len(population) < c.K:
                break
            scope = context.child(f"loop{t}")
            rng = scope.rng("select")
            groups = [rng.sample(range(len(population)), c.K) for _ in range(c.N)]

            async def aggregate(scope: Context, group: list[int], population: list[Sample] = population) -> Sample:
                messages = problem.prompts.recombine(problem, [population[i].text for i in group])
                made = await scope.sample(endpoint, messages)
                return made[0] if made else population[group[0]]

            population = await scope.map("group", aggregate, groups)
            populations.append([s.text for s in population])
        found = by_majority(problem, population)
        found.populations = populations
        return found
