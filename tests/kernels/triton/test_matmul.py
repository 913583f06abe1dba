"""The batch-invariant product: against its reference, and a row's bits wherever the row stands."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import matmul
from tests.kernels.check_moe import check_matmul, check_row_bits


@pytest.mark.parametrize("case", list(matmul.grid()), ids=str)
def test_fp32(case, device):
    check_matmul(case, torch.float32, device)


@pytest.mark.parametrize("case", [c for c in matmul.grid() if c.rows in (1, 5)][::3], ids=str)
def test_fp16(case, device):
    check_matmul(case, torch.float16, device)


@pytest.mark.parametrize("inputs,outputs,splits", [(256, 40, 2), (1024, 70, 8), (1000, 70, 8), (96, 40, 1)])
def test_a_rows_bits(inputs, outputs, splits, device):
    assert matmul.split_runs(outputs, inputs, matmul.tile_for(torch.float32))[0] == splits
    check_row_bits(inputs, outputs, (2, 31, 45), torch.float32, device)


def test_a_rows_bits_fp16(device):
    check_row_bits(1088, 140, (3, 131), torch.float16, device)


def test_runs_cover_the_inputs():
    """Every block of inputs is in exactly one run, and no run is empty."""
    for tile in (matmul.tile_for(torch.float32), matmul.tile_for(torch.bfloat16)):
        for outputs in (1, 128, 4096, 28672, 151936):
            for inputs in (1, 64, 768, 2048, 4096, 4097, 14336):
                splits, steps = matmul.split_runs(outputs, inputs, tile)
                blocks = -(-inputs // tile.k)
                assert (splits - 1) * steps < blocks <= splits * steps


def test_weights_stored_transposed(device):
    x, w = torch.randn(3, 200, device=device), torch.randn(200, 50, device=device).t()
    torch.testing.assert_close(matmul.matmul_invariant(x, w), x @ w.t(), atol=1e-4, rtol=1e-4)


def test_weights_past_two_to_the_31_elements(device):
    """Outputs 2^26 elements apart (the memory between them is never touched)."""
    apart, outputs, inputs = 1 << 26, 40, 24
    dense = torch.randn(outputs, inputs).to(torch.float16).to(device)
    flat = torch.empty((outputs - 1) * apart + inputs, dtype=torch.float16, device=device)
    far = flat.as_strided((outputs, inputs), (apart, 1))
    far.copy_(dense)
    x = torch.randn(2, inputs).to(torch.float16).to(device)
    assert torch.equal(matmul.matmul_invariant(x, far), matmul.matmul_invariant(x, dense))
