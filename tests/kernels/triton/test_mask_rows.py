"""The kernel that masks rows, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels.mask_rows import mask_rows_ref, mask_rows_triton

SHAPES = [(1, 1, 32), (64, 2, 32), (301, 10, 64), (301, 12, 1024), (700, 22, 128)]


@pytest.mark.parametrize("width, words, block", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_the_reference(width, words, block, dtype, device):
    """Widths that end within a word, masks of nothing and of everything, rows of a wider tensor, and NaN."""
    draw = torch.Generator().manual_seed(width)
    x = torch.randn(6, width + 16, generator=draw).to(dtype)
    x[2, width // 2] = float("nan")
    mask = torch.randint(-(2**31), 2**31, (4, words), generator=draw).int()
    mask[0], mask[1] = 0, -1
    rows = torch.tensor([4, 0, 2, 5])
    want = mask_rows_ref(x.clone()[:, :width], rows, mask)
    there = x.clone().to(device)
    found = mask_rows_triton(there[:, :width], rows.to(device), mask.to(device), block=block)
    torch.testing.assert_close(found.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(there[:, width:].cpu(), x[:, width:]), "columns behind the row are left alone"
    assert torch.equal(found[[1, 3]].cpu(), x[[1, 3], :width]), "rows without a mask are left alone"
    assert (want[4] == float("-inf")).all() and torch.equal(want[0], x[0, :width])


def test_no_rows(device):
    x = torch.zeros(2, 8, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert not mask_rows_triton(x, none, torch.zeros(0, 1, dtype=torch.int32, device=device)).any()
