"""The torch backend against plain loops in fp64, on poisoned pages; and exact mode's promise about bits."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.technique import load
from tests.attention.helpers import make_world, truth

SPANS = {
    "empty": [],
    "one decode": [(37, 1)],
    "decodes of one length": [(20, 1), (20, 1), (20, 1)],
    "decodes of many lengths": [(0, 1), (300, 1), (15, 1), (16, 1), (5, 1), (47, 1)],
    "prefill": [(0, 33)],
    "chunk": [(19, 21)],
    "mixed": [(40, 1), (0, 5), (31, 1), (16, 16), (7, 3), (90, 1)],
}
KINDS = {
    "plain": {},
    "mha": {"heads": 3, "kv_heads": 3},
    "mqa16": {"heads": 16, "kv_heads": 1, "dim": 8},
    "odd gqa": {"heads": 6, "kv_heads": 2, "dim": 80},
    "window": {"window": 9},
    "window of a page": {"window": 16},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 21, "softcap": 3.0, "sinks": True, "page_slots": 32},
}


def backend(world, exact: bool = False) -> AttentionBackend:
    chosen = load("kvasir.attention.backends", "torch", AttentionBackend)
    assert chosen.why_not(world.site(exact)) == []
    chosen.prepare(world.site(exact))
    return chosen


def attention(world, exact: bool = False, lse: bool = False):
    chosen = backend(world, exact)
    chosen.plan(world.batch)
    return chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks, return_lse=lse)


@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans", SPANS)
def test_agrees_with_scalar_loops(spans, kind, exact):
    world = make_world(SPANS[spans], **KINDS[kind])
    want, want_lse = truth(world)
    torch.testing.assert_close(attention(world, exact).double(), want, atol=3e-6, rtol=1e-5)
    out, lse = attention(world, exact, lse=True)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
@pytest.mark.parametrize("kind", ["plain", "window", "all"])
def test_tree_rows_see_their_ancestors(kind, exact):
    """A bushy tree, a chain as a tree, causal spans in the same step, and a tree of more than 64 rows."""
    trees = {1: [-1, 0, 0, 1, 1, 2, 5], 3: [-1, 0, 1]}
    for spans, forest in (
        ([(40, 1), (31, 7), (0, 9), (5, 3)], trees),
        ([(3, 1), (10, 70)], {1: [-1, *((i - 1) // 2 for i in range(1, 70))]}),
    ):
        world = make_world(spans, trees=forest, **KINDS[kind])
        want, want_lse = truth(world)
        torch.testing.assert_close(attention(world, exact).double(), want, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(attention(world, exact, lse=True)[1].double(), want_lse, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_stays_near_fp64(dtype):
    world = make_world(SPANS["mixed"], dtype=dtype)
    want, _ = truth(world)
    for exact in (False, True):
        assert (attention(world, exact).double() - want).abs().max() < 2e-2


def test_one_plan_serves_layers_of_different_windows():
    """Full and window layers share a step; what is kept for one must not serve the other."""
    wide, narrow = make_world(SPANS["mixed"]), make_world(SPANS["mixed"], window=9)
    narrow.batch.scratch = wide.batch.scratch
    chosen = backend(wide)
    chosen.plan(wide.batch)
    narrow.batch.tables = wide.batch.tables
    for spec in (wide.spec, narrow.spec, wide.spec):
        got = chosen.run(wide.q, wide.cache, spec, wide.batch)
        wide.spec, kept = spec, wide.spec
        torch.testing.assert_close(got.double(), truth(wide)[0], atol=3e-6, rtol=1e-5)
        wide.spec = kept
