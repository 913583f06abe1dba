"""Launch plans and read them back so that one bad request fails alone.

After an error a plan runs again in halves, and when memory runs out the row budget shrinks. A plan may be launched
while the one before it is in flight. An error is handled when the plan's turn to be resolved comes. By then nothing
older is in flight and the host knows every token that the rows need. The parts run one after the other, each read
before the next is launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.engine.ways.runner import Runner
from kvasir.engine.ways.step_clock import Lap, StepClock
from kvasir.logs import log
from kvasir.types import Handle, PageCopy, Plan, Sequence, Span, SpanResult

RECOVERY_STEPS = 32  # number of steps with a halved row budget after memory ran out
Outcome = tuple[list[Span], list[SpanResult | None]]


@dataclass(slots=True)
class _Flight:
    """A launched plan.

    ``handle``: None if the plan must run again. ``error`` says why; None: the step before it failed.
    ``lost``: page copies for which there was no memory. ``lap``: set if the step is timed.
    """

    plan: Plan
    handle: Handle | None
    error: Exception | None
    lost: list[PageCopy]
    lap: Lap | None = None


class StepRunner:
    """Keeps the row budget and turns exceptions of a step into results of single spans.

    ``max_rows``: the row budget now. ``full_rows``: the row budget while memory suffices.
    """

    def __init__(self, runner: Runner, max_rows: int, clock: StepClock | None = None) -> None:
        self.runner = runner
        self.clock = clock
        self.full_rows = max_rows
        self.max_rows = max_rows
        self._recover_in = 0
        self._careful = 0
        self._flying: deque[_Flight] = deque()

    @property
    def stalled(self) -> bool:
        """Whether the oldest plan in flight does not run, so that nothing should be launched before it is resolved."""
        return bool(self._flying) and self._flying[0].handle is None

    @property
    def careful(self) -> bool:
        """Whether nothing should be launched behind a step, because what was has cost sequences their states."""
        return self._careful > 0

    def launch(self, plan: Plan, timed: bool = False, late: bool = False) -> None:
        """Copy pages and launch. It raises only if the device is lost. ``timed``: let the model of step times learn
        from the step. ``late``: leave a draw that the host has to prepare to ``draw``."""
        if self._recover_in:
            self._recover_in -= 1
            if not self._recover_in:
                self.max_rows = self.full_rows
        self._careful = max(0, self._careful - 1)
        lost = plan.lost = self._copy(plan.copies) if plan.copies else []
        handle = error = lap = None
        if not lost:
            try:
                lap = self.clock.start(plan.spans) if timed and self.clock is not None else None
                handle = self.runner.launch(plan, late)
                if lap is not None and not late:
                    self.clock.stop(lap)
            except Exception as e:
                if _is_fatal(e):
                    raise
                error = e
        self._flying.append(_Flight(plan, handle, error, lost, lap))

    def draw(self) -> None:
        """Launch the draw that the last launch left, once the plan before it was resolved."""
        if not self._flying or self._flying[-1].handle is None:
            return
        flight = self._flying[-1]
        try:
            self.runner.draw()
            if flight.lap is not None:
                self.clock.stop(flight.lap)
        except Exception as e:
            if _is_fatal(e):
                raise
            flight.handle, flight.error = None, e

    def resolve(self) -> Iterator[Outcome]:
        """Wait for the oldest plan in flight and yield (spans, results) for its parts.

        The parts cover every span that is still valid. A span that could not run for lack of memory has the result
        None; it is planned again with fewer rows.
        """
        flight = self._flying.popleft()
        plan, error = flight.plan, flight.error
        if flight.handle is not None:
            try:
                results = flight.handle.read()
            except Exception as e:
                if _is_fatal(e):
                    raise
                error = e
            else:
                if flight.lap is not None:
                    self.clock.learn(flight.lap, plan.spans)
                yield plan.spans, results
                return
        behind = {s.seq for later in self._flying if later.handle is not None for s in later.plan.spans}
        for later in self._flying:  # its rows read tokens that were never drawn
            later.handle = None
        self.runner.forget()
        yield from self._again(flight, error, behind)

    def _again(self, flight: _Flight, error: Exception | None, behind: set[Sequence]) -> Iterator[Outcome]:
        """Run a plan again. ``behind``: sequences whose later rows were launched, too. Their states hold its rows, so
        that only their start can be run again."""
        plan, spans = flight.plan, flight.plan.spans
        if stale := [s for s in spans if s.states[1] and s.seq in behind and s.states[0] == s.states[1]]:
            self._careful = RECOVERY_STEPS
            for span in stale:
                span.stale = True
            yield stale, [None] * len(stale)
            spans = [s for s in spans if not s.stale]
        if flight.lost:
            failed = [s for s in spans if _reads(s, flight.lost)]
            spans = [s for s in spans if not _reads(s, flight.lost)]
            error_text = "out_of_memory: a page of this request could not be copied"
            yield failed, [SpanResult(error=error_text) for _ in failed]
        pending = [Plan(plan.step, spans)]
        if error is not None and not stale:
            yield from self._failed(pending.pop(), error, pending)
        while pending:
            part = pending.pop()
            spans = [s for s in part.spans if s.valid]  # a failed branch ends its siblings
            part.spans = [s for s in spans if s.start == s.seq.num_computed]
            if len(part.spans) < len(spans):  # the step before left out the rows that these follow
                missed = [s for s in spans if s.start != s.seq.num_computed]
                yield missed, [None] * len(missed)
            if not part.spans:
                continue
            try:
                results = self.runner.launch(part).read()
            except Exception as e:
                yield from self._failed(part, e, pending)
            else:
                yield part.spans, results

    def _failed(self, part: Plan, error: Exception, pending: list[Plan]) -> Iterator[Outcome]:
        """Put the halves of a failed part on the stack. If the part is a single span, yield its result."""
        if _is_fatal(error):
            raise error
        if out_of_memory := isinstance(error, torch.OutOfMemoryError):
            self._shrink()
        self.runner.forget()
        if len(part.spans) > 1:
            pending += _halves(part)
        elif not out_of_memory:
            log.error("step %d: request %s failed alone", part.step, part.spans[0].seq.request.id, exc_info=error)
            yield part.spans, [SpanResult(error=f"internal_error: {type(error).__name__} while computing this request")]
        elif part.spans[0].length == 1:
            error_text = "out_of_memory: one token of this request does not fit the device's memory"
            yield part.spans, [SpanResult(error=error_text)]
        else:
            yield part.spans, [None]

    def _copy(self, copies: list[PageCopy]) -> list[PageCopy]:
        """Run the plan's page copies and return those for which there is no memory.

        They run once, before any part of the plan, because committing a part may free their sources.
        """
        try:
            self.runner.pool.copy(copies)
            return []
        except torch.OutOfMemoryError:
            self._shrink()
        if len(copies) == 1:
            return copies
        return [lost for copy in copies for lost in self._copy([copy])]

    def _shrink(self) -> None:
        torch.cuda.empty_cache()
        self.max_rows = max(1, self.max_rows // 2)
        self._recover_in = RECOVERY_STEPS
        log.warning(
            "out of memory in a step: at most %d rows a step for the next %d steps", self.max_rows, RECOVERY_STEPS
        )


def _halves(plan: Plan) -> list[Plan]:
    """Two plans of half the spans each; the last one is to run first."""
    middle = len(plan.spans) // 2
    return [Plan(plan.step, plan.spans[middle:]), Plan(plan.step, plan.spans[:middle])]


def _reads(span: Span, copies: list[PageCopy]) -> bool:
    """Whether one of the copied pages is in the tables of the span's sequence."""
    return any(copy.target in table for copy in copies for table in span.seq.tables[copy.group : copy.group + 1])


def _is_fatal(error: Exception) -> bool:
    """Whether the CUDA context is lost, so that only a new process helps."""
    return isinstance(error, RuntimeError) and (
        "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    )
