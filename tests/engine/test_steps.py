"""The row budget of ``StepRunner`` after memory ran out: halved for a number of steps, then restored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvasir.engine.steps import RECOVERY_STEPS, StepRunner
from kvasir.types import Plan, Span, SpanResult, Status
from tests.engine.fake import sequence

FULL_ROWS = 64


class Runner:
    """A runner that takes at most ``fits`` rows a step. ``late``: memory runs out when the step is read, not in the
    launch."""

    def __init__(self, late: bool) -> None:
        self.pool = SimpleNamespace(copy=lambda copies: None)
        self.fits = FULL_ROWS
        self.late = late

    def launch(self, plan: Plan, late: bool = False):
        enough = plan.num_rows <= self.fits
        if not enough and not self.late:
            raise torch.OutOfMemoryError("injected")

        def read():
            if not enough:
                raise torch.OutOfMemoryError("injected")
            return [SpanResult(tokens=[1]) for _ in plan.spans]

        return SimpleNamespace(read=read)

    def forget(self) -> None:
        pass


def span(length: int) -> Span:
    seq = sequence(FULL_ROWS)
    seq.status, seq.seat = Status.RUNNING, 0
    return Span(seq, 0, length, seat=0)


def one_step(steps: StepRunner, *lengths: int) -> list[SpanResult | None]:
    steps.launch(Plan(0, [span(length) for length in lengths]))
    return [result for _, results in steps.resolve() for result in results]


@pytest.mark.parametrize("late", [False, True])
def test_the_row_budget_is_halved_for_some_steps_and_then_restored(late):
    """Mutations: the budget is not halved; it is never restored; it is restored a step early or late."""
    steps = StepRunner(Runner(late), FULL_ROWS)
    steps.runner.fits = 40
    assert one_step(steps, 64) == [None], "the span is planned again, with fewer rows"
    budgets = []
    for _ in range(RECOVERY_STEPS):
        budgets.append(steps.max_rows)  # the budget that a plan is made with
        assert one_step(steps, steps.max_rows) != [None]
    assert budgets == [32] * RECOVERY_STEPS
    assert steps.max_rows == FULL_ROWS
    for _ in range(2 * RECOVERY_STEPS):
        one_step(steps, 1)
        assert steps.max_rows == FULL_ROWS


@pytest.mark.parametrize("late", [False, True])
def test_running_out_of_memory_again_halves_again_and_starts_the_count_again(late):
    """Mutations: a second lack of memory leaves the budget at the first half; it does not start the count again."""
    steps = StepRunner(Runner(late), FULL_ROWS)
    steps.runner.fits = 20
    assert one_step(steps, 64) == [None]
    for _ in range(RECOVERY_STEPS - 2):
        one_step(steps, 1)
    assert steps.max_rows == 32, "the count is not over"
    assert one_step(steps, 21) == [None]
    for _ in range(RECOVERY_STEPS - 1):
        assert steps.max_rows == 16
        one_step(steps, 1)
    one_step(steps, 1)
    assert steps.max_rows == FULL_ROWS


def test_each_part_that_runs_out_of_memory_halves_the_budget_but_never_below_one_row():
    """Mutations: a budget of 0, with which nothing would ever be planned again; the parts of a step do not count."""
    steps = StepRunner(Runner(late=False), 4)
    steps.runner.fits = 0
    results = one_step(steps, 1, 1, 1, 1)
    assert [result.error.split(":")[0] for result in results] == ["out_of_memory"] * 4
    assert steps.max_rows == 1


def test_other_errors_leave_the_budget_alone():
    """Mutation: the budget is halved after every error."""
    steps = StepRunner(Runner(late=False), FULL_ROWS)

    def launch(plan, late=False):
        raise ValueError("injected")

    steps.runner.launch = launch
    assert one_step(steps, 5)[0].error.startswith("internal_error")
    assert steps.max_rows == FULL_ROWS
