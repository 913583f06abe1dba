"""Prediction of a problem's difficulty by a reward model."""

from __future__ import annotations

from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import UNKNOWN


async def predicted(context: Context, problem: Problem, prm: Endpoint, writer: Endpoint, pilot: int) -> float:
    """Predict the score of a problem; larger is easier. ``pilot``: replies to score (0: the prompt alone)."""
    if not pilot:
        found = await context.score(prm, problem.messages, Sample(0, "", 0, "length", vocabulary=prm.vocabulary))
        return UNKNOWN if found is None or found.reward is None else found.reward
    samples = await context.sample(writer, problem.messages, pilot)
    context.ledger.discard(writer.name, sum(s.tokens for s in samples if s.finish in ("stop", "length")))

    async def score(scope: Context, sample: Sample) -> float:
        found = await scope.score(prm, problem.messages, sample)
        return UNKNOWN if found is None or found.reward is None else found.reward

    scores = await context.map("pilot", score, samples)
    return sum(scores) / len(scores) if scores else UNKNOWN
