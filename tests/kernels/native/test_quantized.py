"""Products with codes of 8 and 4 bits against plain torch: every code, each layout of scales, any number of rows, with
and without matrix tiles. Controls with a wrong scale, swapped nibbles or a zero point off by one must fail."""

import pytest
import torch

from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import ROWS, Program
from kvasir.kernels.native.quantized import dequantise_reference, pack_codes, unpack_codes
from kvasir.kernels.norm import rms_norm_reference
from tests.kernels.native.test_program import NORM, TILES, close, rows_of

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
LAYOUTS = ["i8", "u4", "u4 zeros"]
# outputs, inputs, groups: by channel and with groups of 32, 64, 96, 128 and 16 inputs
SHAPES = [(40, 70, 1), (33, 384, 1), (48, 160, 5), (17, 256, 4), (35, 192, 2), (64, 384, 3), (40, 224, 14)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def weight(layout, outputs, inputs, groups):
    """Codes, scales and zero points."""
    scales = (torch.rand(outputs, groups) + 0.1) * inputs**-0.5 / (60 if layout == "i8" else 4)
    if layout == "i8":
        return torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), scales, None
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    return codes, scales, torch.rand(outputs, groups) * 15 if layout == "u4 zeros" else None


def product(x, stored, tiles=0, **options):
    """The kernel's product, into NaN, so that what is left out shows."""
    program = Program(native().library)
    packed = pack_codes(native().library, *stored, gated=options.get("activation") is not None)
    program.tiles = tiles
    y = options.pop("into", torch.full((len(x), packed.num_outputs), torch.nan))
    program.linear(x, packed, y, **options)
    program.run(rows_of(len(x)))
    return y


def compare(got, x, stored):
    """A code is up to twice as large as what is left of it after the zero point, and so is what a sum may lose."""
    w = dequantise_reference(*stored)
    close(got, x.double() @ w.double().t(), 3 * x, w)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 9, 17, ROWS, ROWS + 3, 150])
def test_products_are_as_exact_as_in_fp32(rows, layout, tiles):
    for shape in SHAPES:
        stored, x = weight(layout, *shape), torch.randn(rows, shape[1])
        compare(product(x, stored, tiles), x, stored)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_is_the_number_that_the_table_says(layout, tiles):
    """Scales are powers of two, so that a weight times one is exact."""
    numbers = list(range(-128, 128)) if layout == "i8" else list(range(16)) * 16
    codes = torch.tensor(numbers, dtype=torch.int8 if layout == "i8" else torch.uint8).repeat(3, 1)
    scales = torch.tensor([[1.0, 0.25], [4.0, 2.0], [0.5, 1.0]])
    zeros = torch.tensor([[0.0, 3.0], [15.0, 8.0], [7.0, 1.0]]) if layout == "u4 zeros" else None
    table = torch.tensor(numbers, dtype=torch.float32).repeat(3, 1) - (8.0 if layout == "u4" else 0.0)
    if zeros is not None:
        table -= zeros.repeat_interleave(128, 1)
    table *= scales.repeat_interleave(128, 1)
    for rows in (256, 20, 1):
        got = product(torch.eye(256)[:rows].clone(), (codes, scales, zeros), tiles)
        assert torch.equal(got, table.t()[:rows])


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_does_not_depend_on_the_others(layout, tiles):
    x, stored = torch.randn(150, 320), weight(layout, 100, 320, 5)
    scale = torch.rand(320)
    whole = product(x, stored, tiles, norm=(scale, NORM))
    for first, stop in ((0, 1), (3, 10), (15, 32), (7, 60), (140, 150)):
        assert torch.equal(product(x[first:stop].clone(), stored, tiles, norm=(scale, NORM)), whole[first:stop])


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_fused_with_a_product(layout, tiles):
    for rows, width, inputs, groups in ((1, 40, 96, 3), (9, 16, 64, 1), (3, 136, 128, 2)):
        stored, bias, scale = weight(layout, 2 * width, inputs, groups), torch.randn(2 * width), torch.rand(inputs)
        x, w = torch.randn(rows, inputs) * 3, dequantise_reference(*stored).double()
        gate, up = (rms_norm_reference(x.double(), scale.double(), NORM) @ w.t() + bias).split(width, 1)
        got = product(x, stored, tiles, bias_N=bias, norm=(scale, NORM), activation="silu")
        torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, atol=3e-5, rtol=3e-5)
        before = torch.randn(rows, 2 * width)
        got = product(x, stored, tiles, bias_N=bias, into=before.clone(), add=True)
        torch.testing.assert_close(got.double(), before + x.double() @ w.t() + bias, atol=3e-5, rtol=3e-5)
        capped = product(x, stored, tiles, scale=3.0, softcap=2.0)
        want = 2 * torch.tanh(x.double() @ w.t() * 3 / 2)
        torch.testing.assert_close(capped.double(), want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_panels_hold_codes_and_scales_alone(layout):
    """A layout that was widened would pass every other test."""
    for group in (32, 128):
        packed = pack_codes(native().library, *weight(layout, 128, 256, 256 // group))
        scales = 8 if layout == "u4 zeros" else 4
        assert packed.data.nbytes == 128 * 256 // (1 if layout == "i8" else 2) + 128 * 256 // group * scales


@pytest.mark.parametrize("layout", ["i8", "u4"])
def test_offsets_may_be_given_in_place_of_zero_points(layout):
    """Groups of 16 and 32 inputs, as in K-quants."""
    for rows, groups in ((1, 16), (5, 8), (40, 16)):
        codes, scales, _ = weight(layout, 24, 256, groups)
        x, zeros = torch.randn(rows, 256), torch.rand(24, groups) * 9
        packed = pack_codes(native().library, codes, scales, offsets_NG=-scales * zeros)
        program, y = Program(native().library), torch.full((rows, 24), torch.nan)
        program.linear(x, packed, y)
        program.run(rows_of(rows))
        compare(y, x, (codes, scales, zeros))
        with pytest.raises(AssertionError):
            compare(y, x, (codes, scales, zeros.roll(1, 1)))


def wrong(stored, what):
    codes, scales, zeros = stored
    if what == "nibbles swapped":
        return codes.view(len(codes), -1, 2).flip(2).reshape(codes.shape), scales, zeros
    if what == "a neighbour's scale":
        return codes, scales.roll(1, 1), zeros
    if what == "an inverse scale":
        return codes, 1 / scales, zeros
    return codes, scales, (torch.full_like(scales, 8.0) if zeros is None else zeros) + 1


@pytest.mark.parametrize(
    "layout, what",
    [(layout, what) for layout in LAYOUTS for what in ("nibbles swapped", "a neighbour's scale", "an inverse scale")]
    + [("u4", "a zero point off by one"), ("u4 zeros", "a zero point off by one")],
)
def test_the_comparison_can_fail(layout, what):
    stored, x = weight(layout, 48, 160, 5), torch.randn(3, 160)
    compare(product(x, stored), x, stored)
    with pytest.raises(AssertionError):
        compare(product(x, wrong(stored, what)), x, stored)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_come_back_from_their_panels(layout, gated, rounded):
    for outputs, inputs, groups in SHAPES:
        if rounded and groups > 1 and inputs // groups % 32 or gated and outputs % 2:
            continue
        codes, scales, zeros = weight(layout, outputs, inputs, groups)
        packed = pack_codes(native().library, codes, scales, zeros, gated, rounded=rounded)
        again = unpack_codes(native().library, packed)
        assert again.dtype == codes.dtype and torch.equal(again, codes), (outputs, inputs, groups)
