"""Slices of the trainer on a GPU that others use: between launches they wait for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvasir.learn.base import Base
from kvasir.learn.learner import ENOUGH, Learner, Recipe, head_to_learn
from kvasir.models.checkpoint import resolve
from tests.learn.handmade import STEPS, trace_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 64


@pytest.fixture
def no_waiting():
    """Operations that wait for the device raise, in what is called here."""

    def called(work):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield called
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_slice_waits_for_nothing(kind, narrow, no_waiting):
    base = Base.read(Path(resolve("nano")), torch.device("cuda"), torch.bfloat16)
    head = head_to_learn(kind, base, "")
    layers = tuple(range(base.num_layers)) if narrow else head.shape.layers
    learner = Learner(head, base, Recipe(every=1000, rows=ROWS), scratch=True, layers=layers)
    learner.slice_rows = ROWS // 2
    for number in range(64):
        learner.add(trace_of(base, layers, STEPS[number % 4 :], seed=number, request=f"r{number}"))
    slices = learner.slices()
    while learner.steps < 2:  # kernels are loaded
        assert next(slices) is not None
    rows = 0
    while learner.steps < 8:
        rows += no_waiting(lambda: next(slices)) or 0
    assert rows >= 6 * ENOUGH * ROWS


def test_waiting_is_noticed(no_waiting):
    """The control: one number that is read."""
    number = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError):
        no_waiting(number.item)
    with pytest.raises(RuntimeError):
        no_waiting(lambda: torch.ones(4).to("cuda"))
