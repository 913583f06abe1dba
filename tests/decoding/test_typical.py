"""Typical acceptance: equal to its plain rule, and lossy by enumeration. It must never be called lossless."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kvasir.decoding import multi_round
from kvasir.decoding.max_accept import Block, Typical
from kvasir.decoding.typical import threshold
from tests.decoding.helpers import sequence

V = 5
TREES = [  # parents among the rows (0: the anchor's), tokens
    ([0], [2]),
    ([0, 1, 2], [2, 2, 1]),
    ([0, 0, 1, 2, 1], [2, 4, 0, 1, 3]),
    ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
]


def tables(seed: int, rows: int, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def plain(parents, tokens, log_p: np.ndarray, eps: float) -> list[int]:
    """The rows of the emitted path, by the rule as it is written down."""
    best, best_key = [], (0, 0.0)
    for row in range(1, len(tokens) + 1):
        path = [row]
        while parents[path[-1] - 1]:
            path.append(parents[path[-1] - 1])
        chances = []
        for node in path:
            p = np.exp(log_p[parents[node - 1]])
            entropy = -(p * np.log(p)).sum()
            chances.append((p[tokens[node - 1]], min(eps, eps**0.5 * np.exp(-entropy))))
        if all(chance > least for chance, least in chances):
            key = len(path), float(np.prod([chance for chance, _ in chances]))
            if key > best_key:
                best, best_key = path[::-1], key
    return best


@pytest.mark.parametrize("eps", [0.01, 0.09, 0.5])
def test_it_emits_the_longest_path_of_likely_candidates(eps):
    lengths, logs, blocks, wanted, drawn = [], [], [], [], []
    for seed, (parents, tokens) in product(range(20), TREES):
        rows = tables(seed, len(tokens) + 1).log_softmax(-1)
        blocks.append(Block(sequence(0), sum(lengths), 1, tokens, Typical(eps), parents))
        wanted.append((parents, tokens, plain(parents, tokens, rows.double().numpy(), eps)))
        logs.append(rows)
        lengths.append(len(rows))
        drawn += [V + i for i in range(len(rows))]  # draws that are no candidate
    found = torch.tensor(drawn)
    first = np.cumsum([0, *lengths[:-1]])
    multi_round.accept(blocks, first, torch.cat(logs), found)
    for at, count, (_, tokens, path) in zip(first, lengths, wanted):
        row = 0
        for node in path:
            assert found[at + row] == tokens[node - 1]
            row = node
        assert found[at + row] == V + row, "the token after the path is the row's own draw"
        off = set(range(count)) - {0, *path}
        assert all(found[at + other] == V + other for other in off)
    assert {len(path) for *_, path in wanted} >= {0, 1, 2}


def emits(p: torch.Tensor, candidate: int, eps: float) -> torch.Tensor:
    """The first token's distribution with one candidate, by enumeration of the draw."""
    block = Block(sequence(0), 0, 1, [candidate], Typical(eps))
    out = torch.zeros(V)
    for drawn in range(V):
        tokens = torch.tensor([drawn, 0])
        multi_round.accept([block], np.array([0]), torch.stack([p.log(), p.log()]), tokens)
        out[tokens[0]] += p[drawn]
    return out


def test_the_enumerated_distance_from_the_model():
    """The total variation is 1 - p(x) where candidate x passes, and 0 where it does not: no rule is less lossless."""
    distances = []
    for seed, candidate in product(range(12), range(V)):
        p = tables(seed, 1, 1.5)[0].softmax(-1)
        passes = bool(p[candidate] > threshold(p.log(), torch.tensor(0.09)))
        distance = float((emits(p, candidate, 0.09) - p).abs().sum() / 2)
        assert distance == pytest.approx(float(1 - p[candidate]) if passes else 0.0, abs=1e-6)
        distances.append(distance)
    assert np.mean(distances) > 0.3, "called lossless, it would fail any test of the distribution"


def pairs(p: torch.Tensor, after: torch.Tensor, chain: list[int], eps: float) -> torch.Tensor:
    """The joint distribution [V, V] of the first two tokens with two candidates in a chain, by enumeration of draws.

    p [V]: the model's distribution; after [V, V]: the one after each first token.
    """
    logs = torch.stack([p, after[chain[0]], after[chain[0]]]).log()
    out = torch.zeros(V, V)
    for first, second in product(range(V), repeat=2):
        tokens = torch.tensor([first, second, 0])
        multi_round.accept([Block(sequence(0), 0, 1, chain, Typical(eps))], np.array([0]), logs, tokens)
        chance = p[first] * after[chain[0]][second]
        if tokens[0] == chain[0]:
            out[tokens[0], tokens[1]] += chance
        else:  # the chain's second row says nothing about what follows another token
            out[tokens[0]] += chance * after[tokens[0]]
    return out


def test_the_enumerated_distance_of_two_tokens():
    """Two candidates that pass are emitted whatever was drawn, so the distance grows with the chain: 1 - p(x) p(y | x),
    where x alone passes 1 - p(x), and 0 where x does not."""
    kinds, eps = {}, 0.09
    for seed, chain in product(range(4), product(range(V), repeat=2)):
        rows = tables(seed, V + 1, 1.5).softmax(-1)
        p, after = rows[0], rows[1:]
        (x, y), bound = chain, torch.tensor(eps)
        first, second = p[x] > threshold(p.log(), bound), after[x][y] > threshold(after[x].log(), bound)
        wanted = 0.0 if not first else 1 - p[x] * (after[x][y] if second else 1.0)
        found = pairs(p, after, list(chain), eps)
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
        assert float((found - p[:, None] * after).abs().sum() / 2) == pytest.approx(float(wanted), abs=1e-5)
        kinds[bool(first), bool(first and second)] = float(wanted)
    assert len(kinds) == 3, "no candidate passes, the first one, and both"
