"""The kernel for long spans over its grid, on poisoned pages."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from kvasir.kernels import _triton, exp2
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


LAZY = dataclasses.replace(dense.Shape.of(64), lazy=True)


@pytest.mark.parametrize("shape", [LAZY, dataclasses.replace(LAZY, lazy=False, share=4)], ids=str)
def test_ideas_of_flash_attention_4(shape, device):
    """Sums rescaled only where maxima grow enough, and powers of two by a polynomial, within the same bounds."""
    check_dense_attention(dense.Case(spans=((300, 130), (0, 64)), heads=4), torch.float16, device, shape=shape)


def test_polynomial_powers():
    """The polynomial's error is below its bound everywhere, and without its cubic term it is not."""
    x = torch.linspace(-120, 127, 400_001)
    error = (exp2.exp2_reference(x).double() / x.double().exp2() - 1).abs().max()
    assert error < exp2.MAX_ERROR and float(exp2.exp2_reference(torch.tensor([-torch.inf]))) < 1e-37
    with mock.patch.object(exp2, "COEFFICIENTS", (*exp2.COEFFICIENTS[:3], 0.0)):
        assert (exp2.exp2_reference(x).double() / x.double().exp2() - 1).abs().max() > 10 * exp2.MAX_ERROR


@pytest.mark.parametrize("shape", [dense.Shape.of(64), LAZY, None], ids=str)
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


@hopper
@pytest.mark.parametrize("lazy, share", [(True, 0), (False, 4), (False, 8), (True, 4)])
def test_ideas_by_hand(lazy, share, device):
    shape = dataclasses.replace(HopperShape.of(), lazy=lazy, share=share)
    for case in list(dense.ragged())[::2]:
        check_dense_attention(case, torch.bfloat16, device, shape=shape)


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
