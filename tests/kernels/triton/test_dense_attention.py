"""The kernel for long spans over its grid, on poisoned pages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvasir.kernels import dense_attention as dense
from tests.kernels import check
from tests.kernels.check import check_dense_attention, make_world


@pytest.mark.parametrize("case", list(dense.grid()), ids=str)
def test_fp16(case, device):
    check_dense_attention(case, torch.float16, device)


def test_tiles_of_other_shapes(device):
    case = dense.Case(spans=((100, 150), (0, 64)), heads=4)
    check_dense_attention(case, torch.float16, device, shape=dense.Shape(block_m=64, block_n=64, warps=4, stages=3))


@pytest.mark.parametrize("shape", [dense.Shape(late=True), dense.Shape(128, 128, 8, 2, late=True), dense.Shape(lazy=True)], ids=str)
@pytest.mark.parametrize("case", list(dense.grid()), ids=str)
def test_other_orders(case, shape, device):
    check_dense_attention(case, torch.float16, device, shape=shape)


@pytest.mark.parametrize("shape", [dense.Shape(), dense.Shape(late=True), dense.Shape(lazy=True)], ids=str)
def test_maxima_that_grow(shape, device):
    """By more than 2 ** 8 from block to block, in some rows."""
    def loud(*args, **named):
        world = make_world(*args, **named)
        world.q.mul_(16)
        return world

    with mock.patch.object(check, "make_world", loud):
        check_dense_attention(dense.Case(spans=((300, 130),), heads=4), torch.float16, device, shape=shape)
