"""Parallel chains of sequential revisions (Snell et al. 2024, arXiv 2408.03314).

A chain begins with a plain reply and revises its last attempt ``revisions`` times; ``chains`` of them run side by side.
So chains * (revisions + 1) replies are made: with no revisions it is a majority, with one chain all are sequential. The
result is the answer with the most replies, or, with a reward model or a judge, the answer whose replies' scores sum to
the most. The paper's reviser reads up to four attempts and was trained on them; ours reads the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem, majority
from kvasir.scaling.scorer import scorer
from kvasir.scaling.steps import ScoredStrategy
from kvasir.scaling.strategy import Result, at_least, by_majority, result


@dataclass(frozen=True)
class Config:
    """Options of the chains. ``judge``, ``prm``: what weighs the replies; with neither, all count the same."""

    chains: int = 2
    revisions: int = 3
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, chains=self.chains)
        at_least(0, revisions=self.revisions)


class Revisions(ScoredStrategy):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs = ("tokens",) if config.prm or config.judge else ()  # type: ignore[misc]

    async def run(self, context: Context, problem: Problem) -> Result:
        c, endpoint = self.config, context.endpoint(self.config.model)
        weighed = c.prm or c.judge

        async def chain(scope: Context, _: int) -> list[tuple[Sample, float]]:
            found: list[tuple[Sample, float]] = []
            for _ in range(c.revisions + 1):
                last = problem.prompts.solution(found[-1][0].text) if found else None
                asked = problem.messages if last is None else problem.prompts.refine(problem, last)
                written = await scope.sample(endpoint, asked)
                if not written:
                    break
                # The scorer reads a solution as the problem's own reply, whatever conversation it was written in.
                weight = 1.0
                if weighed:
                    text = problem.prompts.solution(written[0].text)
                    bare = written[0] if last is None else replace(written[0], text=text, ids=(), vocabulary="")
                    seq = Seq(scope, endpoint, tuple(problem.messages), 0, pieces=[bare])
                    weight = await scorer(scope, c).belief(scope, problem, seq)
                found.append((written[0], weight))
            return found

        made = [pair for chain_ in await context.map("chain", chain, range(c.chains)) for pair in chain_]
        samples = [replace(sample, index=i) for i, (sample, _) in enumerate(made)]
        if not weighed:
            return by_majority(problem, samples)
        return result(problem, samples, majority(problem, samples, [weight for _, weight in made]))
