"""Launches plans and reads them back so that one bad request fails alone: halves on an error, a smaller row budget when
memory runs out.

A plan may be launched while the one before it is in flight. Whatever goes wrong is looked into when its turn to be
resolved comes: then nothing older is in flight, every token its rows need is known to the host, and its parts run one
after the other, each read before the next is launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.engine.pace import Lap, StepClock
from kvasir.engine.runner import Runner
from kvasir.logs import log
from kvasir.types import Handle, PageCopy, Plan, Span, SpanResult

RECOVERY_STEPS = 32  # number of steps at half the row budget after memory ran out
Outcome = tuple[list[Span], list[SpanResult | None]]


@dataclass(slots=True)
class _Flight:
    """A launched plan. ``handle`` is None where it must run again; ``error`` says why (None: the step before
    failed)."""

    plan: Plan
    handle: Handle | None
    error: Exception | None
    lost: list[PageCopy]
    lap: Lap | None = None


class StepRunner:
    """Keep the row budget and turn exceptions of a step into results of single spans."""

    def __init__(self, runner: Runner, max_rows: int, clock: StepClock | None = None) -> None:
        self.runner = runner
        self.clock = clock
        self.full_rows = max_rows
        self.max_rows = max_rows
        self._recover_in = 0
        self._flying: deque[_Flight] = deque()

    @property
    def stalled(self) -> bool:
        """Whether the oldest plan in flight does not run: nothing should be launched before it is resolved."""
        return bool(self._flying) and self._flying[0].handle is None

    def launch(self, plan: Plan, timed: bool = False) -> None:
        """Copy pages and launch. Raises only when the device is lost. ``timed``: the step-time model learns from it."""
        if self._recover_in:
            self._recover_in -= 1
            if not self._recover_in:
                self.max_rows = self.full_rows
        lost = self._copy(plan.copies) if plan.copies else []
        handle = error = lap = None
        if not lost:
            try:
                lap = self.clock.start(plan.spans) if timed and self.clock is not None else None
                handle = self.runner.launch(plan)
                if lap is not None:
                    self.clock.stop(lap)
            except Exception as e:
                if _is_fatal(e):
                    raise
                error = e
        self._flying.append(_Flight(plan, handle, error, lost, lap))

    def resolve(self) -> Iterator[Outcome]:
        """Wait for the oldest plan in flight and yield (spans, results) for parts of it, together covering every span
        that is still valid. A span that lacked memory has None for a result: it is planned again, smaller."""
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
        for later in self._flying:  # it read tokens that were never drawn
            later.handle = None
        self.runner.forget()
        yield from self._again(flight, error)

    def _again(self, flight: _Flight, error: Exception | None) -> Iterator[Outcome]:
        plan, spans = flight.plan, flight.plan.spans
        if flight.lost:
            failed = [s for s in spans if _holds(s, flight.lost)]
            spans = [s for s in spans if not _holds(s, flight.lost)]
            yield (
                failed,
                [SpanResult(error="out_of_memory: a page of this request could not be copied") for _ in failed],
            )
        pending = [Plan(plan.step, spans)]
        if error is not None:
            yield from self._failed(pending.pop(), error, pending)
        while pending:
            part = pending.pop()
            spans = [s for s in part.spans if s.valid]  # a failed branch ends its siblings
            part.spans = [s for s in spans if s.start == s.seq.num_computed]
            if len(part.spans) < len(spans):  # the step before left the rows out that these follow
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
        """Put the halves of a failed part on the stack; of a single span, yield how it ended."""
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
            yield (
                part.spans,
                [SpanResult(error="out_of_memory: one token of this request does not fit the device's memory")],
            )
        else:
            yield part.spans, [None]

    def _copy(self, copies: list[PageCopy]) -> list[PageCopy]:
        """Run the plan's page copies: once, and before any part of it, since committing a part may free their sources.
        Returns those for which there is no memory."""
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
    """Two plans of half the spans, the one to run first last."""
    middle = len(plan.spans) // 2
    return [Plan(plan.step, plan.spans[middle:]), Plan(plan.step, plan.spans[:middle])]


def _holds(span: Span, copies: list[PageCopy]) -> bool:
    return any(copy.target in table for copy in copies for table in span.seq.tables[copy.group : copy.group + 1])


def _is_fatal(error: Exception) -> bool:
    """After these the CUDA context is lost: only a new process helps."""
    return isinstance(error, RuntimeError) and (
        "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    )
