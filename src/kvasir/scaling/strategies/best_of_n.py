"""Best of n replies by a score: the model's confidence in the reply, or its judgement of it.

``by=confidence`` is free: the mean negative log-probability of the likeliest next tokens while decoding (DeepConf, Fu
et al. 2025). ``lowest`` is that of the weakest passage, the paper's lowest group confidence. ``self``: P(yes) as the
next token after "is your answer right?", one prompt for each reply. ``judge``: a written check, one reply for each.
``prm``: the score of a reward model at the reply's last token. ``weighted`` takes the answer whose replies' scores sum
to the most. Replies that were cut off lose to those that ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem, majority
from kvasir.scaling.scorer import check_scorer
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority, result

SCORES = ("confidence", "lowest", "logprob", "self", "judge", "prm")
NEEDS = {"confidence": "logprobs", "lowest": "logprobs", "logprob": "logprobs", "self": "choose"}


@dataclass(frozen=True)
class Config:
    """``by``: confidence, lowest, logprob (mean a token), self, judge, or prm (then ``prm`` names the reward model)."""

    n: int = 8
    by: str = "confidence"
    weighted: bool = False
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n)
        if self.by not in SCORES:
            raise ConfigError(f"best_of_n:by={self.by} is not one of {', '.join(SCORES)}")
        if (self.by == "prm") != bool(self.prm):
            raise ConfigError("best_of_n: by=prm and prm=NAME belong together; give both or none")


class BestOfN(Strategy):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.needs = (NEEDS[config.by],) if config.by in NEEDS else ()  # type: ignore[misc]

    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        check_scorer(self.name, self.config, all_)

    async def run(self, context: Context, problem: Problem) -> Result:
        endpoint = context.endpoint(self.config.model)
        samples = await context.sample(endpoint, problem.messages, self.config.n)
        if not samples:
            return by_majority(problem, samples)
        context.keep(by_majority(problem, samples))

        async def rate(scope: Context, sample: Sample) -> float | None:
            return await self._score(scope, endpoint, problem, sample)

        found = await context.map("score", rate, samples)
        low = min((s for s in found if s is not None), default=0.0)
        # An unknown score must not win: as a log-probability, 0 would be the best possible.
        scores = [low if s is None else s for s in found]
        if self.config.weighted:
            # Weights must not be negative, otherwise many replies would count for less than one.
            weights = [s if self.config.by in ("self", "judge", "prm") else s - low + 1e-9 for s in scores]
            chosen = majority(problem, samples, weights)
        else:
            chosen = samples[
                max(range(len(samples)), key=lambda i: (samples[i].finish == "stop", scores[i], -samples[i].tokens, -i))
            ]
        return result(problem, samples, chosen, scores=[round(s, 5) for s in scores])

    async def _score(self, context: Context, endpoint: Endpoint, problem: Problem, sample: Sample) -> float | None:
        """The score of a reply; None when it is not known."""
        prompts = problem.prompts
        if self.config.by == "confidence":
            return sample.confidence
        if self.config.by == "lowest":
            return sample.lowest
        if self.config.by == "logprob":
            return None if sample.logprob is None else sample.logprob / max(1, sample.tokens)
        if self.config.by == "prm":
            scored = await context.score(context.endpoint(self.config.prm), problem.messages, sample)
            return scored.reward if scored else None
        if self.config.by == "self":
            found = await context.choose(endpoint, prompts.self_evaluate(problem, sample.text), prompts.verdicts)
            return math.exp(found[prompts.verdicts[0]]) if found else 0.0
        replies = await context.sample(endpoint, prompts.judge_one(problem, sample.text), temperature=0.0)
        verdict = prompts.verdict(replies[0].text) if replies else None
        return 0.5 if verdict is None else float(verdict)
