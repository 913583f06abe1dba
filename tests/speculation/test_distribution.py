"""The joint distribution of three tokens through the engine, with drafts, equals its enumeration: chi-square with 64
cells.

Four tokens are allowed, so the reference has no noise of its own: every conditional comes from the plain engine.
Identity tests compare one stream at a time; this test would also see a bias that plain decoding shares.
"""

from __future__ import annotations

import itertools
import math

import pytest

from kvasir.decoding import walk
from kvasir.speculation.tree import DraftTree
from tests.speculation.helpers import FEW, Hostile, WithGuests, driver, install
from tests.speculation.test_mutations import first_child

PROMPT = [300 + 7 * i for i in range(20)]
SAMPLES = 800
RARE = 5  # cells expected less often are counted as one


def limit(freedom: int) -> float:
    """Return the quantile of chi-square at 1e-4 (Cornish-Fisher)."""
    return freedom + 3.72 * math.sqrt(2 * freedom) + 2 / 3 * (3.72**2 - 1)


class Guess(Hostile):
    """Propose the same tree for every sequence: two levels, with all four tokens on the first."""

    def propose(self, asks):
        trees = []
        for ask in asks:
            tree = self.tree_of(ask)
            trees.append(tree.keep(range(len(tree))))
        return trees

    @staticmethod
    def tree_of(ask):
        tree = DraftTree()
        for i, token in enumerate(FEW[: ask.max_nodes]):
            tree.add(-1, token, 0.5 - i / 10)
        for token in FEW[:2]:
            if len(tree) < ask.max_nodes and ask.max_depth > 1:
                tree.add(1, token, 0.4)
        return tree


def joint() -> dict[tuple[int, ...], float]:
    """Return the probability of every output, from the processed log-probabilities of the plain engine."""
    d = driver(max_num_seqs=32)
    prefixes = [p for n in range(3) for p in itertools.product(FEW, repeat=n)]
    d.run(
        [
            d.request(
                str(p),
                [*PROMPT, *p],
                temperature=6.0,
                allowed_token_ids=FEW,
                max_tokens=1,
                ignore_eos=True,
                logprobs=4,
                seed=1,
                logprobs_mode="processed",
            )
            for p in prefixes
        ]
    )
    step = {p: {i: math.exp(v) for i, v in d.outputs[str(p), 0].logprobs[0].top} for p in prefixes}
    d.close()
    return {cell: math.prod(step[cell[:i]][cell[i]] for i in range(3)) for cell in itertools.product(FEW, repeat=3)}


class GuessWithGuests(WithGuests):
    """Propose the same trees with guests behind the anchor and every other node."""

    def _tree(self, ask):
        tree = Guess.tree_of(ask)
        tree = tree.keep(range(len(tree)))
        tree.guests = {node: ((0, 1), (2,)) for node in range(-1, len(tree), 2)}
        return tree


def chi_square(expected: dict[tuple[int, ...], float], guests: bool = False) -> tuple[float, float]:
    """Return the statistic and its bound."""
    d = driver(
        "replay",
        max_num_seqs=64,
        batch_invariant=False,
        check=False,
        poison=False,
        num_pages=512,
        max_num_batched_tokens=512,
    )
    install(d, GuessWithGuests({}, d.engine.runner.model.spec.hidden_size) if guests else Guess({}))
    for request in [
        d.request(str(i), PROMPT, temperature=6.0, allowed_token_ids=FEW, max_tokens=7, ignore_eos=True, seed=1000 + i)
        for i in range(SAMPLES)
    ]:
        d.submit(request)
    while d.engine.has_work():
        d.step()
    seen: dict[tuple[int, ...], int] = {}
    for out in d.outputs.values():
        first = tuple(out.tokens[:3])  # near the end there is no room for trees
        seen[first] = seen.get(first, 0) + 1
    assert d.engine.stats().accepted_tokens > SAMPLES and (
        not guests or d.engine.proposals.drafting.drafter.rows > SAMPLES
    )
    d.close()
    cells = [(seen.get(cell, 0), SAMPLES * p) for cell, p in expected.items()]
    often, rare = [c for c in cells if c[1] >= RARE], [c for c in cells if c[1] < RARE]
    assert len(often) > 10
    often.append((sum(n for n, _ in rare), max(1e-9, sum(e for _, e in rare))))
    return sum((n - e) ** 2 / e for n, e in often), limit(len(often) - 1)


@pytest.fixture(scope="module")
def expected():
    cells = joint()
    assert abs(sum(cells.values()) - 1) < 1e-5
    return cells


@pytest.mark.parametrize("guests", [False, True])
def test_the_joint_distribution_is_the_models(expected, guests):
    found, most = chi_square(expected, guests)
    assert found < most


def test_a_biased_walk_is_seen(expected, monkeypatch):
    monkeypatch.setattr(walk, "walk", first_child)
    found, most = chi_square(expected)
    assert found > most
