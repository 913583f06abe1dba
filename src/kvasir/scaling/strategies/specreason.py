"""A small model proposes each step of reasoning; a large one judges it and rewrites a step that it rejects.

This is SpecReason (arXiv 2504.07891). It saves decoding steps of the large model, not its operations: the large model
still reads every token. The judge gives a number from 0 to 1 for the price of a prompt, and a step is accepted from
``threshold`` on. By default it is P(yes), what our models were trained for. The published judge gives a digit, of which
it takes a tenth here: the published threshold of 7 is 0.7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import DIGITS, Problem
from kvasir.scaling.scorer import UNKNOWN
from kvasir.scaling.steps import STEP, belief, step
from kvasir.scaling.strategy import Result, Strategy, at_least, result


@dataclass(frozen=True)
class Config:
    """``threshold``: 0 uses the small model alone; above 1 the large one alone, with the small one's work wasted.
    ``score``: P(yes), the likeliest digit, or the mean of all digits by their chances. ``first``: steps that the large
    model writes before the small one may."""

    threshold: float = 0.7
    score: Literal["yes", "digit", "mean"] = "yes"
    first: int = 0
    steps: int = 32
    tokens: int = 64

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, tokens=self.tokens)
        at_least(0, first=self.first)


class SpecReason(Strategy):
    needs = ("tokens", "choose")

    def check(self, all_, prompts) -> None:
        super().check(all_, prompts)
        all_ = self.endpoints(all_)
        if len(all_) < 2:
            raise ConfigError("specreason needs two models, the small one first: --model small --model large")
        if all_[0].vocabulary != all_[-1].vocabulary:
            raise ConfigError(
                f"specreason hands token ids over, and {all_[0].name} and {all_[-1].name} have different vocabularies"
            )

    async def run(self, context: Context, problem: Problem) -> Result:
        c, small, large = self.config, context.endpoints[0], context.endpoints[-1]
        proposer, writer = context.open(small, problem.messages), context.open(large, problem.messages)
        accepted = 0
        for t in range(c.steps):
            scope = context.child(f"step{t}")
            begun = list(writer.pieces)
            draft = Seq(scope, small, proposer.messages, proposer.stream, pieces=begun)
            if t >= c.first and not await step(scope, draft, STEP, c.tokens):
                break
            if t >= c.first and await self._score(scope, large, problem, draft.text) >= c.threshold:
                writer.pieces = draft.pieces
                accepted += 1
            else:
                draft.truncate(len(begun))
                writer = Seq(scope, large, writer.messages, writer.stream, pieces=begun)
                if not await step(scope, writer, STEP, c.tokens):
                    break
            sample: Sample = writer.sample()
            context.keep(result(problem, [sample], sample))
            if writer.done:
                break
        sample = writer.sample()
        return result(problem, [sample], sample, steps=t + 1, accepted=accepted)

    async def _score(self, context: Context, judge: Endpoint, problem: Problem, text: str) -> float:
        """The judge's number for a solution's beginning, 0 to 1; 1/2 when it refuses."""
        if self.config.score == "yes":
            return await belief(context, judge, problem, text)
        found = await context.choose(judge, problem.prompts.rate_step(problem, text), DIGITS)
        if not found:
            return UNKNOWN
        if self.config.score == "digit":
            return int(max(found, key=found.__getitem__)) / 10
        chances = {digit: math.exp(value) for digit, value in found.items()}
        return sum(int(digit) * chance for digit, chance in chances.items()) / sum(chances.values()) / 10
