"""The optional packages themselves, where they and a GPU are present; test_optional_backends.py has stand-ins for
them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels import dense_attention
from kvasir.kernels import paged_attention as paged
from kvasir.technique import load
from tests.attention.helpers import World, make_world

PACKAGES = {"flash_attn": "flash_attn_interface", "flashinfer": "flashinfer"}
INSTALLED = [
    name for name, package in PACKAGES.items() if torch.cuda.is_available() and importlib.util.find_spec(package)
]
SPANS = {"together": [(400, 1), (333, 200), (0, 250)], "apart": [(0, 250), (400, 1), (333, 200)], "alone": [(0, 513)]}


@pytest.fixture(autouse=True)
def short_spans_are_long(monkeypatch):
    monkeypatch.setattr(dense_attention, "MIN_ROWS", 64)


pytestmark = pytest.mark.skipif(not INSTALLED, reason="neither FlashAttention 3 nor FlashInfer beside a GPU")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", INSTALLED)
def test_the_package_attends_as_the_reference_does(name, spans, dim, softcap):
    world = make_world(SPANS[spans], heads=8, kv_heads=2, device="cuda", dtype=torch.bfloat16, dim=dim, softcap=softcap)
    chosen = prepared(name, world)
    assert all(chosen.takes_long(world.spec, length) for _, length in SPANS[spans] if length > 1)
    chosen.plan(world.batch)
    out, lse = chosen.run(world.q, world.cache, world.spec, world.batch, return_lse=True)
    want, want_lse = reference(world)
    torch.testing.assert_close(out.float(), want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, want_lse, atol=2e-3, rtol=1e-4)
    assert torch.equal(chosen.run(world.q, world.cache, world.spec, world.batch), out)


@pytest.mark.parametrize("name", INSTALLED)
def test_steps_that_wait_for_the_gpu_keep_their_plans(name):
    """Planned while the GPU is busy: memory that a step's plan is copied from may not be written over by the next
    step's."""
    worlds = [
        make_world(spans, heads=8, kv_heads=2, device="cuda", dtype=torch.bfloat16, dim=128, seed=i)
        for i, spans in enumerate([[(0, 300)], [(700, 90), (0, 200)], [(16, 100), (0, 100), (300, 33)], [(0, 64)]])
    ]
    chosen = prepared(name, worlds[0])
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    chosen.plan(worlds[0].batch)
    chosen.run(worlds[0].q, worlds[0].cache, worlds[0].spec, worlds[0].batch)  # which compiles
    outs = []
    for world in worlds:
        for _ in range(8):
            busy @ busy  # a millisecond and a half each
        world.batch.scratch.clear()
        chosen.plan(world.batch)
        outs.append(chosen.run(world.q, world.cache, world.spec, world.batch))
    for world, out in zip(worlds, outs):
        torch.testing.assert_close(out.float(), reference(world)[0], atol=0.02, rtol=0.02)


def reference(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    planes = [world.cache.planes[name].float() for name in "kv"]
    return paged.paged_attention_ref(
        world.q.float(),
        *planes,
        world.batch.tables[0],
        world.batch.starts,
        world.batch.lengths,
        world.spec.scale,
        softcap=world.spec.softcap,
    )


def prepared(name: str, world: World) -> AttentionBackend:
    chosen = load("kvasir.attention.backends", name, AttentionBackend)
    assert chosen.why_not(world.site(device="cuda")) == []
    chosen.prepare(world.site(device="cuda"))
    return chosen
