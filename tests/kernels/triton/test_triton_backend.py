"""The backend as the engine calls it: the right planes, tables and scratch reach the right kernel."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels import dense_attention
from kvasir.technique import load
from tests.attention.helpers import make_world, truth

KINDS = {
    "plain": {},
    "all": {"window": 21, "softcap": 3.0, "sinks": True, "trees": {1: [-1, 0, 0, 2, 1]}},
    "long": {"dtype": torch.float16, "dim": 64, "sinks": True},
}


def prepared(world, device):
    chosen = load("kvasir.attention.backends", "triton", AttentionBackend)
    assert chosen.why_not(world.site(device=device)) == []
    chosen.prepare(world.site(device=device))
    return chosen


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_scalar_loops(kind, device, monkeypatch):
    # The last span is a long one, where the kernel for those can serve.
    monkeypatch.setattr(dense_attention, "MIN_ROWS", 30)
    world = make_world([(40, 1), (33, 5), (0, 20)], device=device, **KINDS[kind])
    chosen = prepared(world, device)
    chosen.plan(world.batch)
    step = next(iter(world.batch.scratch.values()))
    assert step.rows.spans.tolist() == [0] and (step.long is not None) == (kind == "long")
    want, want_lse = truth(world)
    close = {"atol": 1e-5, "rtol": 1e-5} if world.q.dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    out, lse = chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks, return_lse=True)
    torch.testing.assert_close(out.double().cpu(), want, **close)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5 if close["atol"] == 1e-5 else 1e-4, rtol=1e-5)
    assert torch.equal(chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks), out)


def test_single_rows_are_planned_from_their_number_alone(device):
    """A CUDA graph needs this: one plan serves every step of as many rows, whatever the host's starts say."""
    world, other = (make_world(spans, device=device, seed=5) for spans in ([(300, 1), (7, 1)], [(2, 1), (170, 1)]))
    chosen = prepared(world, device)
    chosen.plan(world.batch)
    other.batch.scratch = world.batch.scratch
    other.batch.starts = other.batch.lengths = None
    out = chosen.run(other.q, other.cache, other.spec, other.batch)
    other.batch.starts, other.batch.lengths = [2, 170], [1, 1]
    torch.testing.assert_close(out.double().cpu(), truth(other)[0], atol=1e-5, rtol=1e-5)


def test_an_empty_step(device):
    world = make_world([], device=device)
    chosen = prepared(world, device)
    chosen.plan(world.batch)
    assert chosen.run(world.q, world.cache, world.spec, world.batch).shape == world.q.shape
