"""Particle filtering over solution steps (arXiv 2502.01618): sample in proportion to the judge's belief.

A search for the judge's favourite would exploit the judge's mistakes; sampling does so less. N particles each write a
step. Weights are softmax(logit(r) / tau) of the judge's belief r in each. N particles are drawn with replacement, and
these continue. A particle that has ended keeps weight 1 (``finished=unit``, proper) or its last weight (``last``, as
published).

``iterations`` above 1 is the paper's particle Gibbs: each further pass keeps one particle of the pass before, drawn by
weight, as its first one. That particle is weighed and copied like the others but never dropped, so the passes are a
Markov chain whose limit is the posterior even for small N. It costs no tokens again; the N - 1 others do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import UNKNOWN, scorer
from kvasir.scaling.steps import ScoredStrategy, discard_others, extend_all
from kvasir.scaling.strategy import Result, at_least, by_majority, result


def resample(rng: random.Random, beliefs: Sequence[float], tau: float) -> list[int]:
    """Draw N indices with replacement. Logits are cut at 30, beyond which nothing changes."""
    logits = [max(-30.0, min(30.0, math.log(max(r, 1e-300)) - math.log(max(1 - r, 1e-300)))) / tau for r in beliefs]
    top = max(logits)
    return rng.choices(range(len(beliefs)), [math.exp(x - top) for x in logits], k=len(beliefs))


@dataclass(frozen=True)
class Config:
    """Options of the filter.

    ``iterations``: 1 is the filter; more are particle Gibbs. ``judge``: the model whose belief counts ("" is the
    writer), or ``prm``: the reward model whose score does. ``pick``: a majority of the particles of all iterations, or
    the particle of the last one with the highest belief.
    """

    N: int = 8
    steps: int = 16
    tokens: int = 64
    tau: float = 1.0
    iterations: int = 1
    finished: str = "unit"
    pick: str = "majority"
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, N=self.N, steps=self.steps, tokens=self.tokens, iterations=self.iterations)
        if self.iterations > 1 and self.N < 2:
            raise ConfigError("particle: Gibbs iterations keep one particle and need another, so take N=2 or more")
        if not self.tau > 0:
            raise ConfigError(f"particle:tau={self.tau:g} must be above 0")
        if self.finished not in ("unit", "last") or self.pick not in ("majority", "belief"):
            raise ConfigError("particle: finished is unit or last, and pick is majority or belief")


@dataclass
class _Reply:
    """A reply in the making. ``beliefs``: the belief in it after each of its pieces."""

    seq: Seq
    beliefs: list[float] = field(default_factory=list)

    @property
    def belief(self) -> float:
        return self.beliefs[-1] if self.beliefs else UNKNOWN


class Particle(ScoredStrategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        c = self.config
        made: list[tuple[str, Sample]] = []
        every: list[_Reply] = []
        last: list[_Reply] = []
        reference: _Reply | None = None
        for i in range(c.iterations):
            scope = context if i == 0 else context.child(f"gibbs{i}")
            last = await self._filter(scope, problem, reference, made, i * c.N)
            every += last
            if i + 1 < c.iterations:
                # The first particle is the reference itself; the others were drawn by weight.
                reference = last[scope.rng("reference").randrange(1, c.N)]
        discard_others(context.ledger, made, [p.seq for p in every])
        samples = [p.seq.sample(i) for i, p in enumerate(every)]
        if c.pick == "majority":
            return by_majority(problem, samples)
        first = len(every) - c.N
        best = max(range(first, len(every)), key=lambda i: (every[i].seq.done, every[i].belief, -i))
        return result(problem, samples, samples[best])

    async def _filter(
        self,
        context: Context,
        problem: Problem,
        reference: _Reply | None,
        made: list[tuple[str, Sample]],
        before: int,
    ) -> list[_Reply]:
        """One pass of the filter; ``reference`` stays the first particle throughout. Pieces are added to ``made``.

        ``before``: particles of earlier passes. It numbers the noise of copies, so that none repeats an earlier one.
        """
        c = self.config
        writer, scored = context.endpoint(c.model), scorer(context, c)
        kept = 0 if reference is None else 1
        long = len(reference.beliefs) if reference else 0
        free = [_Reply(context.open(writer, problem.messages)) for _ in range(c.N - kept)]
        for t in range(c.steps):
            scope = context.child(f"step{t}")
            ended = [p.belief if c.finished == "last" else UNKNOWN for p in free]  # even odds: weight 1
            now, pieces = await extend_all(scope, scored, problem, [p.seq for p in free], c.tokens, ended)
            made += [(writer.name, piece) for written in pieces for piece in written]
            if not any(pieces) and t >= long:
                break
            for particle, written, r in zip(free, pieces, now):
                particle.beliefs += [r] * len(written)
            weights, particles = now, free
            if reference is not None:
                over = reference.belief if c.finished == "last" else UNKNOWN
                weights = [reference.beliefs[t] if t < long else over, *now]
                particles = [self._begun(reference, t + 1), *free]
            drawn = resample(scope.rng("resample"), weights, c.tau)[: c.N - kept]
            # The first child of a particle keeps its noise, the others get noise of their own. Pieces that follow the
            # reference's beginning always get noise of their own, or they would repeat it.
            first = {0} if kept else set()
            grown = []
            for place, i in enumerate(drawn):
                seq = particles[i].seq
                seq = seq if i not in first else seq.fork(before + place + 1)[-1]
                grown.append(_Reply(seq, list(particles[i].beliefs)))
                first.add(i)
            free = grown
            if all(p.seq.done for p in free) and t + 1 >= long:
                break
        return [reference, *free] if reference is not None else free

    @staticmethod
    def _begun(whole: _Reply, steps: int) -> _Reply:
        """The first steps of a particle."""
        seq = whole.seq.fork(1)[0]
        seq.pieces = seq.pieces[:steps]
        return _Reply(seq, whole.beliefs[:steps])
