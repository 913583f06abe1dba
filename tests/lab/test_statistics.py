"""The statistics against closed forms, enumeration and simulation, each with a case that a wrong formula fails."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_lab.evaluation import statistics as stats

# ------------------------------------------------------------------------------------------------------------- Wilson


@pytest.mark.parametrize(
    "right,total,low,high",
    [
        (10, 20, 0.2993, 0.7007),  # published examples (Newcombe 1998 gives 81/263, 15/148, 0/20 and 1/29)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right, total, low, high):
    assert stats.wilson(right, total) == pytest.approx((low, high), abs=6e-5)


def test_wilson_solves_its_equation():
    """Each bound p satisfies (observed - p)^2 = z^2 p (1 - p) / n, where the normal test just fails."""
    z = stats.quantile(0.995)
    for p in stats.wilson(37, 110, confidence=0.99):
        assert (37 / 110 - p) ** 2 == pytest.approx(z * z * p * (1 - p) / 110)


def test_wilson_at_the_ends():
    assert stats.wilson(0, 0) == (0.0, 1.0)
    assert stats.wilson(5, 5)[1] == 1.0 and stats.wilson(0, 5)[0] == 0.0
    for right, total in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="no share"):
            stats.wilson(right, total)


@pytest.mark.parametrize("p", [0.03, 0.3, 0.9])
def test_wilson_covers(p):
    """The exact chance that the interval holds the truth, summed over all outcomes, is near the stated one."""
    n = 80
    covered = 0.0
    for right in range(n + 1):
        low, high = stats.wilson(right, n)
        if low <= p <= high:
            covered += math.comb(n, right) * p**right * (1 - p) ** (n - right)
    assert 0.92 <= covered <= 0.98


# ------------------------------------------------------------------------------------------------------------ McNemar


@pytest.mark.parametrize(
    "b,c,p", [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375), (6, 16, 0.0524787902832), (0, 1, 1.0)]
)
def test_mcnemar_is_the_sign_test(b, c, p):
    assert stats.mcnemar(b, c) == pytest.approx(p) == stats.mcnemar(c, b)


def test_mcnemar_by_enumeration():
    """Count all outcomes of 9 fair coins that are at least as lopsided as 2 to 7."""
    extreme = sum(1 for coins in itertools.product((0, 1), repeat=9) if min(sum(coins), 9 - sum(coins)) <= 2)
    assert stats.mcnemar(2, 7) == pytest.approx(extreme / 2**9)


def test_mcnemar_takes_large_and_refuses_negative_counts():
    assert 0 < stats.mcnemar(900, 1100) < 1e-5
    with pytest.raises(ValueError, match="negative"):
        stats.mcnemar(-1, 3)


# ---------------------------------------------------------------------------------------------------------- bootstrap


def test_bootstrap_of_a_mean_matches_the_normal_interval():
    values = np.random.default_rng(1).normal(3.0, 2.0, 2000)
    low, high = stats.bootstrap(values, seed=4)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)
    assert (low, high) == stats.bootstrap(values, seed=4) != stats.bootstrap(values, seed=5)


def test_bootstrap_of_a_ratio_weighs_problems():
    """A ratio of sums is not a mean of ratios."""
    amounts, weights = np.array([1.0, 100.0] * 50), np.array([1.0, 400.0] * 50)
    low, high = stats.bootstrap(amounts, weights)
    assert low < 101 / 401 < high < 0.3 < (1.0 + 0.25) / 2


@pytest.mark.parametrize("shift", [0.0, 0.06])
def test_bootstrap_covers_the_true_paired_difference(shift):
    """Simulate 400 comparisons in which one arm alone solves 24 % of the problems.

    About 95 % of the intervals hold the truth.
    """
    rng = np.random.default_rng(11)
    differences = rng.choice([-1, 0, 1], p=[0.12 - shift / 2, 0.76, 0.12 + shift / 2], size=(400, 250))
    inside = 0
    for i, row in enumerate(differences):
        low, high = stats.bootstrap(row, seed=i, resamples=500)
        inside += low <= shift <= high
    assert 0.92 <= inside / 400 <= 0.98


def test_bootstrap_refuses_nothing_and_unequal():
    with pytest.raises(ValueError, match="at least one"):
        stats.bootstrap([])
    with pytest.raises(ValueError, match="one of each"):
        stats.bootstrap([1.0, 2.0], [1.0])


# -------------------------------------------------------------------------------------------------------------- power


def connor(discordant: float, difference: float, power: float = 0.8, alpha: float = 0.05) -> float:
    za, zb = stats.quantile(1 - alpha / 2), stats.quantile(power)
    return (za * math.sqrt(discordant) + zb * math.sqrt(discordant - difference**2)) ** 2 / difference**2


def test_problems_needed_is_connors_formula():
    differences = np.array([1] * 15 + [-1] * 5 + [0] * 80)
    assert stats.problems_needed(differences) == math.ceil(connor(0.20, 0.10)) == 155
    assert stats.problems_needed(-differences) == 155
    assert stats.problems_needed(differences, power=0.9) == math.ceil(connor(0.20, 0.10, power=0.9)) > 155


def test_problems_needed_of_no_difference():
    assert stats.problems_needed([1, -1, 0]) is None


def test_that_many_problems_give_that_power():
    """With the number of problems asked for, the exact McNemar test sees the difference four times in five."""
    up, down = 0.15, 0.05
    need = stats.problems_needed(np.array([1] * 15 + [-1] * 5 + [0] * 80))
    rng = np.random.default_rng(5)
    draws = rng.multinomial(need, [up, down, 1 - up - down], size=2000)
    seen = sum(stats.mcnemar(int(b), int(c)) < 0.05 for b, c, _ in draws) / 2000
    assert 0.70 <= seen <= 0.84  # the exact test is a little conservative
    fewer = rng.multinomial(need // 3, [up, down, 1 - up - down], size=2000)
    assert sum(stats.mcnemar(int(b), int(c)) < 0.05 for b, c, _ in fewer) / 2000 < 0.5


# ------------------------------------------------------------------------------------------------- pass@k, majority@k


def brute_pass(right, k):
    chosen = list(itertools.combinations(right, k))
    return sum(any(c) for c in chosen) / len(chosen)


def brute_majority(answers, right, k):
    """Enumerate every choice of k samples, every winner of a tie, and every sample that gave the winning answer."""
    total, chosen = 0.0, list(itertools.combinations(range(len(answers)), k))
    for index in chosen:
        votes = Counter(answers[i] for i in index if answers[i] is not None)
        best = max(votes.values(), default=0)
        winners = [a for a, n in votes.items() if n == best]
        for winner in winners:
            marks = [right[i] for i in range(len(answers)) if answers[i] == winner]
            total += sum(marks) / len(marks) / len(winners)
    return total / len(chosen)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_by_enumeration(right, data):
    k = data.draw(st.integers(1, len(right)))
    assert stats.pass_at_k(sum(right), len(right), k) == pytest.approx(brute_pass(right, k))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_majority_at_k_by_enumeration(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    marks = data.draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers)))
    for right in ([a == "a" for a in answers], [a in ("a", "b") for a in answers], marks):
        assert stats.majority_at_k(answers, right, k) == pytest.approx(brute_majority(answers, right, k))


def test_majority_by_hand():
    answers, right = ["5", "5", "7", None], [True, True, False, False]
    assert stats.majority_at_k(answers, right, 1) == 0.5  # = pass@1
    assert stats.majority_at_k(answers, right, 4) == 1.0
    assert stats.majority_at_k(["5", "7"], [True, False], 2) == 0.5  # a tie
    assert stats.majority_at_k([None, None], [False, False], 2) == 0.0
    # Votes count canonical answers: four right replies with different answers lose to two equal wrong ones.
    assert stats.majority_at_k(["1+2", "2+1", "3+0", "0+3", "4", "4"], [True] * 4 + [False] * 2, 6) == 0.0


def test_majority_of_64_is_quick_and_a_chance():
    rng = np.random.default_rng(0)
    answers = [str(a) for a in rng.integers(0, 40, 64)]
    values = [stats.majority_at_k(answers, [a in ("1", "2") for a in answers], k) for k in (1, 2, 16, 64)]
    assert all(0 <= v <= 1 for v in values)
    assert values[0] == pytest.approx(sum(a in ("1", "2") for a in answers) / 64)


def test_bad_k():
    for call in (
        lambda: stats.pass_at_k(1, 4, 5),
        lambda: stats.pass_at_k(5, 4, 1),
        lambda: stats.majority_at_k(["a"], [True], 2),
        lambda: stats.majority_at_k(["a"], [True, False], 1),
        lambda: stats.pass_at_k(0, 4, 0),
    ):
        with pytest.raises(ValueError, match="k="):
            call()
