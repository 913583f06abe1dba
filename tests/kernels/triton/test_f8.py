"""The FP8 kernels over their grids, and what must fail: a neighbour's scale, and a scale's inverse."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import f8, f8_gemv, moe
from kvasir.kernels.f8 import F8
from kvasir.kernels.gemv import Config
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import NormSpec
from kvasir.layers.weight_format import load_format
from kvasir.layers.weights import Placement
from tests.kernels.check_f8 import CHECKS, exact, weights
from tests.kernels.check_fused import Draw

CASES = [(op, case) for op, (grid, _) in CHECKS.items() for case in grid()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op, case", CASES, ids=str)
def test_against_the_reference(op, case, dtype, device):
    if op == "f8 gemv" and case.config.block_n >= 16 and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    if op == "f8 matmul" and dtype == torch.float32 and device != "cpu":
        pytest.skip("the tensor cores' library writes 16 bits")
    CHECKS[op][1](case, dtype, device)


@pytest.mark.parametrize(
    "rows, config", [(1, Config(4, 32, 1)), (1, Config(16, 32, 1, 2)), (3, Config(32, 32, 2, 3, splits=2))]
)
@pytest.mark.parametrize("block", [0, 32])
def test_every_code_is_multiplied_with_its_own_scale(block, rows, config, device):
    """All 254 codes that are numbers, each alone: a row of x with one 1 reads one weight of every output."""
    codes = torch.arange(256, dtype=torch.uint8).view(64, 4).repeat(1, 16).to(device)  # [64, 64]
    codes[(codes & 127) == 127] = 0
    scale = torch.tensor([[0.5, 3.0], [7.0, 0.25]]) if block else torch.arange(1.0, 65.0)
    w = F8(codes.view(f8.E4M3), scale.to(device), block)
    for at in (0, 1, 2, 3, 33):
        x = torch.zeros(rows, 64, device=device)
        x[:, at] = 1
        got = f8_gemv.f8_gemv(x, w, config)
        assert torch.equal(got, exact(w).float()[:, at].expand(rows, -1))


@pytest.mark.parametrize(
    "rows, config", [(1, Config(4, 32, 1)), (1, Config(16, 32, 1, 2)), (3, Config(32, 32, 2, 3, splits=2))]
)
@pytest.mark.parametrize("mutation", ["neighbour", "inverse"])
@pytest.mark.parametrize("block", [0, 32])
def test_a_wrong_scale_shows(block, mutation, rows, config, device):
    draw = Draw(0, torch.float32, device)
    w, x = weights(draw, 64, 96, block=block), draw(rows, 96)
    scale = w.scale.roll(1, -1) if mutation == "neighbour" else 1 / w.scale
    want = x.double() @ exact(w).t()
    right, wrong = f8_gemv.f8_gemv(x, w, config), f8_gemv.f8_gemv(x, F8(w.codes, scale, block), config)
    torch.testing.assert_close(right.double(), want, rtol=1e-5, atol=1e-5)
    assert (wrong.double() - want).abs().max() > 0.05 * want.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("block", [0, 32])
def test_experts(block, rows, device):
    """Grouped products of codes are those of the dequantised weights; one of a neighbour's scale is not."""
    draw, experts, dim, width = Draw(rows, torch.float32, device), 5, 96, 64
    gate_up, down = weights(draw, experts, 2 * width, dim, block=block), weights(draw, experts, dim, width, block=block)
    x, logits, bias = draw(rows, dim), draw(rows, experts), (draw(experts, 2 * width), draw(experts, dim))
    want = moe.moe_reference(x.double(), logits.double(), exact(gate_up), exact(down), 2, True, biases=bias)
    tile = moe.Tile(16, 32, 32, 2, 2)

    def run(first: F8, second: F8) -> torch.Tensor:
        return moe.moe_triton(x, logits, first, second, 2, True, tiling=moe.Tiling(tile, tile), biases=bias)

    size = float(want.abs().max())
    assert (run(gate_up, down).double() - want).abs().max() < 1e-5 * size
    for planes in (
        (F8(gate_up.codes, gate_up.scale.roll(1, 1), block), down),
        (gate_up, F8(down.codes, down.scale.roll(1, 0), block)),
    ):
        assert (run(*planes).double() - want).abs().max() > 1e-2 * size
    if rows == 1:
        router = draw(experts, dim)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        got = moe.moe_row_triton(x, router, gate_up, down, 2, True, arrived, biases=bias)
        want = moe.moe_reference(
            x.double(), (x @ router.t()).double(), exact(gate_up), exact(down), 2, True, biases=bias
        )
        assert (got.double() - want).abs().max() < 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("spec", ["f8", "f8:scale=block,block=32"])
def test_the_format_takes_the_kernels_for_few_rows(spec, activation, device):
    """One launch, and two from 129 rows on, agree with tiles of dequantised weights; also before the activation."""
    draw, width = Draw(0, torch.float32, device), 64
    place = Placement(torch.device(device), torch.float32, formats=lambda slots: load_format(spec))
    layer, norm = Linear(width, {"a": 32, "b": 32}, bias=False, place=place), RMSNorm(width, NormSpec(), place)
    for slot in layer.weight.slots().values():
        if slot.whole is not None:
            slot.whole.put(draw(*slot.whole.shape, scale=width**-0.5))
    norm.weight.copy_(draw(width))
    for rows in (1, 3, 70, 130):
        x, residual = draw(rows, width), None if activation else draw(rows, width)
        found = []
        for layer.weight.streams in (False, True):
            stream = None if residual is None else residual.clone()
            found.append(layer(x, norm, stream, activation=activation))
        assert residual is None or found[-1] is stream, "the result takes the residual's place"
        torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)
    layer.weight.streams = True
    sums = layer.weight.format.sums(layer.weight, x[:5], norm, None, norm(x[:5]), "silu")
    torch.testing.assert_close(sums, norm(x[:5]) @ layer.weight.dequantise().t(), atol=2e-5, rtol=2e-5)
