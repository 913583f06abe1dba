"""Each C operation against plain torch: sizes that fill no panel, every number of rows, both formats of weights, with
and without matrix tiles."""

import pytest
import torch

from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import BF16, FP32, ROWS, Planes, Program, StepInputs, pack
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.rope import rotate
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from tests.attention.helpers import make_world, truth

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
TILES = [0, 1] if native().library is not None and native().library.kvasir_tiles() else [0]
NORM = 1e-6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def weights(outputs, inputs, narrow=True):
    w = torch.randn(outputs, inputs) * inputs**-0.5
    return w.bfloat16().float() if narrow else w


def rows_of(count, wanted=()):
    """Inputs of a step whose rows are spans of their own."""
    at = torch.arange(count)
    return StepInputs(
        at,
        at,
        torch.arange(count + 1, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        [torch.zeros(count, 1, dtype=torch.int32)],
        [at],
        torch.tensor(wanted, dtype=torch.int64),
    )


def product(x, w, tiles=0, **options):
    """x W^T by the kernel, into NaN, so that what is left out shows."""
    program, packed = Program(native().library), pack(native().library, w, gated=options.get("activation") is not None)
    program.tiles = tiles
    y = options.pop("into", torch.full((len(x), packed.num_outputs), torch.nan))
    program.linear(x, packed, y, **options)
    program.run(rows_of(len(x)))
    return y


def close(got, want, x, w):
    """Products: by what a sum of fp32 terms may lose, relative to the sum of their sizes."""
    bound = x.double().abs() @ w.double().abs().t() if got.shape[-1] == len(w) else None
    error = (got.double() - want).abs()
    assert torch.isfinite(got).all()
    if bound is None:
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    else:
        assert (error <= 4e-7 * bound + 1e-7).all(), float((error / (bound + 1e-9)).max())


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 7, 8, 9, 16, 17, ROWS, ROWS + 3, 150])
def test_products_are_as_exact_as_in_fp32(rows, narrow, tiles):
    for outputs, inputs in ((64, 96), (33, 31), (1, 1), (80, 515)):
        x, w = torch.randn(rows, inputs), weights(outputs, inputs, narrow)
        assert pack(native().library, w).format == (BF16 if narrow else FP32)
        for layout in (w, w.t().contiguous().t()):
            close(product(x, layout, tiles), x.double() @ w.double().t(), x, w)


def test_numbers_of_every_size_keep_their_24_bits():
    """Products in tiles take fp32 rows in three parts of eight bits: one weight of one shows what is left of a
    number."""
    x = torch.cat([torch.randn(16, 32) * 10.0**e for e in (-20, -3, 0, 5, 30)], 1)
    for tiles in TILES:
        assert torch.equal(product(x, torch.eye(160), tiles), x)


@pytest.mark.parametrize("tiles", TILES)
def test_a_row_does_not_depend_on_the_others(tiles):
    """Bits, for one way of multiplying, whatever the number of rows."""
    x, w = torch.randn(150, 200), weights(100, 200)
    scale = torch.rand(200)
    whole = product(x, w, tiles, norm=(scale, NORM))
    for first, stop in ((0, 1), (3, 10), (15, 32), (7, 60), (140, 150)):
        assert torch.equal(product(x[first:stop].clone(), w, tiles, norm=(scale, NORM)), whole[first:stop])


@pytest.mark.parametrize("narrow", [True, False])
def test_blocks_of_rows_that_are_wider_than_a_cache(narrow):
    """Many inputs: a block is of fewer rows than a thread's share."""
    x, w = torch.randn(200, 9000), weights(40, 9000, narrow)
    close(
        product(x, w, TILES[-1], norm=(torch.ones(9000), NORM)),
        rms_norm_reference(x.double(), torch.ones(9000), NORM) @ w.double().t(),
        x,
        w,
    )


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_what_is_fused_with_a_product(activation, tiles):
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    for rows, width, inputs in ((3, 40, 72), (9, 16, 50)):
        x, w, bias, scale = (
            torch.randn(rows, inputs) * 3,
            weights(2 * width, inputs),
            torch.randn(2 * width),
            torch.rand(inputs),
        )
        normed = rms_norm_reference(x.double(), scale.double(), NORM)
        gate, up = (normed @ w.double().t() + bias.double()).split(width, 1)
        close(
            product(x, w, tiles, bias_N=bias, norm=(scale, NORM), activation=activation),
            functions[activation](gate) * up,
            x,
            w,
        )
        before = torch.randn(rows, width)
        narrow, half = w[:width].contiguous(), bias[:width].contiguous()
        got = product(x, narrow, tiles, bias_N=half, into=before.clone(), add=True)
        torch.testing.assert_close(got.double(), before + x.double() @ narrow.double().t() + half, atol=2e-5, rtol=2e-5)
        capped = product(x, narrow, tiles, scale=3.0, softcap=2.0)
        torch.testing.assert_close(
            capped.double(), 2 * torch.tanh(x.double() @ narrow.double().t() * 3 / 2), atol=2e-5, rtol=2e-5
        )


def test_activations_reach_from_zero_to_the_number_itself():
    """Far out the exponential neither overflows nor turns a NaN into a number."""
    x = torch.tensor(
        [
            [
                -1e30,
                -200.0,
                -88.0,
                -87.0,
                -20.0,
                -1e-8,
                0.0,
                1e-8,
                20.0,
                88.0,
                200.0,
                1e30,
                torch.inf,
                torch.nan,
                1.0,
                2.0,
            ]
        ]
    )
    w = torch.cat([torch.eye(16), torch.zeros(16, 16)])
    for name in ("silu", "gelu_tanh"):
        for value in x[0]:
            row = torch.zeros(1, 16)
            row[0, 0] = value
            got = product(row, w, activation=name, bias_N=torch.cat([torch.zeros(16), torch.ones(16)]))[0, 0]
            if value.abs() < 1e10:
                want = (
                    torch.nn.functional.silu(value.double())
                    if name == "silu"
                    else torch.nn.functional.gelu(value.double(), approximate="tanh")
                )
                torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)
            elif value.isnan():
                assert got.isnan()


def test_wanted_rows_and_embeddings():
    table, x = torch.randn(9, 20), torch.randn(6, 20)
    program = Program(native().library)
    y, some, out = torch.full((6, 20), torch.nan), torch.full((6, 20), torch.nan), torch.full((6, 9), torch.nan)
    program.embed(table, y, 2.5)
    program.gather(x, some)
    program.linear(some, pack(native().library, table), out, wanted=True)
    program.run(rows_of(6, wanted=(4, 1)))
    assert torch.equal(y, table[:6] * 2.5) and torch.equal(some[:2], x[[4, 1]])
    torch.testing.assert_close(out[:2], x[[4, 1]] @ table.t())
    assert out[2:].isnan().all(), "rows that nobody wants are not computed"
    program.run(rows_of(6), stop=1)
    assert torch.equal(some[:2], x[[4, 1]])


def test_norms_beside_products():
    x, y, scale = torch.randn(5, 37), torch.randn(5, 37), torch.rand(37)
    for add in (False, True):
        program, into = Program(native().library), y.clone()
        program.norm(x, into, (scale, NORM), add=add)
        program.run(rows_of(5))
        torch.testing.assert_close(into, rms_norm_reference(x, scale, NORM) + (y if add else 0), atol=1e-6, rtol=1e-6)


SPANS = [
    ((0, 1),),
    ((70, 1), (16, 23)),
    ((40, 1), (0, 5), (70, 1), (3, 0), (16, 4)),
    ((300, 1), (63, 1), (64, 1), (65, 2)),
    ((9, 1), (30, 41), (0, 70)),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 80},
        {"dim": 512, "heads": 2, "kv_heads": 1},
        {"heads": 12, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3},
        {"page_slots": 5},
        {"page_slots": 64},
        {"window": 1},
        {"window": 21},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 30, "softcap": 3.0, "sinks": True, "dim": 48},
    ],
    ids=str,
)
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_attention_over_pages(spans, options):
    """Slots that a span does not see hold NaN. A row's bits are the same when it is a span of its own."""
    world = make_world(list(spans), **options)
    out = attended(world)
    torch.testing.assert_close(out.double(), truth(world)[0], atol=3e-6, rtol=3e-6)
    batch, rows = world.batch, len(world.q)
    of = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(batch.lengths))
    alone = dict(
        row_start=torch.arange(rows + 1, dtype=torch.int32), context=batch.positions.int(), tables=[batch.tables[0][of]]
    )
    assert torch.equal(attended(world, **alone), out)


def attended(world, **changes):
    """[T, H, D] by the kernel."""
    spec, batch, planes, program = world.spec, world.batch, world.cache.planes, Program(native().library)
    heads = torch.cat([world.q, torch.full((len(world.q), 2 * spec.num_kv_heads, spec.head_dim), torch.nan)], 1)
    out = torch.full((len(world.q), spec.num_heads * spec.head_dim), torch.nan)
    program.attend(
        heads,
        out,
        Planes(planes["k"], planes["v"]),
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


WIDE_TREE = [-1, *[i // 2 for i in range(69)]]  # more rows than a word has bits


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 8, "kv_heads": 1}, {"window": 1}, {"window": 3}, {"window": 20, "softcap": 2.0, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("parents", [[-1, 0, 0, 2, 2, 3, 1], WIDE_TREE], ids=["small", "wide"])
def test_a_tree_s_rows_see_their_ancestors(parents, options):
    """The step also holds causal spans, one of them with a row's worth of ancestor bits, all zero."""
    world = make_world([(40, 1), (59, len(parents)), (3, 37)], trees={1: parents}, **options)
    out = attended(world)
    torch.testing.assert_close(out.double(), truth(world)[0], atol=3e-6, rtol=3e-6)
    straight = attended(world, ancestors=None)
    assert torch.equal(out[:1], straight[:1]) and torch.equal(out[-37:], straight[-37:])
    assert options.get("window") == 1 or not torch.allclose(out, straight, atol=1e-3), "the tree must matter here"


@pytest.mark.parametrize(
    "options", [{}, {"heads": 6, "kv_heads": 2}, {"window": 3}, {"window": 70, "softcap": 2.0}], ids=str
)
def test_a_tree_s_row_has_the_bits_of_its_path(options):
    """A tree's row has the bits of a decode over its ancestors alone, wherever they stand among the others."""
    start = 61  # the border of two chunks of keys lies among the rows
    world = make_world([(start, len(WIDE_TREE))], trees={0: WIDE_TREE}, page_slots=1, **options)
    pages, width = world.batch.tables[0][0], start + max(world.trees[0].depths()) + 1
    paths = torch.zeros(len(WIDE_TREE), width, dtype=torch.int32)
    for row, known in enumerate(world.trees[0].ancestors()):
        path = torch.cat([pages[:start], pages[start + torch.tensor(sorted(known))]])
        paths[row, : len(path)] = path
    rows = torch.arange(len(WIDE_TREE) + 1, dtype=torch.int32)
    assert torch.equal(
        attended(world, row_start=rows, context=world.batch.positions.int(), tables=[paths], ancestors=None),
        attended(world),
    )


@pytest.mark.parametrize("team", [2, 5])
def test_bits_are_the_same_for_any_number_of_threads(team):
    """Threads take blocks as they come, whoever comes first."""
    world, x, w = make_world([(9, 1), (30, 41), (0, 70)], heads=6, window=33), torch.randn(300, 200), weights(100, 200)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = [attended(world), *(product(x[:n], w, TILES[-1], norm=(torch.ones(200), NORM)) for n in (20, 40, 300))]
        torch.set_num_threads(team)
        for _ in range(3):
            got = [
                attended(world),
                *(product(x[:n], w, TILES[-1], norm=(torch.ones(200), NORM)) for n in (20, 40, 300)),
            ]
            assert all(map(torch.equal, got, want))
    finally:
        torch.set_num_threads(before)


def test_a_row_s_nan_is_its_own():
    world = make_world([(20, 1), (30, 1)])
    batch, planes, program, q = world.batch, world.cache.planes, Program(native().library), world.q.clone()
    q[0] = torch.nan
    out = torch.zeros(2, 64)
    program.attend(q, out, Planes(planes["k"], planes["v"]), 4, 2, scale=0.25)
    program.run(
        StepInputs(
            batch.input_ids,
            batch.positions,
            batch.row_start,
            batch.context,
            batch.tables,
            batch.slots,
            batch.logit_rows,
        )
    )
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (3, 1, 80)])
def test_heads_are_normed_rotated_and_written(heads, kv_heads, dim, normed):
    world = make_world([(20, 1), (3, 4)], heads=heads, kv_heads=kv_heads, dim=dim)
    batch, planes, program = world.batch, world.cache.planes, Program(native().library)
    slots, rotated = batch.slots[0].clone(), heads + kv_heads
    slots[2] = -1  # a row that writes nowhere
    x, scale, table = (
        torch.randn(5, rotated + kv_heads, dim),
        torch.rand(rotated, dim),
        RopeTable(RopeSpec(100.0, dim), 64, torch.device("cpu")),
    )
    before = {name: plane.clone() for name, plane in planes.items()}
    want = rotate(
        rms_norm_reference(x[:, :rotated], scale, NORM) if normed else x[:, :rotated].clone(),
        *table.rows(batch.positions),
    )
    got = x.clone()
    program.heads(
        got, Planes(planes["k"], planes["v"]), table.table, heads, kv_heads, norm=(scale, NORM) if normed else None
    )
    program.run(
        StepInputs(
            batch.input_ids, batch.positions, batch.row_start, batch.context, batch.tables, [slots], batch.logit_rows
        )
    )
    torch.testing.assert_close(got[:, :heads], want[:, :heads], atol=2e-6, rtol=2e-6)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(planes["k"][slot // 16, :, slot % 16], want[row, heads:], atol=2e-6, rtol=2e-6)
            assert torch.equal(planes["v"][slot // 16, :, slot % 16], x[row, rotated:])
            for name in ("k", "v"):
                before[name][slot // 16, :, slot % 16] = planes[name][slot // 16, :, slot % 16]
    for name in ("k", "v"):
        assert torch.equal(planes[name].nan_to_num(7.0), before[name].nan_to_num(7.0)), "nothing else is written"


def test_the_team_is_torch_s():
    wanted = torch.get_num_threads()
    assert native().library.kvasir_team(wanted) == wanted
