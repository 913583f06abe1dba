"""Products of codes with inputs rounded to 8 bits in blocks of 32: equal to those of the rounded inputs in torch, and
what rounding loses. Controls with another block's scale or without the zero point must fail."""

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.kernels.native.library import native
from kvasir.kernels.native.program import ROWS, Program
from kvasir.kernels.native.quantized import dequantise_reference, pack_codes
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.weight_codes import round_inputs
from kvasir.layers.weight_format import Weight, load_format
from kvasir.layers.weights import Placement
from kvasir.models.native_decoder import _pack
from tests.kernels.native.test_program import NORM, rows_of
from tests.kernels.native.test_quantized import weight

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
LAYOUTS = ["i8", "u4", "u4 zeros"]
SHAPES = [(40, 70, 1), (33, 384, 3), (48, 160, 5), (17, 256, 1)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def product(x, stored, **options):
    gated = options.get("activation") is not None
    program, packed = Program(native().library), pack_codes(native().library, *stored, gated=gated, rounded=True)
    y = torch.full((len(x), packed.num_outputs), torch.nan)
    program.linear(x, packed, y, **options)
    program.run(rows_of(len(x)))
    return y


def compare(got, x, stored):
    want = round_inputs(x).double() @ dequantise_reference(*stored).double().t()
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9, ROWS + 3])
def test_products_are_those_of_rounded_inputs(rows, layout):
    for shape in SHAPES:
        stored, x = weight(layout, *shape), torch.randn(rows, shape[1]) * torch.logspace(-2, 1, shape[1])
        if rows:
            x[0, :33] = 0
        compare(product(x, stored), x, stored)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_of_codes_is_multiplied_exactly(layout):
    """Weights of all codes times inputs -127 .. 127, whose sums are whole numbers."""
    numbers = list(range(-128, 128)) if layout == "i8" else list(range(16)) * 16
    codes = torch.tensor(numbers, dtype=torch.int8 if layout == "i8" else torch.uint8)
    codes = torch.stack([codes.roll(i) for i in range(16)])
    zeros = torch.arange(16.0)[:, None] if layout == "u4 zeros" else None
    stored = codes, torch.ones(16, 1), zeros
    x = torch.randint(-127, 128, (9, 256)).float()
    x[:, ::32] = 127.0  # every block has scale 1
    x[0], x[1] = 127.0, -127.0
    want = x.double() @ dequantise_reference(*stored).double().t()
    assert torch.equal(product(x, stored).double(), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_does_not_depend_on_the_others(layout):
    x, stored, scale = torch.randn(70, 320), weight(layout, 100, 320, 5), torch.rand(320)
    whole = product(x, stored, norm=(scale, NORM))
    for first, stop in ((0, 1), (3, 10), (15, 32), (7, 60)):
        assert torch.equal(product(x[first:stop].clone(), stored, norm=(scale, NORM)), whole[first:stop])


def test_norm_gate_and_bias_are_fused():
    stored, bias, scale, x = weight("u4", 80, 96, 3), torch.randn(80), torch.rand(96), torch.randn(5, 96) * 3
    normed = round_inputs(rms_norm_reference(x, scale, NORM)).double()
    gate, up = (normed @ dequantise_reference(*stored).double().t() + bias).split(40, 1)
    got = product(x, stored, bias_N=bias, norm=(scale, NORM), activation="silu")
    # A code that lies on a border is another where the norm rounds otherwise.
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, atol=2e-2, rtol=2e-2)


def test_what_is_no_number_shows():
    stored, x = weight("i8", 24, 128, 1), torch.randn(3, 128)
    x[1, 70] = torch.nan
    got = product(x, stored)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounding_loses_little_and_the_comparison_can_fail(layout):
    codes, scales, zeros = stored = weight(layout, 48, 256, 2)
    x = torch.randn(6, 256) * torch.logspace(-1, 1, 256)
    want = x @ dequantise_reference(*stored).t()
    got = product(x, stored)
    assert 1e-4 < (got - want).norm() / want.norm() < 0.02
    swapped = codes.view(len(codes), -1, 2).flip(2).reshape(codes.shape)
    for other in ((codes, scales.roll(1, 1), zeros), (swapped, scales, zeros)):
        with pytest.raises(AssertionError):
            compare(product(x, other), x, stored)
    with pytest.raises(AssertionError):
        compare(product(x.view(6, -1, 32).flip(1).reshape(x.shape), stored), x, stored)


@pytest.mark.parametrize("name", ["i8:inputs=int8", "i8:group=64,inputs=int8", "u4:group=32,zeros=true,inputs=int8"])
def test_a_format_rounds_alike_with_and_without_the_c_kernels(name):
    form, w_NK, x = load_format(name), torch.randn(40, 128), torch.randn(5, 128)
    held = Weight({"a": 40}, 128, Placement(torch.device("cpu"), torch.float32, formats=lambda _: form))
    held.put(0, w_NK)
    program, packed, y = Program(native().library), _pack(held), torch.full((5, 40), torch.nan)
    program.linear(x, packed, y)
    program.run(rows_of(5))
    torch.testing.assert_close(y, held(x), atol=1e-4, rtol=1e-4)
    plain = x @ held.dequantise().t()
    assert packed.rounded and not torch.allclose(y, plain, atol=1e-4, rtol=1e-4), "the inputs are rounded"
    with pytest.raises(ConfigError, match="inputs=int8 is for CPUs"):
        form.allocate(None, (40,), 128, Placement(torch.device("cuda"), torch.float32))
