"""Counts of token rounding, and the upcycled model for it, which computes the same as the one it was made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.kernels.moe_rounding import TILE, Rounding
from kvasir_lab.model import Model, Shape
from kvasir_lab.studies.rounding_counts import counted, logits_of, perplexity, shuffled
from kvasir_lab.studies.upcycle_experts import upcycled

SMALL = Shape(vocab=64, dim=32, layers=2, ffn=24, heads=2, kv_heads=1, head_dim=16, positions=64)
SHAPE = replace(SMALL, ffn=12, experts=6, top_k=2)
IDS = [(7 * i) % 60 for i in range(30)]


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    small = Model(SMALL, seed=2).eval()
    with torch.no_grad():
        for p in small.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0)
    return small, upcycled(small, SHAPE).eval()


@torch.no_grad()
def test_an_upcycled_model_computes_what_it_came_from(models):
    """The control: with the experts in another order it does not, for a row gets a slice twice and misses another."""
    small, made = models
    want, ids = small(torch.tensor([IDS])), torch.tensor([IDS])
    torch.testing.assert_close(made(ids), want, atol=1e-4, rtol=1e-4)
    other = upcycled(small, SHAPE).eval()
    shuffled(other)
    assert (other(ids) - want).abs().max() > 1e-2
    assert perplexity(other, [IDS]) != pytest.approx(perplexity(small, [IDS]), rel=1e-3)


def test_the_routers_logits_are_those_of_all_layers_but_the_last(models):
    (found,) = logits_of(models[1], [IDS, IDS[:5]])
    assert found.shape == (35, 6)
    torch.testing.assert_close(found[30:], found[:5])


def chosen(counts: list[int]) -> torch.Tensor:
    """Logits with which so many rows choose each expert, one expert a row."""
    return torch.cat([5.0 * torch.eye(len(counts))[[i] * count] for i, count in enumerate(counts)])


def test_shares_by_hand():
    """Three experts with a row more than a tile, a row less, and 40 rows: four tiles before rounding."""
    steps, rows = [chosen([TILE + 1, TILE - 1, 40])], 2 * TILE + 40
    down = counted(steps, 1, Rounding("down"))
    assert down["padded"] == pytest.approx(1 - rows / (4 * TILE), abs=1e-5) and down["tiles"] == 0.25
    assert down["none"] == down["fewer"] == down["changed"] == pytest.approx((1 + TILE - 1 + 40) / rows, abs=1e-5)
    nearest = counted(steps, 1, Rounding("nearest"))
    # The first loses a row, the second takes one of another expert, and the third ends.
    assert nearest["tiles"] == 0.5 and nearest["changed"] >= 41 / rows - 1e-5
    up = counted(steps, 1, Rounding("up"))
    assert up["none"] == up["weight_lost"] == 0 and up["tiles"] == 1.0 and up["changed"] > 0.5
