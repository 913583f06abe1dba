"""The store kernel over its grid, and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import store_kv as store
from tests.kernels.check import check_store_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(store.grid()), ids=str)
def test_same_bytes_as_the_reference(case, dtype, device):
    check_store_kv(case, dtype, device)


def test_slots_past_two_to_the_31_elements(device):
    apart, size, dim = 1 << 30, 16, 16
    flat = torch.empty(3 * apart + size * dim, dtype=torch.float16, device=device)
    pages = flat.as_strided((4, 1, size, dim), (apart, size * dim, dim, 1))
    rows = torch.randn(2, 1, dim).to(torch.float16).to(device)
    pages[3].zero_()
    store.store_kv_triton(rows, rows, pages, pages, torch.tensor([3 * size + 5, -1], device=device))
    assert torch.equal(pages[3, 0, 5], rows[0, 0]) and int(pages[3].count_nonzero()) == dim


def test_a_slot_past_the_pool_is_dropped(device):
    pages = torch.zeros(3, 1, 16, 16, device=device)
    row = torch.ones(1, 1, 16, device=device)
    store.store_kv_triton(row, row, pages[:2], pages[:2], torch.tensor([32], device=device))
    assert not pages.any()
