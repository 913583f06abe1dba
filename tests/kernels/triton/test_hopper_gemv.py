"""Products of few rows with copies placed by hand, over their grid and behind each other. No interpreter runs them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from kvasir.kernels import _triton, hopper_gemv
from kvasir.kernels.hopper_gemv import stream_rows
from kvasir.kernels.norm import rms_norm
from tests.kernels.check_fused import Draw, check_hopper_gemv, hold

pytestmark = pytest.mark.skipif(
    _triton.INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Hopper",
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(hopper_gemv.grid()), ids=str)
def test_against_the_reference(case, dtype, device):
    check_hopper_gemv(case, dtype, device)


def test_behind_each_other(device):
    """Each starts while the one before it runs, and reads what that one writes: a hundred in one graph, as often as it
    is replayed."""
    draw = Draw(0, torch.bfloat16, device)
    up, down, ones = (
        draw(6144, 1024, scale=1024**-0.5),
        draw(1024, 3072, scale=3072**-0.5),
        torch.ones(1024, dtype=torch.bfloat16, device=device),
    )
    rings = hopper_gemv.MEASURED[6144, 1024, True], hopper_gemv.MEASURED[1024, 3072, False]

    def chain(h: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            h = stream_rows(
                stream_rows(rms_norm(h, ones, 1e-6), up, rings[0], gated=True), down, rings[1], residual_TO=h
            )
        return h

    def in_torch(h: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            normed = (h.double() * (h.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(h.dtype)
            gate, value = (normed @ up.to(h.dtype).t()).chunk(2, -1)
            h = h + (F.silu(gate) * value) @ down.to(h.dtype).t()
        return h

    begin = draw(40, 1024)
    h, want = begin.clone(), chain(begin.clone())
    hold("chain", want, in_torch(begin), in_torch(begin.double()))
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return  # beneath tools/gpu_sanitize.py: without the caching allocator no graph can be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(h)
    for _ in range(5):
        h.copy_(begin)
        graph.replay()
        assert torch.equal(out, want), "the order of sums is fixed"
