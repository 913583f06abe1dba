"""The kernel for long spans over its grid, on poisoned pages."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import dense_attention as dense
from tests.kernels.check import check_dense_attention


@pytest.mark.parametrize("case", list(dense.grid()), ids=str)
def test_fp16(case, device):
    check_dense_attention(case, torch.float16, device)


def test_tiles_of_other_shapes(device):
    case = dense.Case(spans=((100, 150), (0, 64)), heads=4)
    check_dense_attention(case, torch.float16, device, shape=dense.Shape(block_m=64, block_n=64, warps=4, stages=3))
