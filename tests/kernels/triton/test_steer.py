"""The kernels of hooks in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvasir.kernels import steer
from tests.kernels.check_steer import BIT, check_gates, check_row_bits, check_steer, draw, draw_steers


@pytest.mark.parametrize("case", steer.grid(), ids=lambda case: f"{case.modes}{case.width}")
def test_against_the_reference(case, device):
    check_steer(case, torch.float32, device)
    check_row_bits(case, torch.float32, device)


def test_in_half_precision(device):
    check_steer(steer.grid()[1], torch.float16, device)


def test_gates(device):
    check_gates(device)


def test_another_sets_parameters_would_fail(monkeypatch, device):
    """The mutation that the checks must catch: two sets exchanged."""
    own = steer.steer

    def wrong(x, words, steers, out=None):
        order = [0, 2, 1, 3]
        own(x, words, dataclasses.replace(steers, vectors_SCHD=steers.vectors_SCHD[order]), out)

    monkeypatch.setattr(steer, "steer", wrong)
    with pytest.raises(AssertionError, match="Case"):
        check_steer(steer.grid()[0], torch.float32, device)


@pytest.mark.parametrize("kernel", [steer.steer, steer.steer_reference])
def test_a_turn_keeps_the_length_and_leaves_no_component(kernel, device):
    case = steer.Case((1, 1, 2), (steer.DOT | steer.NORM, steer.DOT), 2, 96)
    steers, (x, _, words) = draw_steers(case, device), draw(case, torch.float32, device)
    steers.heads_SH.fill_(1)
    steers.numbers_S2[:, 0] = -1.0
    words |= BIT
    y = x.clone()
    kernel(y, words, steers)
    along = (y * steers.vectors_SCHD[(words >> steer.SLOT_SHIFT).long(), 0]).sum(-1)
    assert along.abs().max() < 1e-5
    assert ((y[:2].norm(dim=-1) / x[:2].norm(dim=-1)) - 1).abs().max() < 1e-6
    assert (y[2].norm(dim=-1) < x[2].norm(dim=-1)).all(), "projected, and not turned"


@pytest.mark.parametrize("kernel", [steer.steer, steer.steer_reference])
def test_a_shift_raises_the_worst_margin_to_the_target_and_no_other_row(kernel, device):
    case = steer.Case((1, 1, 1, 1), (steer.SHIFT,), 1, 64, 3)
    steers, (x, _, words) = draw_steers(case, device), draw(case, torch.float32, device)
    steers.numbers_S2[1] = torch.tensor([1.0, 0.5])
    steers.words_S3[1, 2], words = 3, words | BIT

    def margins(states: torch.Tensor) -> torch.Tensor:
        return (steers.vectors_SCHD[1, :, 0] @ states[:, 0].T + steers.biases_SCH[1]).T

    x[3] = steers.vectors_SCHD[1, :, 0].sum(0) * 4  # far above
    before, y = margins(x), x.clone()
    kernel(y, words, steers)
    after = margins(y)
    worst = before.argmin(1)
    low = before.min(1).values < 0.5
    assert low[:3].any() and not low[3] and torch.equal(y[~low], x[~low])
    for row in low.nonzero()[:, 0].tolist():
        assert abs(after[row, worst[row]] - 0.5) < 1e-5
