"""fp32 weights read as fp16 against plain products in fp64, and which weights may be."""

import pytest
import torch

from kvasir.kernels import packed_fp16
from kvasir.layers.linear import Linear
from kvasir.layers.weights import Placement

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch build has no FBGEMM"
)


def stored(*shape: int) -> torch.Tensor:
    """Weights as a bf16 checkpoint holds them."""
    return (
        (torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])) * 0.05).bfloat16().float()
    )


@pytest.mark.parametrize("case", list(packed_fp16.grid()), ids=str)
def test_products_are_as_exact_as_in_fp32(case):
    weight, x = stored(case.num_outputs, case.num_inputs), torch.randn(case.rows, case.num_inputs)
    want = x.double() @ weight.double().t()
    for layout in (weight, weight.t().contiguous().t()):
        assert packed_fp16.fits(layout)
        got = packed_fp16.linear(x, packed_fp16.pack(layout))
        assert got.dtype == torch.float32 and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_weights_that_would_lose_something_are_left_alone():
    weight = stored(512, 520)
    assert packed_fp16.fits(weight)
    assert not packed_fp16.fits(weight + 2.0**-14), "more than 11 bits"
    assert not packed_fp16.fits(weight * 1e8), "beyond fp16's range"
    assert not packed_fp16.fits(weight * torch.nan)
    assert not packed_fp16.fits(weight.bfloat16())
    assert not packed_fp16.fits(weight[:128]), "too small to gain"


@pytest.mark.parametrize("exact,bias,stays", [(False, False, False), (True, False, True), (False, True, True)])
def test_a_layer_packs_what_few_rows_read(exact, bias, stays):
    layer = Linear(512, {"a": 256, "b": 264}, bias=bias, place=Placement(CPU, torch.float32, exact))
    for name, slot in layer.slots().items():
        slot.fill(stored(*slot.shape) if name.endswith("weight") else torch.ones(slot.shape))
    for rows in (1, packed_fp16.MAX_ROWS, packed_fp16.MAX_ROWS + 1):
        x = torch.randn(rows, 512)
        want = x.double() @ layer.weight.tensor.double().t() + (0 if layer.bias_N is None else layer.bias_N)
        torch.testing.assert_close(layer(x).double(), want, atol=1e-5, rtol=1e-5)
    assert (layer.weight.made.packed is None) == stays
