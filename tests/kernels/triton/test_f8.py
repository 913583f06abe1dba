"""The FP8 kernels over their grids, and what must fail: a neighbour's scale, and a scale's inverse."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import f8, f8_gemv
from kvasir.kernels.f8 import F8
from kvasir.kernels.gemv import Config
from tests.kernels.check_f8 import CHECKS, exact, weights
from tests.kernels.check_fused import Draw

CASES = [(op, case) for op, (grid, _) in CHECKS.items() for case in grid()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op, case", CASES, ids=str)
def test_against_the_reference(op, case, dtype, device):
    if op == "f8 gemv" and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    if op == "f8 matmul" and dtype == torch.float32 and device != "cpu":
        pytest.skip("the tensor cores' library writes 16 bits")
    CHECKS[op][1](case, dtype, device)


@pytest.mark.parametrize("rows, config", [(1, Config(4, 32, 1)), (3, Config(16, 32, 1, 2))])
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


@pytest.mark.parametrize("rows, config", [(1, Config(4, 32, 1)), (3, Config(16, 32, 1, 2))])
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
