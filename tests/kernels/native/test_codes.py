"""Quantised caches in C: the bytes that the reference encoder writes, and attention over what they stand for."""

import pytest
import torch

from kvasir.attention.backends.torch import TorchBackend
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import Planes, Program, StepInputs
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.rope import rotate
from kvasir.kv.pool import KVPool
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir.models.native_decoder import planes_of
from kvasir.types import CacheGroup, CacheRow
from tests.attention.helpers import make_world, truth
from tests.kernels.check import FLOOR
from tests.kernels.native.test_program import SPANS, WIDE_TREE
from tests.kv.test_codecs import codec_of

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
CODECS = [
    "int8",
    "int4",
    "int4_bdr",
    "int4_bdr:rotate_v=true,signs=false",
    "int4_bdr:order=2",
    "int4_bdr:order=16,rotate_v=true",
    "fp8",
]
DIMS = [16, 48, 64, 80, 128, 512]


def still(dim: int) -> torch.Tensor:
    """Angles that turn nothing, [positions, D]."""
    return torch.cat([torch.ones(400, dim // 2), torch.zeros(400, dim // 2)], 1)


def write(heads_TXD, cache, slots, num_heads, angles, norm=None, positions=None):
    """Write by the kernel. Returns queries [T, H, D] in the cache's basis."""
    rows, total, dim = heads_TXD.shape
    at, program, heads = torch.arange(rows), Program(native().library), heads_TXD.clone()
    program.heads(heads, planes_of(cache), angles, num_heads, (total - num_heads) // 2, norm=norm)
    empty = torch.zeros(rows, dtype=torch.int32)
    program.run(
        StepInputs(
            at,
            at if positions is None else positions,
            torch.arange(rows + 1, dtype=torch.int32),
            empty,
            [empty[:, None].contiguous()],
            [slots],
            at[:0],
        )
    )
    return heads[:, :num_heads]


def pool_of(spec: str, groups: int, dim: int, pages: int = 40, page_slots: int = 5) -> KVPool:
    pool = KVPool(
        [CacheGroup("full", (0, 1), (CacheRow(groups, dim, dim),) * 2)],
        codec_of(spec),
        [pages],
        page_slots,
        "cpu",
        torch.float32,
    )
    pool.pages[0].fill_(0xAB)
    return pool


def rows_of_every_size(count: int, *shape: int) -> torch.Tensor:
    """Ordinary numbers; then tiny and huge ones, outliers, offsets, equal elements, halves of a step, zeros of both
    signs."""
    x = torch.randn(count, *shape)
    sizes = torch.logspace(-9, 6, count // 2)
    x[: count // 2] *= sizes.view(-1, *[1] * len(shape))
    x[-1], x[-2], x[-3], x[-4] = 0, -0.0, -3.5, x[-4] + 100
    x[-5, ..., 3] *= 1000
    x[-20:-5] = (x[-20:-5] * 4).round() / 2
    return x


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spec", CODECS)
def test_codes_are_those_of_the_reference_encoder(spec, dim):
    """Every byte, of any row; nothing else is written."""
    torch.manual_seed(dim)
    mine, reference = pool_of(spec, 2, dim), pool_of(spec, 2, dim)
    x, slots = rows_of_every_size(120, 3 + 4, dim), torch.randperm(200)[:120]
    slots[::7] = -1
    x[:, :5] += 0.0  # the rotation by no angle may turn the sign of a zero, which fp8 keeps
    q = write(x, mine.layer(1), slots, 3, still(dim))
    reference.codec.write(reference.layer(1), x[:, 3:5], x[:, 5:], slots)
    assert torch.equal(mine.pages[0], reference.pages[0])
    rotation = reference.codec.rotation("k", dim)
    assert torch.equal(q, x[:, :3] if rotation is None else rotation.apply(x[:, :3]))


@pytest.mark.parametrize("spec", CODECS)
def test_a_row_that_is_no_number_reads_as_none(spec):
    pool, x = pool_of(spec, 1, 64), torch.randn(4, 3, 64)
    x[1, :, 40], x[2, :, :] = torch.nan, torch.nan
    write(x, pool.layer(0), torch.arange(4), 1, still(64))
    for side in pool.codec.read(pool.layer(0), torch.tensor([0])):
        assert side[0, [1, 2]].isnan().all() and side[0, [0, 3]].isfinite().all()


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_angles_come_before_the_grid(spec, normed):
    """C rounds norm and angles differently, in the last bit: a code differs rarely, where that falls on a border, and
    by one step."""
    torch.manual_seed(1)
    heads, groups, dim, rows = 4, 2, 128, 190
    mine, reference, table = (
        pool_of(spec, groups, dim),
        pool_of(spec, groups, dim),
        RopeTable(RopeSpec(1e4, dim), 400, torch.device("cpu")),
    )
    x, scale, positions = (
        torch.randn(rows, heads + 2 * groups, dim),
        torch.rand(heads + groups, dim),
        torch.randint(0, 400, (rows,)),
    )
    write(x, mine.layer(0), torch.arange(rows), heads, table.table, (scale, 1e-6) if normed else None, positions)
    qk = x[:, : heads + groups]
    k = rotate(rms_norm_reference(qk, scale, 1e-6) if normed else qk.clone(), *table.rows(positions))[:, heads:]
    reference.codec.write(reference.layer(0), k, x[:, heads + groups :], torch.arange(rows))
    assert (mine.pages[0] != reference.pages[0]).float().mean() < 2e-3
    found, wanted = (torch.stack(p.codec.read(p.layer(0), torch.arange(38))) for p in (mine, reference))
    apart = (found - wanted).abs()
    assert (apart > 1e-3).float().mean() < 5e-3 and apart.max() < 1.2 * wanted.abs().max() / (64 if "8" in spec else 7)


# ------------------------------------------------------------------------------------------------------------ attention


def world_of(spans, spec, **options):
    """A world whose keys and values are what the codes stand for, in fp64 and the model's basis."""
    world = make_world(list(spans), codec=codec_of(spec), **options)
    codec = world.pool.codec
    for side, rows in (("k", world.keys), ("v", world.values)):
        rotation = codec.rotation(side, world.spec.head_dim)
        for i, x in enumerate(rows):
            found = codec.decode(
                codec.encode(x if rotation is None else rotation.apply(x)), world.spec.head_dim
            ).double()
            rows[i] = (
                found if rotation is None else found @ (rotation.matrix_DD.sign().double() * rotation.order**-0.5).T
            )
    return world


def attended(world, planes=None, **changes):
    """[T, H, D] by the kernel, queries in the cache's basis first."""
    spec, batch, program = world.spec, world.batch, Program(native().library)
    planes, heads = planes or planes_of(world.cache), world.q.clone()
    out = torch.full((len(heads), spec.num_heads * spec.head_dim), torch.nan)
    program.heads(heads, planes, still(spec.head_dim), spec.num_heads, spec.num_kv_heads, writes=False)
    program.attend(
        heads,
        out,
        planes,
        spec.num_heads,
        spec.num_kv_heads,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks_H=world.sinks,
    )
    inputs = {"ids": batch.input_ids, "wanted": batch.logit_rows} | {
        name: getattr(batch, name) for name in ("positions", "row_start", "context", "tables", "slots", "ancestors")
    }
    program.run(StepInputs(**inputs | changes))
    return out.view(world.q.shape)


def plain_of(world):
    """The same pages in fp32, in the cache's basis."""
    codec, cache = world.pool.codec, world.cache
    sides = [
        codec.decode({name[1:]: plane for name, plane in cache.planes.items() if name[0] == side}, cache.head_dim)
        for side in "kv"
    ]
    of = planes_of(cache)
    both = torch.stack(sides, 1).contiguous()
    return Planes(both[:, 0], both[:, 1], turn_k_D=of.turn_k_D, turn_v_D=of.turn_v_D, order=of.order)


def hold(world):
    """Check three things: the error is at most twice that of plain torch; the bits are those of a plain cache that
    holds the decoded codes; a row's bits are the same alone."""
    out, (want, _) = attended(world), truth(world)
    backend = TorchBackend()
    backend.prepare(world.site())
    backend.plan(world.batch)
    known = (
        (backend.run(world.q, world.cache, world.spec, world.batch, sinks_H=world.sinks).double() - want).abs().max()
    )
    error = (out.double() - want).abs().max()
    assert error <= 2 * known + FLOOR[torch.float32] * want.abs().max(), (error, known)
    assert torch.equal(attended(world, plain_of(world)), out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 80},
        {"dim": 512, "heads": 2, "kv_heads": 1},
        {"heads": 12, "kv_heads": 1, "page_slots": 5},
        {"window": 1},
        {"page_slots": 64, "window": 30, "softcap": 3.0, "sinks": True, "dim": 48},
        {"dim": 128, "heads": 3, "kv_heads": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", CODECS)
def test_attention_over_codes(spec, options):
    """Slots that a span does not see hold NaN."""
    for spans in SPANS[2:]:
        world = world_of(spans, spec, **options)
        hold(world)
        batch = world.batch
        of = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(batch.lengths))
        alone = dict(
            row_start=torch.arange(len(world.q) + 1, dtype=torch.int32),
            context=batch.positions.int(),
            tables=[batch.tables[0][of]],
        )
        assert torch.equal(attended(world, **alone), attended(world))


@pytest.mark.parametrize(
    "options", [{"heads": 8, "kv_heads": 1}, {"window": 20, "softcap": 2.0, "sinks": True}], ids=str
)
@pytest.mark.parametrize("spec", ["int8", "int4_bdr:rotate_v=true", "fp8"])
@pytest.mark.parametrize("parents", [[-1, 0, 0, 2, 2, 3, 1], WIDE_TREE], ids=["small", "wide"])
def test_a_tree_s_rows_see_their_ancestors(parents, spec, options):
    hold(world_of([(40, 1), (59, len(parents)), (3, 37)], spec, trees={1: parents}, **options))


def test_the_comparison_can_fail():
    """Queries in another basis than the keys."""
    world = world_of(SPANS[2], "int4_bdr")
    world.pool.codec.rotation("k", 16).factors_D.neg_()
    with pytest.raises(AssertionError):
        hold(world)


@pytest.mark.parametrize("spec", ["int4_bdr:rotate_v=true", "fp8"])
def test_bits_are_the_same_for_any_number_of_threads(spec):
    """Each has memory of its own for the numbers that it makes of codes."""
    world = world_of([(9, 1), (30, 41), (0, 70), (390, 1)], spec, heads=6, window=333)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = attended(world)
        torch.set_num_threads(5)
        assert all(torch.equal(attended(world), want) for _ in range(3))
    finally:
        torch.set_num_threads(before)
