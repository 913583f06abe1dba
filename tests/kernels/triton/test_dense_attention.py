"""The kernel for long spans over its grid, on poisoned pages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvasir.kernels import _triton, hopper_attention
from kvasir.kernels import dense_attention as dense
from kvasir.kernels.hopper_attention import HopperShape
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


BY_HAND = [HopperShape(), HopperShape(turns=True), HopperShape(stages=3), HopperShape(block_n=64, stages=4, turns=True),
           HopperShape(192, 64, 4, 3), HopperShape(consumers=1), HopperShape(64, 64, 3, 0), HopperShape(consumers=0)]
SERVED = [c for c in (*dense.grid(), *dense.ragged()) if hopper_attention.can_serve_hopper(torch.float16, c.dim, c.heads // c.kv_heads,
                                                                                          c.softcap is not None, c.sinks)]
hopper = pytest.mark.skipif(_triton.INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", BY_HAND, ids=str)
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_by_hand(case, shape, dtype, device):
    check_dense_attention(case, dtype, device, shape=shape)


@pytest.mark.parametrize("case", list(dense.ragged()), ids=str)
def test_ragged(case, device):
    """What the kernels placed by hand are held to."""
    if _triton.INTERPRETED and case.spans[0][0] > 1000:
        pytest.skip("takes the interpreter long")
    check_dense_attention(case, torch.float16, device)


@pytest.mark.parametrize("softcap, sinks, dim, share", [(2.0, False, 64, 1), (None, True, 64, 1), (None, False, 256, 1), (None, False, 64, 128)])
def test_what_the_kernel_by_hand_leaves_to_the_other(softcap, sinks, dim, share):
    assert not hopper_attention.can_serve_hopper(torch.float16, dim, share, softcap is not None, sinks)
    assert not hopper_attention.can_serve_hopper(torch.float32, 64, 1, False, False) and hopper_attention.can_serve_hopper(torch.float16, 64, 1, False, False)
