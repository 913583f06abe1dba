"""Drawn trees keep the model's joint distribution, through growth, cuts and verification; planted mistakes do not."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kvasir.decoding import multi_round
from kvasir.decoding.max_accept import DRAWN, Block
from kvasir.speculation.drafter import Ask
from kvasir.speculation.growth import Growth
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence
from tests.decoding.helpers import sequence

V, LENGTH, SAMPLES = 5, 2, 1_600
MOST = 67.0  # chi-square of 24 degrees of freedom at level 1e-5, rounded up


def tables(seed: int, spread: float) -> dict[tuple[int, ...], torch.Tensor]:
    """Log-weights of the next token by the tokens before it."""
    rng = torch.Generator().manual_seed(seed)
    return {
        path: spread * torch.randn(V, generator=rng)
        for length in range(LENGTH + 2)
        for path in product(range(V), repeat=length)
    }


MODEL, DRAFTER = tables(1, 1.2), tables(2, 1.2)
DRAFTER = {path: 0.4 * MODEL[path] + 1.0 * DRAFTER[path] for path in MODEL}


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_of(tree, tree.parents[node]), tree.tokens[node])


class Tables:
    """A draft model that looks its distributions up."""

    def expand(self, asks, trees, first):
        return [
            torch.stack([DRAFTER[path_of(tree, node)] for node in ([-1] if at < 0 else range(at, len(tree)))])
            for tree, at in zip(trees, first)
        ]


def sequences(count: int) -> list[Sequence]:
    return [sequence(0, temperature=1.0, seed=i) for i in range(count)]


def grown(seqs: list[Sequence]) -> list[DraftTree]:
    growth = Growth("dyspec", 3, LENGTH, 0.15)
    trees = []
    for g in growth.grow(Tables(), [Ask(seq, 6, LENGTH) for seq in seqs], multi_round.drawing_stream):
        multi_round.keep_drawn(g.ask.seq, g.tree, g.weights)
        trees.append(g.tree)
    return trees


def emitted(seqs: list[Sequence], trees: list[DraftTree]) -> np.ndarray:
    """The first two tokens [N, 2] that each tree's verification emits, filled up by the model."""
    blocks, rows, logs = [], [], []
    for seq, tree in zip(seqs, trees):
        rows.append(len(logs))
        parents = [parent + 1 for parent in tree.parents]
        if tree.tokens:
            blocks.append(Block(seq, rows[-1], len(seq.tokens) - 1, tree.tokens, seq.state[DRAWN][1], parents))
        logs += [MODEL[path_of(tree, node)] for node in range(-1, len(tree))]
    final, rng = torch.stack(logs).log_softmax(-1), torch.Generator().manual_seed(9)
    tokens = torch.multinomial(final.exp(), 1, generator=rng)[:, 0]  # what the rows draw without the rule
    multi_round.accept(blocks, np.array([r for r, tree in zip(rows, trees) if tree.tokens]), final, tokens)
    found = []
    for row, tree in zip(rows, trees):
        path, node = [int(tokens[row])], tree.path([int(tokens[row])])
        if node:
            path.append(int(tokens[row + 1 + node[0]]))
        else:
            path.append(int(torch.multinomial(MODEL[path[0],].softmax(-1), 1, generator=rng)))
        found.append(path)
    return np.array(found)


def far(found: np.ndarray) -> bool:
    """Whether the pairs of tokens differ from the model's joint distribution (chi-square, level 1e-5)."""
    expected = MODEL[()].softmax(-1)[:, None] * torch.stack([MODEL[i,].softmax(-1) for i in range(V)])
    seen = np.bincount(found[:, 0] * V + found[:, 1], minlength=V * V)
    wanted = len(found) * expected.numpy().ravel()
    return ((seen - wanted) ** 2 / wanted).sum() > MOST


@pytest.fixture(scope="module")
def drawn():
    seqs = sequences(SAMPLES)
    return seqs, grown(seqs)


def test_the_joint_distribution_is_the_models(drawn):
    seqs, trees = drawn
    assert len({len(tree) for tree in trees}) > 1 and max(max(tree.depths) for tree in trees) == 1
    assert not far(emitted(seqs, trees))


def test_it_is_with_trees_that_a_budget_cut(drawn):
    """The estimates of drawn nodes do not know their tokens, so cutting by them is allowed."""
    seqs, trees = drawn
    cut = [tree.keep(sorted(range(len(tree)), key=lambda n: (tree.depths[n], -tree.est[n]))[:3]) for tree in trees]
    assert not far(emitted(seqs, cut))


def test_more_is_accepted_than_from_one_draft(drawn):
    seqs, trees = drawn
    right = np.mean([bool(tree.path([int(first)])) for tree, (first, _) in zip(trees, emitted(seqs, trees))])
    p, q = MODEL[()].softmax(-1), DRAFTER[()].softmax(-1)
    assert right > torch.minimum(p, q).sum() + 0.05


def _round_before(monkeypatch):
    real = multi_round._Tree.__init__

    def init(self, block):
        real(self, block)
        self.source = [0] * len(self.source)

    monkeypatch.setattr(multi_round._Tree, "__init__", init)


VERIFYING = {
    "the rest is p": lambda m: m.setattr(multi_round, "rest", lambda p, q: p),
    "q keeps a token that was drawn": lambda m: m.setattr(multi_round, "without", lambda q, x: q),
    "a level is verified against the round before": _round_before,
}
REAL_KEEP = multi_round.keep_drawn
DRAWING = {
    "q of another temperature": lambda m: m.setattr(
        multi_round, "keep_drawn", lambda seq, tree, w: REAL_KEEP(seq, tree, [x / 2.5 for x in w])
    ),
    "the likeliest taken for drawn": lambda m: m.setattr(
        "kvasir.speculation.growth.gumbel", lambda s, p, size: torch.zeros(len(s), size)
    ),
}


@pytest.mark.parametrize("name", VERIFYING)
def test_a_mistake_of_the_verification_is_seen(name, drawn, monkeypatch):
    VERIFYING[name](monkeypatch)
    assert far(emitted(*drawn))


@pytest.mark.parametrize("name", DRAWING)
def test_a_mistake_of_the_drawing_is_seen(name, monkeypatch):
    DRAWING[name](monkeypatch)
    seqs = sequences(SAMPLES // 2)
    assert far(emitted(seqs, grown(seqs)))
