"""Latents in plain torch: absorbed and expanded attention are the same, and mutations of either show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backends.torch import TorchBackend
from kvasir.attention.latent import UpProjection, per_head
from kvasir.kernels.latent_prompt import crossing
from tests.attention.latents import latent_world

SMALL = (-1, 0, 0, 1, 1, 2, 5)
# (spans, heads, rank, rope, page slots, trees): ragged batches, ranks and widths that are published and that are not
CASES = [
    (((40, 1), (0, 5), (70, 1), (16, 23)), 4, 32, 16, 16, ()),
    (((300, 1), (7, 1), (33, 1)), 16, 512, 64, 64, ()),
    (((33, 9),), 128, 96, 0, 16, ()),
    (((120, 3), (61, 7), (2, 1)), 20, 256, 64, 16, ((1, SMALL),)),
    (((65, 40),), 3, 320, 32, 64, ()),
]


def both(world, exact=False, spec=None):
    """Results of the absorbed and of the expanded form."""
    backend, spec = TorchBackend(), spec or world.spec
    backend.prepare(replace(world.site(exact), specs=(spec,)))
    args = world.q_heads, world.up, world.cache, spec, world.batch
    absorbed = backend.run_latent(*args)
    world.batch.scratch.clear()
    return absorbed, backend.run_expanded(*args)


def world_of(case, **options):
    spans, heads, rank, rope, slots, trees = case
    return latent_world(spans, heads=heads, rank=rank, rope=rope, page_slots=slots, trees=trees, **options)


def close(a, b) -> bool:
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}x{case[2]}+{case[3]}")
@pytest.mark.parametrize("exact", [False, True])
def test_absorbed_is_expanded(case, exact):
    assert close(*both(world_of(case, exact=exact), exact))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_codes_are_decoded_once_for_both(codec):
    """The round trip decides what a latent is, whichever form reads it."""
    assert close(*both(world_of(CASES[3], codec=codec)))


def test_a_wrong_scale_shows():
    """Negative control: 1 / sqrt(d) instead of 1 / sqrt(d + d_r)."""
    world = world_of(CASES[0])
    right, _ = both(world)
    wrong, _ = both(world, spec=replace(world.spec, scale=24**-0.5))
    assert not close(right, wrong)


def test_values_from_the_last_elements_show():
    """Negative control: the value is the first R elements of a row, not the last."""
    world = world_of(CASES[0])
    right, expanded = both(world)
    read = world.cache.codec.read

    def last(cache, pages, shared=None):
        k, _ = read(cache, pages, shared)
        return k.roll(-16, -1), k[..., -32:]

    world.batch.scratch.clear()
    world.cache.codec.read = last
    wrong, _ = both(world)
    assert close(right, expanded) and not close(right, wrong)


def test_exact_products_do_not_depend_on_the_batch():
    """A row's bits are the same alone and among others, for widths below a register, too; a batched product's are not
    promised."""
    for width in (5, 24, 200):
        x, weight = torch.randn(70, 3, 64), torch.randn(3, 64, width)
        whole = per_head(x, weight, exact=True)
        for rows in (slice(0, 1), slice(9, 10), slice(31, 70), slice(3, 40)):
            assert torch.equal(per_head(x[rows], weight, exact=True), whole[rows])
        torch.testing.assert_close(whole, torch.einsum("thk,hkn->thn", x, weight), atol=1e-4, rtol=1e-4)


def test_absorbing_keeps_the_rotary_part():
    up = UpProjection(torch.randn(3, 8, 32), torch.randn(3, 6, 32))
    q = torch.randn(5, 3, 12)
    assert torch.equal(up.absorb(q)[..., 32:], q[..., 8:]) and up.project(up.absorb(q)[..., :32]).shape == (5, 3, 6)


def test_the_crossing():
    """Equal widths give d r / (r - d), DeepSeek's 171 rows; a rank below the widths never pays."""
    assert crossing(512, 128, 128) == 171 and crossing(512, 192, 256) == 398
    assert crossing(64, 64, 64) is None
