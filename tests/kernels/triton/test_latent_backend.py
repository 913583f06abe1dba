"""The Triton backend over latents: every kind of span of a step, as the torch backend computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backends.triton import TritonBackend
from kvasir.attention.latent import UpProjection
from kvasir.types import Together
from tests.attention.latents import latent_world
from tests.kernels.check import rows_of
from tests.kernels.check_latents import reference

SMALL = (-1, 0, 0, 1, 1, 2, 5)
STEPS = {
    "single rows": (((40, 1), (0, 1), (70, 1)), ()),
    "drafts and a prompt": (((33, 4), (0, 1), (5, 30), (61, 7)), ()),
    "long prompts": (((0, 60), (20, 50)), ()),
    "long prompts and decodes": (((0, 60), (50, 1), (20, 50), (7, 3)), ()),
    "everything": (((0, 60), (50, 1), (3, 20)), ()),
    "trees": (((61, 7), (20, 3), (0, 18), (9, 1)), ((0, SMALL),)),
}


def backend_of(world, device, exact=False):
    mine = TritonBackend()
    mine.prepare(world.site(exact, device))
    assert not mine.why_not(mine.site)
    mine.plan(world.batch)
    return mine


def wanted(world):
    """Results of the heads in fp32, and the products that bring latents there."""
    wide = UpProjection(world.up.key_HDR.float(), world.up.value_HVR.float())
    heads = replace(world, q=wide.absorb(world.q_heads.float()))
    return wide.project(reference(heads, torch.float32)[0]), wide


def world_of(name, device, **options):
    """Spans of 44 rows and more are worth expanding."""
    spans, trees = STEPS[name]
    return latent_world(spans, heads=4, rank=64, trees=trees, dtype=torch.float16, device=device, **options)


@pytest.mark.parametrize("name", list(STEPS))
@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_steps(name, codec, device):
    if codec == "int8" and name in ("single rows", "trees"):
        pytest.skip("the kernels' own grids have them")
    world = world_of(name, device, codec=codec, page_slots=32, nope=32, value=24)
    mine = backend_of(world, device)
    args = world.q_heads, world.up, world.cache, world.spec, world.batch
    got, latent = mine.run_latent(*args), mine.run(world.q, world.cache, world.spec, world.batch)
    want, wide = wanted(world)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(wide.project(latent.float()), want, atol=2e-2, rtol=2e-2)


def test_rows_of_a_captured_step(device):
    """Chains and trees whose spans only the device knows."""
    world = world_of("trees", device)
    table, at, place, length, bits, positions = rows_of(world)
    mine, (want, wide) = backend_of(world, device), wanted(world)
    step = replace(
        world.batch, tables=(table,), context=at, ancestors=bits, positions=positions,
        together=Together(place, length, 64), scratch={},
    )  # fmt: skip
    mine.plan(step)
    got = mine.run(world.q, world.cache, world.spec, step)
    torch.testing.assert_close(wide.project(got.float()), want, atol=2e-2, rtol=2e-2)


def test_exact_rows_do_not_depend_on_the_batch(device):
    """The bits of a row alone, in a chunk, and among others."""
    a = latent_world(((0, 40), (30, 1)), heads=4, rank=32, exact=True, device=device)
    out = backend_of(a, device, exact=True).run(a.q, a.cache, a.spec, a.batch)
    alone = latent_world(((0, 40),), heads=4, rank=32, exact=True, device=device)
    mine = backend_of(alone, device, exact=True)
    alone.batch.tables = (a.batch.tables[0][:1],)
    again = mine.run(a.q[:40], a.cache, alone.spec, alone.batch)
    assert torch.equal(again, out[:40])
    for row in (0, 17, 39):  # as decodes
        single = latent_world(((row, 1),), heads=4, rank=32, exact=True, device=device)
        mine = backend_of(single, device, exact=True)
        single.batch.tables = (a.batch.tables[0][:1],)
        assert torch.equal(mine.run(a.q[row : row + 1], a.cache, single.spec, single.batch), out[row : row + 1])


@pytest.mark.parametrize(
    "rank, rope, why", [(640, 64, "up to 512 elements"), (36, 16, "aligned to 16 bytes"), (32, 4, "multiples of 8")]
)
def test_refusals(rank, rope, why, device):
    world = latent_world(((0, 1),), rank=rank, rope=rope)
    assert any(why in reason for reason in TritonBackend().why_not(world.site(device=device)))
