"""The decode kernel over its grid, on poisoned pages: one chunk and many, balanced by whatever contexts there are."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import decode_attention as decode
from tests.kernels.check import check_decode_attention, decode_world, run_decode


@pytest.mark.parametrize("case", list(decode.grid()), ids=str)
def test_fp32(case, device):
    check_decode_attention(case, torch.float32, device)


@pytest.mark.parametrize("case", list(decode.grid())[::3], ids=str)
def test_fp16(case, device):
    check_decode_attention(case, torch.float16, device)


def test_long_work_is_cut_finer(device, monkeypatch):
    """On the GPU that starts at a length which takes the interpreter long."""
    monkeypatch.setattr(decode, "SHORT_CHUNK", 64)
    check_decode_attention(decode.Case(contexts=(900, 500, 300), programs=2), torch.float32, device)


def test_a_launch_may_be_repeated_with_other_contexts(device):
    """As a CUDA graph does: the same tensors with new contents, and counters that every launch leaves at zero."""
    case = decode.Case(contexts=(700, 3, 260), programs=2)
    world, rows = decode_world(case, torch.float32, device)
    first = run_decode(world, rows, case)[0].clone()
    world.batch.context.copy_(torch.tensor([100, 2, 259]))
    run_decode(world, rows, case)
    world.batch.context.copy_(torch.tensor(case.contexts))
    assert not rows.arrived.any() and torch.equal(run_decode(world, rows, case)[0], first)
