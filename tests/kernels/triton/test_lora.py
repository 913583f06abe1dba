"""The kernels of adapters in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import lora
from tests.kernels.check_lora import check_lora, check_row_bits, draw, draw_pairs


@pytest.mark.parametrize("case", list(lora.grid()), ids=lambda case: f"{len(case.slots)}x{case.width}r{case.rank}")
def test_against_the_reference(case, device):
    check_lora(case, torch.float32, device)


@pytest.mark.parametrize("case", list(lora.grid())[3:7:3])
def test_in_half_precision(case, device):
    check_lora(case, torch.float16, device)


def test_a_row_alone_has_the_same_bits(device):
    check_row_bits(lora.Case((2, 0, 1, 1, 2), 2100, (48, 16)), torch.float32, device)


def test_two_rows_slots_exchanged_would_fail(monkeypatch, device):
    """The mutation that the checks must catch."""
    case, rows = lora.Case((2, 0, 1, 1, 2), 320, (48, 16, 16)), lora.lora_rows
    monkeypatch.setattr(lora, "lora_rows", lambda x, y, pairs, slots: rows(x, y, pairs, slots[[2, 1, 0, 3, 4]]))
    with pytest.raises(AssertionError, match="rows"):
        check_lora(case, torch.float32, device)


def test_rows_are_sorted_by_slot(device):
    by_slot = lora.sort_rows(torch.tensor([2, 0, 1, 3, 1, 0], dtype=torch.int32, device=device), 4)
    assert by_slot.order_T.tolist() == [1, 5, 2, 4, 0, 3] and by_slot.starts_S.tolist() == [2, 4, 5, 6, 6]


def test_a_poisoned_slot_shows(device):
    case = lora.Case((1, 2), 64, (32,))
    pairs, (x, y, slots) = draw_pairs(case, torch.float32, device), draw(case, torch.float32, device)
    pairs.b_SNR[1] = torch.nan
    got = lora.lora_rows(x, y.clone(), pairs, slots)
    assert got[0].isfinite().all() and got[1].isnan().all()
