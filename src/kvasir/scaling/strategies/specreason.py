"""A small model proposes each step of reasoning; a large one judges it and rewrites a step that it rejects.

This is SpecReason (arXiv 2504.07891). It saves decoding steps of the large model, not its operations: the large model
still reads every token. The published judge gives a digit from 0 to 9. Ours is P(yes) as the next token, in one prompt,
and accepts from ``threshold`` on.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.steps import STEP, belief, step
from kvasir.scaling.strategy import Result, Strategy, at_least, result


@dataclass(frozen=True)
class Config:
    """``threshold``: 0 uses the small model alone; above 1 the large one alone, with the small one's work wasted."""

    threshold: float = 0.7
    steps: int = 32
    tokens: int = 64

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, tokens=self.tokens)


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
            if not await step(scope, draft, STEP, c.tokens):
                break
            if await belief(scope, large, problem, draft.text) >= c.threshold:
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
