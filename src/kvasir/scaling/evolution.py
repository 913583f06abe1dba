"""Operators of evolution over candidates: selection, fitness, routing, lite aggregation, update, final pick.

*Difficulty* is larger for a harder group, whatever the signal. Tiers are listed cheapest first. A seeded shuffle breaks
ties. A quota is exact, while percentiles of tied values are not.

Shape suffixes: M groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.scaling.endpoint import Endpoint, Messages, Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem, majority, own_confidences, votes


@dataclass(slots=True, eq=False)
class Candidate:
    """A solution in a population.

    ``messages``: the prompt that made it and under which it is scored. ``confidence``: by the scorer; None: not asked
    yet, or refused.
    """

    sample: Sample
    messages: Messages
    confidence: float | None = None

    @property
    def text(self) -> str:
        return self.sample.text


def uniform_groups(rng: random.Random, size: int, count: int, k: int) -> list[list[int]]:
    """``count`` independent groups of ``k`` different members out of ``size``."""
    return [rng.sample(range(size), k) for _ in range(count)]


def weighted_groups(rng: random.Random, fitness: Sequence[float], count: int, k: int, zeta: float) -> list[list[int]]:
    """Groups whose members are drawn one by one, with probability in proportion to exp(fitness / zeta)."""

    def gumbel() -> float:
        return -math.log(-math.log(max(rng.random(), 1e-300)))

    groups = []
    for _ in range(count):
        keys = [f / zeta + gumbel() for f in fitness]  # the k largest keys are such a draw
        groups.append(sorted(range(len(fitness)), key=lambda i: -keys[i])[:k])
    return groups


async def confidence(context: Context, scorer: Endpoint, candidate: Candidate) -> None:
    """Fill in the scorer's confidence once.

    It is free for the scorer's own texts and costs one prompt for those of other models.
    """
    if candidate.confidence is None and candidate.sample.endpoint == scorer.name:
        candidate.confidence = candidate.sample.confidence
    if candidate.confidence is None:
        score = await context.score(scorer, candidate.messages, candidate.sample)
        candidate.confidence = score.confidence if score else None


def confidence_difficulty(group: Sequence[Candidate]) -> float:
    """Minus the mean confidence of the members that have one.

    Infinite when none has: nothing is known, so the strongest model gets the group.
    """
    known = [c.confidence for c in group if c.confidence is not None]
    return -sum(known) / len(known) if known else math.inf


def diversity_difficulty(problem: Problem, group: Sequence[Candidate]) -> float:
    """Number of different answers of the members. A member without an answer agrees with nobody."""
    answers = [problem.answer(c.text) for c in group]
    return len({a for a in answers if a is not None}) + sum(a is None for a in answers)


def route_by_rank(rng: random.Random, difficulty_M: Sequence[float], percents: Sequence[float]) -> list[int]:
    """The tier of each group, by rank of difficulty.

    The hardest ``percents[0]`` % go to the last tier, up to ``percents[1]`` % to the one before, the rest to the first.
    Quotas are exactly round(percent x M) groups; ties are in random order.
    """
    tiers = len(percents) + 1
    order = list(range(len(difficulty_M)))
    rng.shuffle(order)
    order.sort(key=lambda i: -difficulty_M[i])
    quotas = [math.floor(p * len(order) / 100 + 0.5) for p in percents]
    routes = [0] * len(order)
    for place, i in enumerate(order):
        routes[i] = tiers - 1 - next((step for step, quota in enumerate(quotas) if place < quota), tiers - 1)
    return routes


def route_by_percentile(difficulty_M: Sequence[float], percents: Sequence[float]) -> list[int]:
    """The tier of each group, by percentiles of fitness as published.

    Fitness (minus difficulty) at or below its ``percents[0]``-th percentile goes to the last tier, and so on. 0 sends
    no group up, 100 sends all.
    """
    fitness = [-d for d in difficulty_M]
    tiers = len(percents) + 1
    bounds = [None if p <= 0 else math.inf if p >= 100 else percentile(fitness, p) for p in percents]
    return [
        tiers - 1 - next((step for step, bound in enumerate(bounds) if bound is not None and f <= bound), tiers - 1)
        for f in fitness
    ]


def route_by_threshold(difficulty_M: Sequence[float], thresholds: Sequence[float]) -> list[int]:
    """The tier of each group, by fixed thresholds.

    Difficulty at or above ``thresholds[0]`` goes to the last tier, at or above ``thresholds[1]`` to the one before.
    """
    tiers = len(thresholds) + 1
    return [
        tiers - 1 - next((step for step, bound in enumerate(thresholds) if d >= bound), tiers - 1) for d in difficulty_M
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation between neighbours.

    Between minus infinity and a number it is minus infinity.
    """
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low if low == high or math.isinf(low) or at == math.floor(at) else low + (high - low) * (at - math.floor(at))


def agreed(problem: Problem, group: Sequence[Candidate]) -> Candidate | None:
    """The surest member of a group whose members all give the same answer; otherwise None.

    This is lite aggregation: no model is asked.
    """
    answers = {problem.answer(c.text) for c in group}
    return surest(group) if len(answers) == 1 and None not in answers else None


def surest(group: Sequence[Candidate]) -> Candidate:
    """The member with the highest confidence; ties go to the shorter.

    The scorer's confidence is used when all have it, otherwise the writer's if one model wrote all.
    """
    if any(c.confidence is None for c in group):
        own = own_confidences([c.sample for c in group])
        return group[max(range(len(group)), key=lambda i: (own[i], -group[i].sample.tokens))]
    return max(group, key=lambda c: (c.confidence, -c.sample.tokens))


def entropy(problem: Problem, population: Sequence[Candidate]) -> float:
    """Entropy of the answers, in bits."""
    counts = votes(problem, [c.sample for c in population]).values()
    whole = sum(counts)
    return -sum(c / whole * math.log2(c / whole) for c in counts)


def unanimous(problem: Problem, population: Sequence[Candidate]) -> bool:
    """Whether all candidates give the same answer. No answers at all are no agreement."""
    answers = {problem.answer(c.text) for c in population}
    return len(answers) == 1 and None not in answers


def leader(problem: Problem, population: Sequence[Candidate]) -> str | None:
    """The answer that a majority vote would choose."""
    chosen = majority(problem, [c.sample for c in population])
    return problem.answer(chosen.text) if chosen else None


def described(problem: Problem, population: Sequence[Candidate], **more: Any) -> dict[str, Any]:
    """A loop's population in a few numbers."""
    known = [c.confidence for c in population if c.confidence is not None]
    return {
        "candidates": len(population),
        "answers": len(votes(problem, [c.sample for c in population])),
        "entropy": round(entropy(problem, population), 4),
        "confidence": round(sum(known) / len(known), 4) if known else None,
        **more,
    }
