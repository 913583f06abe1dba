"""The kernels over low-rank keys and values on their grid, and a cache of another layer, which must fail."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvasir.kernels import lowrank_decode
from kvasir.kernels.lowrank_decode import Case
from tests.kernels.check_lowrank import check_gather, check_rows

CASES = list(enumerate(lowrank_decode.grid()))
# Llama 8B's heads, at 512 and 1,024 values a token and layer.
LLAMA = dict(heads=32, kv_heads=8, dim=128, turned=128, page_slots=64)


@pytest.mark.parametrize("place, case", CASES, ids=str)
def test_rows(place, case, device):
    for dtype in (torch.float32, torch.float16):
        if device == "cuda" or dtype == (torch.float32, torch.float16)[place % 3 == 2]:
            check_rows(case, dtype, device)


@pytest.mark.parametrize("case", [case for _, case in CASES if case.window is None][1::3], ids=str)
def test_gather(case, device):
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        check_gather(case, dtype, device)


def test_keys_of_another_position_fail(device):
    """The control: keys that are not turned at their positions."""
    case = Case(spans=((40, 1),))
    first = lowrank_decode.Latents.turned
    half = mock.patch.object(lowrank_decode.Latents, "turned", property(lambda self: first.fget(self) // 2))
    with half, pytest.raises(AssertionError):
        check_rows(case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [(512, 512), (256, 256), (320, 192)])
@pytest.mark.parametrize("spans", [((4000, 1), (70, 1), (333, 1)), ((2000, 16), (130, 3))])
def test_llama(ranks, spans, device):
    for dtype in (torch.bfloat16, torch.float16):
        check_rows(Case(spans=spans, ranks=ranks, **LLAMA), dtype, device, min_keys=256)
    check_gather(Case(spans=spans, ranks=ranks, **LLAMA), torch.bfloat16, device)
