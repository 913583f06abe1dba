"""The plain references against plain loops in fp64, and the cutting of a step into tiles. Needs no Triton."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvasir.kernels import moe, moe_routing
from kvasir.kernels import paged_attention as paged
from kvasir.kernels import store_kv as store
from tests.attention.helpers import truth
from tests.kernels.check import reference, world_of


@pytest.mark.parametrize("case", [c for c in paged.grid() if c.splits == 1 and c.dim <= 80], ids=str)
def test_paged_attention(case):
    world = world_of(case, torch.float32, "cpu")
    for got, want in zip(reference(world, torch.float32), truth(world)):
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    for got, want in zip(reference(world, torch.float64), truth(world)):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("case", list(store.grid()), ids=str)
def test_store_kv(case):
    draw = torch.Generator().manual_seed(case.rows)
    k, v = torch.randn(2, case.rows, case.heads, case.dim, generator=draw)
    pages = 2 + case.rows
    slots = torch.randperm(pages * case.page_slots, generator=draw)[: case.rows]
    if case.skip:
        slots[:: case.skip] = -1
    got, want = torch.zeros(2, 2, pages, case.heads, case.page_slots, case.dim)
    store.store_kv(k, v, got[0], got[1], slots)
    for plane, rows in ((0, k), (1, v)):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[plane, slot // case.page_slots, :, slot % case.page_slots] = rows[row]
    assert torch.equal(got, want)


def test_store_kv_refuses_rows_that_do_not_fit():
    pages, slots = torch.zeros(2, 1, 16, 8), torch.zeros(3, dtype=torch.int64)
    fits = torch.zeros(3, 1, 8)
    for rows, where in (
        (torch.zeros(3, 2, 8), slots),
        (torch.zeros(3, 1, 4), slots),
        (fits, slots[:2]),
        (fits, slots.int()),
    ):
        with pytest.raises(AssertionError):
            store.store_kv(rows, rows, pages, pages, where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (32, 8), (7, 1), (40, 1), (12, 4)])
def test_tiles_cover_every_row_once(heads, kv_heads, dtype):
    starts, lengths = [0, 5, 70, 3, 0, 1000], [1, 4, 0, 300, 17, 1]
    seen = []
    for part in paged.plan_tiles(starts, lengths, heads, kv_heads, dtype, "cpu"):
        rows = part.block_m // (heads // kv_heads)
        assert rows >= 1 and part.block_m & (part.block_m - 1) == 0
        for span, first in part.items.tolist():
            assert 0 <= first < lengths[span] and starts[span] + lengths[span] <= part.max_keys
            seen += [(span, row) for row in range(first, min(first + rows, lengths[span]))]
    assert sorted(seen) == [(s, row) for s, length in enumerate(lengths) for row in range(length)]
    assert paged.plan_tiles([], [], heads, kv_heads, dtype, "cpu") == []


@pytest.mark.parametrize("renormalize", [False, True])
def test_moe(renormalize):
    """Against scalar loops over rows, choices and experts."""
    draw = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (6, 5))
    gate_up, down = (
        torch.randn(5, 8, 6, generator=draw, dtype=torch.float64),
        torch.randn(5, 6, 4, generator=draw, dtype=torch.float64),
    )
    want = torch.zeros(4, 6, dtype=torch.float64)
    for t in range(4):
        share = logits[t].exp() / logits[t].exp().sum()
        best = sorted(range(5), key=lambda e: -share[e])[:2]
        whole = sum(share[e] for e in best) if renormalize else 1.0
        for e in best:
            gate, up = gate_up[e, :4] @ x[t], gate_up[e, 4:] @ x[t]
            want[t] += share[e] / whole * (down[e] @ (gate / (1 + (-gate).exp()) * up))
    torch.testing.assert_close(
        moe.moe_reference(x, logits, gate_up, down, 2, renormalize), want, atol=1e-12, rtol=1e-12
    )


def test_moe_max_tiles_bounds_every_routing():
    """Over all ways that rows * top_k pairs can fall on the experts; an expert has a row at most once."""
    for rows, experts, top_k, block_m in itertools.product((1, 2, 5, 6), (1, 2, 3, 4), (1, 2, 3), (2, 3, 4)):
        if top_k <= experts:
            ways = (c for c in itertools.product(range(rows + 1), repeat=experts) if sum(c) == rows * top_k)
            most = max(sum(-(-count // block_m) for count in counts) for counts in ways)
            bound = moe_routing.max_tiles(rows, experts, top_k, block_m)
            assert most <= bound <= most + experts - 1, (rows, experts, top_k, block_m, most, bound)
