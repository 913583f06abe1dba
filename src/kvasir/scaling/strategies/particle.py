"""Particle filtering over solution steps (arXiv 2502.01618): sample in proportion to the judge's belief.

A search for the judge's favourite would exploit the judge's mistakes; sampling does so less. N particles each write a
step. Weights are softmax(logit(r) / tau) of the judge's belief r in each. N particles are drawn with replacement, and
these continue. A particle that has ended keeps weight 1 (``finished=unit``, proper) or its last weight (``last``, as
published).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.steps import discard_others, extend_all
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority, result


def resample(rng: random.Random, beliefs: Sequence[float], tau: float) -> list[int]:
    """Draw N indices with replacement. Logits are cut at 30, beyond which nothing changes."""
    logits = [max(-30.0, min(30.0, math.log(max(r, 1e-300)) - math.log(max(1 - r, 1e-300)))) / tau for r in beliefs]
    top = max(logits)
    return rng.choices(range(len(beliefs)), [math.exp(x - top) for x in logits], k=len(beliefs))


@dataclass(frozen=True)
class Config:
    """Options of the filter.

    ``judge``: the model whose belief counts ("" is the writer). ``pick``: a majority, or the particle with the highest
    belief.
    """

    N: int = 8
    steps: int = 16
    tokens: int = 64
    tau: float = 1.0
    finished: str = "unit"
    pick: str = "majority"
    judge: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, N=self.N, steps=self.steps, tokens=self.tokens)
        if not self.tau > 0:
            raise ConfigError(f"particle:tau={self.tau:g} must be above 0")
        if self.finished not in ("unit", "last") or self.pick not in ("majority", "belief"):
            raise ConfigError("particle: finished is unit or last, and pick is majority or belief")


class Particle(Strategy):
    needs = ("tokens", "choose")

    async def run(self, context: Context, problem: Problem) -> Result:
        c = self.config
        writer, judge = context.endpoint(c.model), context.endpoint(c.judge or c.model)
        seqs = [context.open(writer, problem.messages) for _ in range(c.N)]
        beliefs, made = [0.5] * c.N, []
        for t in range(c.steps):
            scope = context.child(f"step{t}")
            ended = beliefs if c.finished == "last" else [0.5] * c.N  # even odds: weight 1
            now, pieces = await extend_all(scope, judge, problem, seqs, c.tokens, ended)
            made += [(writer.name, piece) for written in pieces for piece in written]
            if not any(pieces):
                break
            last = [r if written else b for written, r, b in zip(pieces, now, beliefs)]
            drawn = resample(scope.rng("resample"), now, c.tau)
            # The first child of a particle keeps its noise, the others get noise of their own.
            first: set[int] = set()
            grown = []
            for place, i in enumerate(drawn):
                grown.append(seqs[i] if i not in first else seqs[i].fork(place + 1)[place])
                first.add(i)
            seqs, beliefs = grown, [last[i] for i in drawn]
            if all(s.done for s in seqs):
                break
        discard_others(context.ledger, made, seqs)
        samples: list[Sample] = [s.sample(i) for i, s in enumerate(seqs)]
        if c.pick == "majority":
            return by_majority(problem, samples)
        return result(problem, samples, samples[max(range(len(samples)), key=lambda i: (seqs[i].done, beliefs[i], -i))])
