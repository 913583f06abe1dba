"""The fused kernels over their grids, and a decoder that runs on them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.check_fused import CHECKS

CASES = [(op, case) for op, (grid, _) in CHECKS.items() for case in grid()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op, case", CASES, ids=str)
def test_against_the_reference(op, case, dtype, device):
    if op == "gemv" and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    CHECKS[op][1](case, dtype, device)
