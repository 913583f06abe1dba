"""Exact mode of the Triton backend: a row's bits are a function of its sequence and position, of nothing else."""

from __future__ import annotations

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels import paged_attention as paged
from kvasir.technique import load
from tests.attention.helpers import make_world, truth

LENGTH, HEADS, GROUPS, DIM = 75, 2, 1, 16
KINDS = {"plain": {}, "window": {"window": 25}, "all": {"window": 35, "softcap": 5.0, "sinks": True}}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks in a short text, and several turns in a launch."""
    monkeypatch.setattr(paged, "CHUNK", 32)
    monkeypatch.setattr(paged, "PART_BYTES", 1 << 14)


def attention(world, device):
    chosen = load("kvasir.attention.backends", "triton", AttentionBackend)
    assert chosen.why_not(world.site(exact=True, device=device)) == []
    chosen.prepare(world.site(exact=True, device=device))
    chosen.plan(world.batch)
    return chosen.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks, return_lse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(kind, dtype, device):
    draw = torch.Generator().manual_seed(11)
    q = torch.randn(LENGTH, HEADS, DIM, generator=draw).to(dtype)
    kv = torch.randn(2, LENGTH, GROUPS, DIM, generator=draw).to(dtype)

    def rows(start, length, before=(), after=()):
        place = len(before)
        content = {place: (q[start : start + length].to(device), kv[:, : start + length])}
        world = make_world(
            [*before, (start, length), *after],
            content=content,
            heads=HEADS,
            kv_heads=GROUPS,
            dim=DIM,
            dtype=dtype,
            device=device,
            seed=place,
            **KINDS[kind],
        )
        if world.sinks is not None:
            world.sinks = torch.linspace(-1, 1, HEADS, device=device)
        first = sum(n for _, n in before)
        return [x[first : first + length].clone() for x in attention(world, device)]

    whole = rows(0, LENGTH)
    for start, length, before, after in (
        (0, 37, (), ()),
        (37, 38, ((5, 1),), ((90, 1),)),
        (74, 1, (), ()),
        (50, 1, ((0, 1), (32, 1)), ((100, 1),)),
        (31, 2, (), ((0, 9),)),
    ):
        for got, want in zip(rows(start, length, before, after), whole):
            assert torch.equal(got, want[start : start + length]), (start, length)


@pytest.mark.parametrize("kind", [*KINDS, "trees"])
def test_agrees_with_scalar_loops(kind, device):
    kinds = {**KINDS, "trees": {"window": 30, "trees": {1: [-1, 0, 0, 2, 1], 3: [-1, 0]}}}
    world = make_world([(70, 1), (31, 5), (0, 40), (60, 2), (7, 0)], device=device, **kinds[kind])
    out, lse = attention(world, device)
    want, want_lse = truth(world)
    torch.testing.assert_close(out.double().cpu(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-5)
