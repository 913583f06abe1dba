"""The decode kernel over its grid, on poisoned pages: one chunk and many, balanced by whatever contexts there are."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import decode_attention as decode
from kvasir.kernels._triton import jit, tl
from kvasir.kernels.key_chunks import find_chunk
from tests.kernels.check import check_decode_attention, decode_world, run_decode


@pytest.mark.parametrize("case", list(decode.grid()), ids=str)
def test_fp32(case, device):
    check_decode_attention(case, torch.float32, device)


@pytest.mark.parametrize("case", list(decode.grid())[::3], ids=str)
def test_fp16(case, device):
    check_decode_attention(case, torch.float16, device)


@pytest.mark.parametrize("shape", [decode.Shape(64, 2, 2, 12, 4), decode.Shape(32, 2, 4, 12, 4)], ids=str)
def test_shapes_of_many_rows(shape, device, monkeypatch):
    """These shapes are not taken by the grid's few rows."""
    monkeypatch.setattr(decode.Shape, "of", staticmethod(lambda *what: shape))
    check_decode_attention(
        decode.Case(contexts=(333, 5, 64, 31, 130), heads=4, kv_heads=2, dim=128), torch.float16, device
    )


def test_long_work_is_cut_finer(device, monkeypatch):
    """A GPU starts to do so at a length that takes the interpreter long."""
    monkeypatch.setattr(decode, "SHORT_CHUNK", 64)
    check_decode_attention(decode.Case(contexts=(900, 500, 300), programs=2), torch.float32, device)


def test_a_launch_may_be_repeated_with_other_contexts(device):
    """A launch is repeated as a CUDA graph does it: the same tensors with new contents, and counters that every launch
    leaves at zero."""
    case = decode.Case(contexts=(700, 3, 260), programs=2)
    world, rows = decode_world(case, torch.float32, device)
    first = run_decode(world, rows, case)[0].clone()
    world.batch.context.copy_(torch.tensor([100, 2, 259]))
    run_decode(world, rows, case)
    world.batch.context.copy_(torch.tensor(case.contexts))
    assert not rows.arrived.any() and torch.equal(run_decode(world, rows, case)[0], first)


@jit
def _find(context, spans, out, count, wave, budget, COUNT_PAD: tl.constexpr):
    which, first, parts, chunk = find_chunk(0, context, spans, count, wave, budget, 0, 32, COUNT_PAD, 128, 1024, False)
    tl.store(out, chunk)


@pytest.mark.parametrize(
    "keys, wave, want",
    [
        ([1088] * 64, 66, 1088),
        ([1060] * 40 + [1140] * 24, 66, 1152),  # fill the device as they are
        ([1088] * 8, 66, 160),
        ([1088] * 32, 66, 544),  # too few to: cut into one wave
        ([500] * 32 + [2000] * 32, 66, 608),  # too uneven
        ([1088] * 128, 66, 1088),
        ([1088] * 127 + [32768], 66, 2464),
    ],
)
def test_how_long_a_chunk_is(keys, wave, want, device):
    context = torch.tensor([k - 1 for k in keys], dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _find[(1,)](
        context,
        torch.arange(len(keys), dtype=torch.int32, device=device),
        out,
        len(keys),
        wave,
        max(wave, 198 - len(keys)),
        COUNT_PAD=128,
    )
    assert int(out) == want
