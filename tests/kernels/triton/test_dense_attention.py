"""The kernel for long spans over its grid, on poisoned pages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvasir.kernels import _triton
from kvasir.kernels import dense_attention as dense
from kvasir.kernels.hopper_attention import HopperShape, can_serve_hopper
from tests.kernels import check
from tests.kernels.check import check_dense_attention, make_world


@pytest.mark.parametrize("case", list(dense.grid()), ids=str)
def test_fp16(case, device):
    check_dense_attention(case, torch.float16, device, shape=dense.Shape.of(case.dim))


def test_tiles_of_other_shapes(device):
    case = dense.Case(spans=((100, 150), (0, 64)), heads=4)
    check_dense_attention(case, torch.float16, device, shape=dense.Shape(block_m=64, block_n=64, warps=4, stages=3))


@pytest.mark.parametrize("shape", [dense.Shape.of(64), None], ids=str)
def test_maxima_that_grow(shape, device):
    """Maxima grow by more than 2 ** 8 from block to block, in some rows."""

    def loud(*args, **named):
        world = make_world(*args, **named)
        world.q.mul_(16)
        return world

    with mock.patch.object(check, "make_world", loud):
        check_dense_attention(dense.Case(spans=((300, 130),), heads=4), torch.float16, device, shape=shape)


SERVED = [c for c in (*dense.grid(), *dense.ragged()) if c.dim < 256 and c.softcap is None]
hopper = pytest.mark.skipif(
    _triton.INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs Hopper",
)


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_by_hand(case, dtype, device):
    check_dense_attention(case, dtype, device, shape=HopperShape.of())


@pytest.mark.parametrize("case", list(dense.ragged()), ids=str)
def test_ragged(case, device):
    """Check the kernels placed by hand."""
    if _triton.INTERPRETED and (case.spans[0][0] > 1000 or len(case.spans) > 8):
        pytest.skip("takes the interpreter long")
    check_dense_attention(case, torch.float16, device, shape=dense.Shape.of(64))


@pytest.mark.parametrize(
    "dtype, dim, share, capped, sinks, served",
    [
        (torch.float16, 64, 1, False, False, True),
        (torch.float32, 64, 1, False, False, False),
        (torch.float16, 256, 1, False, False, False),
        (torch.float16, 64, 128, False, False, False),
        (torch.float16, 64, 1, True, False, False),
        (torch.float16, 64, 1, False, True, False),
    ],
)
def test_what_is_left_to_the_other_kernel(dtype, dim, share, capped, sinks, served):
    assert can_serve_hopper(dtype, dim, share, capped, sinks) == served
