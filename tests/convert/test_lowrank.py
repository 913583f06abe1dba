"""Factors and ranks by their published forms: CARE's root and SVD, optimality against others, exhaustive allocation."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvasir.convert.lowrank import allocate, factor, mixing

GROUPS, DIM, HIDDEN, ROWS = 2, 8, 24, 400
SIZE = GROUPS * DIM


def layer(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs [T, E] of uneven directions, and the products of keys and values [E, N]."""
    drawn = torch.Generator().manual_seed(seed)
    x, w_k, w_v = (torch.randn(*s, generator=drawn).double() for s in ((ROWS, HIDDEN), (HIDDEN, SIZE), (HIDDEN, SIZE)))
    return x @ torch.diag(torch.rand(HIDDEN, generator=drawn).double() ** 3) @ w_k @ w_k.T / SIZE, w_k, w_v


def gram(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    y = x @ torch.cat(weights, 1)
    return y.T @ y


def ours(x: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, rank: int, sums: torch.Tensor | None = None):
    """The approximated product of keys and values [E, 2 N], balanced as ``factor`` balances."""
    found = factor(gram(x, w_k, w_v) if sums is None else sums, GROUPS, torch.eye(SIZE).double(), rank)
    read = torch.cat((found.key.flatten(0, 1), found.value.flatten(0, 1)))
    return torch.cat((w_k, w_v), 1) @ found.down @ read.T


def ratio(x: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    return (x @ w_k).norm(dim=0).mean() / (x @ w_v).norm(dim=0).mean()


@pytest.mark.parametrize("rank", [3, 8, 20])
def test_cares_published_form_is_the_same_product(rank):
    """SVD of C^(1/2) W, and W' = C^(-1/2) U S V^T."""
    x, w_k, w_v = layer(0)
    x = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).double()
    rho = ratio(x, w_k, w_v)
    w = torch.cat((w_k / rho, w_v), 1)
    values, vectors = torch.linalg.eigh(x.T @ x / ROWS)
    root, back = (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T
    u, s, v = torch.linalg.svd(root @ w, full_matrices=False)
    published = back @ u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank]
    published[:, :SIZE] *= rho
    assert (published - ours(x, w_k, w_v, rank)).abs().max() < 1e-9


def error(x: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, product: torch.Tensor) -> float:
    """Distance of the outputs, with keys as large as values."""
    difference = x @ (torch.cat((w_k, w_v), 1) - product)
    difference[:, :SIZE] /= ratio(x, w_k, w_v)
    return float(difference.norm())


def svd(w: torch.Tensor, rank: int, root: torch.Tensor | None = None) -> torch.Tensor:
    """The best product of ``rank`` after ``root`` [E, E] (None: of the weights themselves)."""
    u = torch.linalg.svd(w if root is None else root @ w, full_matrices=False)
    return w @ u.Vh[:rank].T @ u.Vh[:rank]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rank", [4, 12])
def test_no_other_projection_of_outputs_is_closer(seed, rank):
    """Plain SVD, and SVD under C itself instead of its root."""
    x, w_k, w_v = layer(seed)
    rho = ratio(x, w_k, w_v)
    w, best = torch.cat((w_k / rho, w_v), 1), error(x, w_k, w_v, ours(x, w_k, w_v, rank))
    for other in (svd(w, rank), svd(w, rank, x.T @ x / ROWS)):
        other[:, :SIZE] *= rho
        assert best <= error(x, w_k, w_v, other) * (1 + 1e-12)


def test_the_gram_of_another_layer_is_worse():
    """The control: sums of the wrong layer give a larger error than plain SVD would."""
    x, w_k, w_v = layer(0)
    other = gram(*layer(1))
    right, wrong = (error(x, w_k, w_v, ours(x, w_k, w_v, 12, s)) for s in (None, other))
    assert wrong > 1.2 * right
    assert wrong > error(x, w_k, w_v, svd(torch.cat((w_k, w_v), 1), 12))


def test_full_rank_loses_nothing_under_any_metric():
    x, w_k, w_v = layer(0)
    sums = gram(x, w_k, w_v)
    mix = mixing(sums[:SIZE, :SIZE], GROUPS, DIM, 4, 2)
    both = torch.cat((mix.rope, mix.rest), 1)
    torch.testing.assert_close(both.T @ both, torch.eye(SIZE).double())
    moment = gram(layer(2)[0], layer(2)[1])
    for weights in ((None, None), (moment, moment.T)):
        found = factor(sums, GROUPS, mix.rest, 2 * SIZE - 4, 1.0, *weights)
        read = torch.cat((found.key.flatten(0, 1), found.value.flatten(0, 1)))
        wanted = torch.block_diag(mix.rest @ mix.rest.T, torch.eye(SIZE).double())
        torch.testing.assert_close(found.down @ read.T, wanted, atol=1e-9, rtol=0)


def test_greedy_allocation_is_the_best_of_all():
    """Four layers, every division in steps."""
    drawn = torch.Generator().manual_seed(3)
    spectra = [(torch.rand(24, generator=drawn) ** p).sort(descending=True).values.tolist() for p in (1, 2, 4, 8)]
    weights, step, rank = [1.0, 3.0, 0.5, 2.0], 2, 8
    found = allocate(spectra, rank, alloc="relative", step=step, most=24, weights=weights)

    def kept(ranks):
        return sum(w * sum(s[:r]) / sum(s) for w, s, r in zip(weights, spectra, ranks))

    choices = itertools.product(range(rank // 2, 2 * rank + 1, step), repeat=4)
    best = max(kept(ranks) for ranks in choices if sum(ranks) <= 4 * rank)
    assert kept(found) == pytest.approx(best) and sum(found) == 4 * rank
    paper = allocate(spectra, rank, alloc="care_paper", step=step, most=24)
    assert kept(paper) < best, "the published rule has another aim"


def test_the_published_rule_fills_the_layer_that_decays_fastest():
    """For geometric spectra its score is 1 - q, whatever a layer has left."""
    spectra = [[q**i for i in range(64)] for q in (0.5, 0.9, 0.95, 0.99)]
    ranks = allocate(spectra, 16, alloc="care_paper", step=4, most=64)
    assert ranks[0] == 32 and ranks[-1] == 8
    code = allocate([[0.9**i for i in range(64)]] * 4, 16, alloc="care_code", step=4, most=64)
    assert code == sorted(code, reverse=True) and code[0] > code[-1], "early layers weigh more"
