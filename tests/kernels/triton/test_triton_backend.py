"""The backend as the engine calls it: the right planes, tables and scratch reach the kernel."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.technique import load
from tests.attention.helpers import make_world, truth


@pytest.mark.parametrize("kind", [{}, {"window": 21, "softcap": 3.0, "sinks": True, "trees": {1: [-1, 0, 0, 2, 1]}}], ids=["plain", "all"])
def test_agrees_with_scalar_loops(kind, device):
    world = make_world([(40, 1), (33, 5), (0, 20)], device=device, **kind)
    chosen = load("kvasir.attention.backends", "triton", AttentionBackend)
    assert chosen.why_not(world.site(device=device)) == []
    chosen.prepare(world.site(device=device))
    chosen.plan(world.batch)
    want, want_lse = truth(world)
    out, lse = chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks, return_lse=True)
    torch.testing.assert_close(out.double().cpu(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks), out)
