"""The experts' kernels for codes over their grid, the layer that takes them, and what must fail."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kvasir.kernels import codes_moe
from kvasir.kernels.codes_gemv import Coded
from kvasir.layers.codes import STREAMED_PAIRS
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import MoESpec, NormSpec
from kvasir.layers.weight_format import load_format
from kvasir.layers.weights import Placement
from tests.kernels.check_codes import check_moe
from tests.kernels.check_fused import Draw
from tests.kernels.triton.test_codes import WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(codes_moe.grid()), ids=str)
def test_against_the_reference(case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_moe(case, dtype, device)


def of_the_expert_before(w: Coded) -> Coded:
    """Scales, and what goes with them, in another expert's place."""
    scales = w.scales.view(torch.uint8).roll(1, 0).view(w.scales.dtype)
    return replace(w, scales=scales, more=None if w.more is None else w.more.roll(1, 0))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "layout, what",
    [(("mxfp4", 32, False), what) for what in list(WRONG)[:2]]
    + [(("u4", 32, True), "a zero point off by one"), (("nvfp4", 16, False), "an inverse tensor scale")]
    + [((layout, group, zeros), "another expert's scales") for layout, group, zeros in
       (("i8", 0, False), ("u4", 32, True), ("mxfp4", 32, False), ("nvfp4", 16, False))],
    ids=str,
)  # fmt: skip
def test_the_comparison_can_fail(layout, what, rows, device):
    case = codes_moe.Case(layout[0], layout[1], rows, layout[2])
    with pytest.raises(AssertionError):
        check_moe(case, torch.float32, device, (WRONG | {"another expert's scales": of_the_expert_before})[what])


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "u4:group=32,zeros=true", "i8"])
def test_the_layer_takes_the_codes(spec, device):
    """As gpt-oss has it: biases, a router with one, the clamped activation. One row and several agree with the plain
    form over dequantised weights, which no product of few rows makes."""
    draw = Draw(0, torch.float32, device)
    place = Placement(torch.device(device), torch.float32, formats=lambda slots: load_format(spec))
    moe = MoESpec(6, 2, 32, True, activation="clamped_swiglu", bias=True, router_bias=True)
    layer, norm = FFN(moe, 64, place), RMSNorm(64, NormSpec(), place)
    for slot in (*layer.slots().values(), *norm.slots().values()):
        if slot.whole is not None:
            slot.whole.put(draw(*slot.whole.shape, scale=0.1))
        elif slot.target.is_floating_point() and slot.random is None:
            slot.target.copy_(draw(*slot.target.shape))
    for rows in (1, 5):
        x, residual = draw(rows, 64), draw(rows, 64)
        want = layer._forward_plain(norm(x), *layer.route(norm(x))) + residual
        for weight in (layer.gate_up, layer.down):
            weight.streams = True
        never = mock.patch.object(type(layer.gate_up.format), "dequantise", side_effect=AssertionError("a copy"))
        with never, mock.patch.object(FFN, "_forward_plain", side_effect=AssertionError("the plain form ran")):
            got = layer.forward(x, norm, residual.clone())
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        weight, many = layer.gate_up, STREAMED_PAIRS + 1
        assert isinstance(weight.format.grouped(weight, many), torch.Tensor), "prompts take a copy"
        for weight in (layer.gate_up, layer.down):
            weight.streams = False
