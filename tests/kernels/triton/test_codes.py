"""The kernels for codes over their grid, every code alone, and what must fail: nibbles swapped, a neighbour's scale, a
zero point off by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.kernels import code_tiles, nibble_gemv
from kvasir.kernels._triton import jit, tl
from kvasir.kernels.codes_gemv import choose, codes_gemv, grid, matrix_of
from kvasir.kernels.gemv import Config
from tests.kernels.check_codes import check_gemv, check_nibbles, weights
from tests.kernels.check_fused import Draw

SHAPES = [(1, Config(4, 128, 1)), (3, Config(16, 128, 1, 2))]
LAYOUTS = [("i8", 0, False), ("i8", 32, False), ("u4", 32, False), ("u4", 32, True), ("mxfp4", 32, False),
           ("nvfp4", 16, False), ("fp6", 0, False), ("q6_k", 16, False), ("q4_k", 32, False)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(grid()), ids=str)
def test_against_the_reference(case, dtype, device):
    if case.config.block_n >= 16 and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_gemv(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(nibble_gemv.grid()), ids=str)
def test_words_of_four_codes(case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_nibbles(case, dtype, device)


NIBBLES = [("u4", 128, False), ("u4", 128, True), ("mxfp4", 32, False), ("nvfp4", 16, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout, group, zeros", NIBBLES)
def test_every_code_of_a_word_is_multiplied_with_its_own_scale(layout, group, zeros, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    w = weights(Draw(0, torch.float32, device), layout, 256, 256, group, zeros)
    w.codes[:, 5] = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = w.numbers()
    for at in (8, 9, 10, 11, 131, 255):
        x = torch.zeros(3, 256, device=device, dtype=dtype)
        x[:, at] = 1
        got = nibble_gemv.nibble_gemv(x, w, Config(16, 128, 1, 2), out_TO=torch.empty(3, 256, device=device))
        torch.testing.assert_close(got, numbers[:, at].expand(3, -1), rtol=2e-7, atol=0)


def test_few_rows_take_the_kernel_for_words(device):
    """With zero points more rows do, since the other kernel moves numbers through shared memory then."""
    draw = Draw(0, torch.float32, device)
    for layout, group, zeros in [("mxfp4", 32, False), ("nvfp4", 16, False), ("u4", 128, True), ("u4", 64, False)]:
        w, most = weights(draw, layout, 64, 512, group, zeros), 32 if zeros else 8
        configs = [nibble_gemv.choose(rows, 4096, w, gated) for rows in (1, 8, most) for gated in (False, True)]
        assert all(config is not None and nibble_gemv.takes(w, config.block_k) for config in configs)
        assert nibble_gemv.choose(most + 1, 4096, w) is None
    for layout, group in (("u4", 32), ("i8", 0), ("fp6", 0)):
        assert nibble_gemv.choose(1, 4096, weights(draw, layout, 64, 512, group, False)) is None


@pytest.mark.parametrize("mutation", ["nibbles swapped", "a neighbour's scale", "a zero point off by one", "tail"])
def test_a_wrong_word_shows(mutation, device):
    draw = Draw(0, torch.float32, device)
    w, x = weights(draw, "u4", 64, 384, 128, True), draw(3, 384)
    want, config = x.double() @ w.numbers().double().t(), Config(16, 128, 1, 2)
    right = nibble_gemv.nibble_gemv(x, w, config)
    torch.testing.assert_close(right.double(), want, rtol=1e-5, atol=1e-5)
    if mutation == "tail":
        wrong = nibble_gemv.nibble_gemv(x[:, :256].contiguous(), replace(
            w, codes=w.codes[:, :128].contiguous(), scales=w.scales[:, :2].contiguous(),
            more=w.more[:, :2].contiguous()), config)  # fmt: skip
    else:
        wrong = nibble_gemv.nibble_gemv(x, WRONG[mutation](w), config)
    assert (wrong.double() - want).abs().max() > 0.05 * want.abs().max()


@pytest.mark.parametrize("rows, config", SHAPES)
@pytest.mark.parametrize("layout, group, zeros", LAYOUTS)
def test_every_code_is_multiplied_with_its_own_scale(layout, group, zeros, rows, config, device):
    """A row of x with one 1 reads one weight of every output: all codes of a byte stand somewhere in the matrix."""
    inputs = 256 if layout.endswith("_k") else 128
    w = weights(Draw(0, torch.float32, device), layout, 256, inputs, group, zeros)
    every = torch.arange(256, dtype=torch.uint8, device=device)
    w.codes[:, 5] = every.view(w.codes.dtype)
    if w.high is not None:  # with all sixteen pairs of upper bits
        w.high[:, 2] = every.flip(0)
    numbers = w.numbers()
    for at in (5, 10, 11, 127):
        x = torch.zeros(rows, inputs, device=device)
        x[:, at] = 1
        got = codes_gemv(x, w, config)
        torch.testing.assert_close(got, numbers[:, at].expand(rows, -1), rtol=2e-7, atol=0)


@pytest.mark.parametrize("layout, group, zeros", LAYOUTS)
def test_the_matrix_is_that_of_the_reference(layout, group, zeros, device):
    for outputs, inputs in ((33, 256 if layout.endswith("_k") else 192), (16, 512)):
        w = weights(Draw(0, torch.float32, device), layout, outputs, inputs, group, zeros)
        torch.testing.assert_close(matrix_of(w, torch.float32), w.numbers(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout, group, zeros", LAYOUTS)
def test_one_row_takes_the_kernel_without_tensor_cores(layout, group, zeros, gated, device):
    """Their table once had a row for one layout that caught others, which cost a quarter of the tokens of a step."""
    w = weights(Draw(0, torch.float32, device), layout, 4096, 512, group, zeros)
    assert choose(1, 4096, w, gated).block_n < 16 <= choose(2, 4096, w, gated).block_n


@jit
def _write_tile(w_ptr, high_ptr, w_scale_ptr, more_ptr, y_ptr, rows, B, G, BLOCK_N: tl.constexpr, BYTES: tl.constexpr,
                GROUPS: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr,
                ZEROS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """A matrix of one block as a tensor core gets it."""
    n = tl.arange(0, BLOCK_N)
    w = code_tiles.load_codes(
        w_ptr + n[:, None] * B, high_ptr + n[:, None] * (B // 2), n < rows, 0, B, LAYOUT, BLOCK_N, BYTES, True
    )
    s, z = code_tiles.load_scales(w_scale_ptr, more_ptr, n, n < rows, 0, G, LAYOUT, ZEROS, GROUP, GROUPS)
    s, z = code_tiles.scales_of(s, z, LAYOUT)
    y = code_tiles.tile_of(w, s, z, tl.bfloat16, LAYOUT, BLOCK_N, GROUPS, BYTES, PAIR, ZEROS, GROUPS > 1, ASM)
    tl.store(y_ptr + n[:, None] * (B * PAIR) + tl.arange(0, BYTES * PAIR)[None, :], y)


@pytest.mark.parametrize("layout, group, zeros", [("u4", 128, False), ("u4", 128, True), *LAYOUTS[4:7]])
def test_numbers_in_bf16_are_exact(layout, group, zeros, device):
    """Integer operations give every number that a code stands for, times its scale where that is exact, and else the
    factor that the sums are multiplied by."""
    w = weights(Draw(0, torch.float32, device), layout, 16, 128, group, zeros)
    want = w.numbers()
    if layout == "mxfp4":  # the ends of what is exact
        w.scales[:2], w.scales[2:4] = 127 - 100, 127 + 33
        want = w.numbers()
    elif layout == "nvfp4":
        want = want / w.more[:, None]
    elif layout == "u4" or layout == "fp6":  # the scale multiplies sums
        want = replace(w, scales=torch.ones_like(w.scales)).numbers()
    got = torch.empty(16, 128, dtype=torch.bfloat16, device=device)
    _write_tile[(1,)](*w.pointers(), got, 16, BLOCK_N=16, **w.constants(128))
    factor = 2.0**32 if layout in ("mxfp4", "nvfp4") else 1.0
    torch.testing.assert_close(got.float() * factor, want, rtol=2e-7 if layout == "nvfp4" else 0, atol=0)


WRONG = {
    "nibbles swapped": lambda w: replace(w, codes=w.codes << 4 | w.codes >> 4),
    "a neighbour's scale": lambda w: replace(w, scales=w.scales.view(torch.uint8).roll(w.scales.itemsize, -1)
                                             .view(w.scales.dtype) if w.group else w.scales.roll(1, 0)),
    "a zero point off by one": lambda w: replace(w, more=w.more + 1),
    "an inverse tensor scale": lambda w: replace(w, more=1 / w.more),
    "upper bits of the neighbour": lambda w: replace(w, high=w.high >> 2 & 0x33 | w.high << 2 & 0xCC),
    "a neighbour's factor": lambda w: replace(w, more=w.more.roll(1, 0)),
    "scale and least code swapped": lambda w: replace(w, scales=w.scales.unflatten(-1, (-1, 2)).flip(-1).flatten(1)),
}  # fmt: skip


@pytest.mark.parametrize("rows, config", SHAPES)
@pytest.mark.parametrize(
    "layout, what",
    [(layout, what) for layout in LAYOUTS[2:] for what in list(WRONG)[:2]]
    + [(LAYOUTS[3], "a zero point off by one"), (LAYOUTS[5], "an inverse tensor scale")]
    + [(layout, "upper bits of the neighbour") for layout in LAYOUTS[6:8]]
    + [(layout, "a neighbour's factor") for layout in LAYOUTS[7:]]
    + [(LAYOUTS[8], "scale and least code swapped")],
    ids=str,
)
def test_the_comparison_can_fail(layout, what, rows, config, device):
    draw = Draw(0, torch.float32, device)
    w, x = weights(draw, layout[0], 48, 256, *layout[1:]), draw(rows, 256)
    want = x.double() @ w.numbers().double().t()
    right, wrong = codes_gemv(x, w, config), codes_gemv(x, WRONG[what](w), config)
    torch.testing.assert_close(right.double(), want, rtol=1e-5, atol=1e-5)
    assert (wrong.double() - want).abs().max() > 0.05 * want.abs().max()
