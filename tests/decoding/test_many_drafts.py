"""Several drafts of one position: each rule keeps the model's distribution, and accepts what its paper says."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.decoding.walk import walk
from kvasir.types import Span
from tests.decoding.helpers import sequence
from tests.decoding.many_drafts import coupled, drawn, enumerated, kseq, kseq_factor, multi_round, optimum, programme

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.35, 0.4, 0.05, 0.2])
RULES = {
    "multi-round": multi_round,
    "multi-round-without-replacement": lambda p, q, k: multi_round(p, q, k, replace=False),
    "k-seq": kseq,
}


def pairs(count: int = 40):
    """Random p and q of 2 to 6 tokens, with zeros, equal ones and ones without a common token among them."""
    rng = np.random.default_rng(5)
    for i in range(count):
        size = int(rng.integers(2, 7))
        p, q = rng.dirichlet(np.full(size, 0.5)), rng.dirichlet(np.full(size, 0.5))
        if i % 5 == 1:
            q = np.where(np.arange(size) == rng.integers(size), 0.0, q)
            q /= q.sum()
        if i % 5 == 2:
            p = np.where(np.arange(size) == rng.integers(size), 0.0, p)
            p /= p.sum()
        if i % 5 == 3:
            q = p.copy()
        if i % 10 == 4:
            p, q = np.eye(size)[0], np.eye(size)[1]
        yield p, q


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_distribution_is_kept(rule, k):
    for p, q in pairs():
        emits, accepted = RULES[rule](p, q, k)
        assert np.abs(emits - p).max() < 1e-12, (rule, p, q)
        assert -1e-12 <= accepted <= 1 + 1e-12


def test_the_published_example():
    assert multi_round(P, Q, 1)[1] == pytest.approx(0.75)
    assert multi_round(P, Q, 2)[1] == pytest.approx(0.85)
    assert multi_round(P, Q, 2, replace=False)[1] == pytest.approx(0.89167, abs=1e-5)
    assert kseq(P, Q, 2)[1] == pytest.approx(0.88541, abs=1e-5)
    assert kseq_factor(P, Q, 2) == pytest.approx(1.33852, abs=1e-5)
    assert optimum(P, Q, 2) == pytest.approx(0.9475)
    assert optimum(P, Q, 1) == pytest.approx(0.75), "one draft: nothing beats rejection"
    rng = np.random.default_rng(0)
    assert coupled(P, Q, 1, 20_000, rng) == pytest.approx(0.70448, abs=0.012)
    assert coupled(P, Q, 2, 20_000, rng) == pytest.approx(0.9095, abs=0.009)


def accepted_by_the_walk(drafts: dict[tuple[int, ...], float]) -> float:
    """How often the walk accepts a draft below a row that draws from P. ``drafts``: siblings, chances."""
    found = 0.0
    for siblings, chance in drafts.items():
        rows = 1 + len(siblings)
        span = Span(sequence(0), 0, rows, {"sample": range(rows)}, parents=(-1, *[0] * len(siblings)))
        for token, p in enumerate(P):
            path = walk(span, [0, *siblings], range(rows), range(rows), [token] * rows)
            found += chance * p * (len(path) > 1)
    return found


def test_the_published_example_of_the_walk():
    """Drafts that share no noise with the model: one drawn from Q, the likeliest, and the two likeliest."""
    assert accepted_by_the_walk(drawn(Q, 1)) == pytest.approx(0.3125)
    assert accepted_by_the_walk({(1,): 1.0}) == pytest.approx(0.3)
    assert accepted_by_the_walk({(1, 0): 1.0}) == pytest.approx(0.8)


def test_no_rule_beats_the_optimum_and_k_seq_keeps_its_promise():
    for p, q in pairs():
        for k in (1, 2, 3):
            best = optimum(p, q, k)
            independent = [multi_round(p, q, k)[1], kseq(p, q, k)[1]]
            assert max(independent) <= best + 1e-12
            assert kseq(p, q, k)[1] >= (1 - np.exp(-1)) * best - 1e-9


@pytest.mark.parametrize("size,k", [(3, 3), (4, 2), (8, 2)])
def test_the_optimum_is_that_of_the_linear_programme(size, k):
    rng = np.random.default_rng(size)
    for _ in range(3):
        p, q = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
        assert programme(p, q, k) == pytest.approx(optimum(p, q, k), abs=1e-9)
        assert programme(p, q, k) > optimum(p, q, k - 1) + 1e-6
    assert programme(P, Q, 2) == pytest.approx(0.9475)


CARRIED_OUT = {
    "multi-round": {},
    "multi-round-without-replacement": {"replace": False},
    "k-seq": {"k_seq": True},
}


def variation(p, emits) -> float:
    """Total variation between what is emitted and the model's distribution."""
    return float(np.abs(emits - p).sum() / 2)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_formula_is_what_carrying_the_rule_out_gives(rule, k):
    """Every tuple of drafts at V = 5, and both sides of every coin."""
    options, rng = CARRIED_OUT[rule], np.random.default_rng(3)
    for _ in range(5):
        p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
        found = enumerated(p, q, drawn(q, k, replace=options.get("replace", True)), **options)
        assert variation(p, found) < 1e-12
        assert np.abs(found - RULES[rule](p, q, k)[0]).max() < 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_were_drawn_in_another_way_are_seen(rule, k):
    """Drafts of another temperature, and the likeliest tokens taken for drawn ones."""
    options = CARRIED_OUT[rule]
    hot = Q**0.5 / (Q**0.5).sum()
    likeliest = {tuple(np.argsort(-Q)[:k].tolist()): 1.0}
    for tuples in (drawn(hot, k, replace=options.get("replace", True)), likeliest):
        assert sum(tuples.values()) == pytest.approx(1.0)
        assert variation(P, enumerated(P, Q, tuples, **options)) > 5e-3


@pytest.mark.parametrize("k", [2, 3])
def test_planted_mistakes_bend_the_distribution(k):
    """Each of these must fail the test of the distribution: p kept after a rejection, p of the round before taken for
    a later one, and another factor for K-SEQ."""
    kept = multi_round(P, Q, k, rest=lambda p, q: p)[0]
    first = multi_round(P, Q, k, rest=lambda p, q: np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum())[0]
    factor = kseq(P, Q, k, factor=1.0)[0]
    for wrong in (kept, factor):
        assert np.abs(wrong - P).max() > 1e-3
    if k == 3:
        assert np.abs(first - P).max() > 1e-3
