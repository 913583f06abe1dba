"""The quantising kernels over their grids."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import quantized_decode, quantized_qkv
from tests.kernels.check_quantized import check_gather, check_quantized_decode, check_quantized_qkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(quantized_qkv.grid()), ids=str)
def test_write(case, dtype, device):
    if case.format == "fp8" and device == "cpu":
        pytest.skip("the interpreter loses a carry when it rounds to fp8: 127.8 becomes 64; the GPU runs this")
    if dtype == torch.bfloat16 and device == "cpu" and case.order:
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_quantized_qkv(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(quantized_decode.grid()), ids=str)
def test_decode(case, dtype, device):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 matrices as if they were integers; the GPU runs this")
    check_quantized_decode(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format, dim", [("int4", 64), ("int4", 80), ("int8", 96), ("fp8", 128)])
def test_gather(format, dim, dtype, device):
    check_gather(format, dim, dtype, device)
