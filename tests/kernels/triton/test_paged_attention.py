"""The paged attention kernel over its grid, on poisoned pages, and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import decode_attention as decode
from kvasir.kernels import paged_attention as paged
from tests.kernels.check import check_paged_attention, check_together


@pytest.mark.parametrize("case", list(paged.grid()), ids=str)
def test_fp32(case, device):
    check_paged_attention(case, torch.float32, device)


@pytest.mark.parametrize("case", [c for c in paged.grid() if c.splits < 3][::3], ids=str)
def test_fp16(case, device):
    check_paged_attention(case, torch.float16, device)


@pytest.mark.parametrize("place, case", list(enumerate(paged.together_grid())), ids=str)
def test_rows_known_on_the_device_alone(place, case, device):
    for dtype in (torch.float32, torch.float16):
        if (
            device == "cuda" or dtype == (torch.float32, torch.float16)[place % 3 == 1]
        ):  # in the interpreter one precision a case
            check_together(case, dtype, device)


def test_addresses_past_two_to_the_31_elements(device):
    """Pages 2^30 elements apart (the memory between them is never touched): 32-bit offsets would land elsewhere.
    The first two pages are read by the loop without a mask, the last one with."""
    apart, pages, groups, size, dim = 1 << 30, 4, 2, 64, 16
    flat = torch.empty((pages - 1) * apart + groups * size * dim, dtype=torch.float16, device=device)
    k = flat.as_strided((pages, groups, size, dim), (apart, size * dim, dim, 1))
    dense = torch.randn(pages, groups, size, dim).to(torch.float16).to(device)
    k.copy_(dense)
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32, device=device)
    q = torch.randn(1, 2, dim).to(torch.float16).to(device)
    context, row_start = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([150], [0, 1]))
    out = torch.empty_like(q)
    paged.paged_attention_triton(
        q, k, k, table, context, row_start, paged.plan_tiles([150], [1], 2, 2, torch.float16, device), 0.25, out
    )
    want, _ = paged.paged_attention_ref(q, dense, dense, table, [150], [1], 0.25)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    rows = decode.Rows(row_start[:1], torch.zeros(1, groups, dtype=torch.int32, device=device))
    decode.decode_attention_triton(q, k, k, table, context, row_start, rows, 0.25, out.zero_())
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
