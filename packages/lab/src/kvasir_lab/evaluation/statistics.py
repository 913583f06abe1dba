"""The statistics behind every quality figure: intervals, paired tests, sample sizes, and scores of sampled pools.

Nothing is assumed to be normal where counting is possible: Wilson's interval for a share, the exact McNemar test and a
bootstrap over problems for two configurations on the same problems, and closed forms for pass@k and majority@k.

Shape suffixes: N problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]


def quantile(share: float) -> float:
    """The point below which a standard normal falls with probability ``share``."""
    return NormalDist().inv_cdf(share)


def wilson(right: int, total: int, confidence: float = 0.95) -> Interval:
    """Bounds of the true share behind ``right`` of ``total`` (Wilson 1927); (0, 1) when ``total`` is 0."""
    if not 0 <= right <= total:
        raise ValueError(f"{right} of {total} is no share")
    if total == 0:
        return 0.0, 1.0
    z, p = quantile(0.5 + confidence / 2), right / total
    middle, half = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    low, high = (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)
    return (0.0 if right == 0 else low), (1.0 if right == total else high)


def bootstrap(
    amounts: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    *,
    seed: int = 0,
    resamples: int = 10_000,
) -> Interval:
    """95 % percentile interval of sum(amounts) / sum(weights) over resampled problems; of the mean without ``weights``.

    amounts, weights [N]. For a paired comparison, give the difference of the two arms on each problem.
    """
    amounts_N = np.asarray(amounts, dtype=np.float64)
    weights_N = np.ones_like(amounts_N) if weights is None else np.asarray(weights, dtype=np.float64)
    if not len(amounts_N) or amounts_N.shape != weights_N.shape:
        raise ValueError(
            f"{amounts_N.shape} amounts and {weights_N.shape} weights: "
            "give one of each for every problem, and at least one problem"
        )
    rng, total, drawn = np.random.default_rng(seed), len(amounts_N), []
    chunk = max(1, (1 << 20) // total)
    for first in range(0, resamples, chunk):
        index = rng.integers(0, total, (min(chunk, resamples - first), total))
        drawn.append(amounts_N[index].sum(1) / weights_N[index].sum(1))
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> Interval:
    """95 % interval of the mean of N shares (0 to 1), by bootstrap over problems.

    Resampling values that are all equal shows no spread, although a few problems prove little. So values that are all 0
    or all 1 get Wilson's bounds for as many problems.
    """
    values_N = np.asarray(values, dtype=np.float64)
    if len(values_N) and np.all(values_N == values_N[0]) and values_N[0] in (0.0, 1.0):
        return wilson(int(values_N.sum()), len(values_N))
    return bootstrap(values_N, seed=seed)


def difference_interval(differences: Sequence[float] | np.ndarray, *, seed: int = 0) -> Interval:
    """95 % interval of a mean paired difference (-1 to 1).

    When no problem differs, its bounds are the largest share that could differ, in both directions.
    """
    low, high = mean_interval(differences, seed=seed)
    return (-high, high) if not np.any(differences) else (low, high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that neither arm is better, from the numbers of problems that only one arm solves."""
    total, least = only_first + only_second, min(only_first, only_second)
    if least < 0:
        raise ValueError(f"counts {only_first} and {only_second} must not be negative")
    below = sum(math.comb(total, i) for i in range(least + 1))
    return min(1.0, 2 * below / 2**total)


def problems_needed(differences: Sequence[float] | np.ndarray, power: float = 0.8) -> int | None:
    """Problems that a two-sided paired test at 5 % needs to see the mean of these differences; None when it is zero.

    differences [N]: second arm minus first, by problem. For right or wrong (-1, 0, 1) this is Connor's formula (1987)
    for McNemar's test. The variance is the share of problems that differ under "no difference", and that minus the
    squared mean otherwise.
    """
    d = np.asarray(differences, dtype=np.float64)
    mean = float(d.mean())
    if mean == 0:
        return None
    square = float((d * d).mean())
    reach = quantile(0.975) * math.sqrt(square) + quantile(power) * math.sqrt(max(0.0, square - mean * mean))
    return math.ceil((reach / mean) ** 2 - 1e-9)


def pass_at_k(right: int, total: int, k: int) -> float:
    """Chance that at least one of ``k`` samples is right when ``right`` of a pool of ``total`` are.

    The unbiased estimator of Chen et al. (2021).
    """
    if not (0 <= right <= total and 1 <= k <= total):
        raise ValueError(f"k={k} with {right} of {total} right")
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer among ``k`` samples of the pool is right: exact, over all choices of ``k``.

    ``answers``: the canonical answer of each sample; None (no answer found) casts no vote. Ties are broken evenly.
    Without any vote the problem counts as wrong. Samples with the same answer should agree in ``right``; if they do
    not, one of them is drawn at random.
    """
    if len(answers) != len(right) or not 1 <= k <= len(answers):
        raise ValueError(f"k={k} with {len(answers)} answers and {len(right)} marks")
    sizes = Counter(a for a in answers if a is not None)
    correct = Counter(a for a, r in zip(answers, right) if a is not None and r)
    silent = len(answers) - sum(sizes.values())
    chance = 0.0
    for answer, good in correct.items():
        others = [size for other, size in sizes.items() if other != answer]
        wins = sum(
            math.comb(sizes[answer], votes) * _choices(others, silent, votes, k - votes)
            for votes in range(1, min(k, sizes[answer]) + 1)
        )
        chance += good / sizes[answer] * wins
    return chance / math.comb(len(answers), k)


def _choices(sizes: Sequence[int], silent: int, votes: int, room: int) -> float:
    """Ways to choose ``room`` samples from the other answers and the silent ones so that none has more than ``votes``.

    A choice in which t answers have exactly ``votes`` counts 1 / (1 + t).
    """
    ways = {(0, 0): 1}  # (chosen so far, answers that tie) -> number of choices
    for size in sizes:
        grown: Counter[tuple[int, int]] = Counter()
        for (chosen, ties), count in ways.items():
            for take in range(min(size, votes, room - chosen) + 1):
                grown[chosen + take, ties + (take == votes)] += count * math.comb(size, take)
        ways = grown
    return sum(count * math.comb(silent, room - chosen) / (1 + ties) for (chosen, ties), count in ways.items())
