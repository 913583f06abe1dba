"""Runs a plan so that one bad request fails alone: halves on an error, a smaller row budget when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvasir.engine.runner import Runner
from kvasir.logs import log
from kvasir.types import PageCopy, Plan, Span, SpanResult, Status

RECOVERY_STEPS = 32  # steps at half the row budget after memory ran out


class StepRunner:
    """Keeps the row budget and turns exceptions of a step into results of single spans."""

    def __init__(self, runner: Runner, max_rows: int) -> None:
        self.runner = runner
        self.full_rows = max_rows
        self.max_rows = max_rows
        self._recover_in = 0

    def run(self, plan: Plan) -> Iterator[tuple[list[Span], list[SpanResult]]]:
        """Yield (spans, results) for parts of the plan, together covering every span that ran. A span that could not run
        for want of memory is left out: it stays uncommitted and is planned again, smaller."""
        if self._recover_in:
            self._recover_in -= 1
            if not self._recover_in:
                self.max_rows = self.full_rows
        spans = plan.spans
        if lost := self._copy(plan.copies):
            spans = [s for s in plan.spans if not _holds(s, lost)]
            failed = [s for s in plan.spans if _holds(s, lost)]
            yield failed, [SpanResult(error="out_of_memory: a page of this request could not be copied") for _ in failed]
        pending = [Plan(plan.step, spans)] if spans else []
        while pending:
            part = pending.pop()
            part.spans = [s for s in part.spans if s.seq.status is Status.RUNNING]  # a failed branch ends its siblings
            if not part.spans:
                continue
            try:
                results = self.runner.launch(part).read()
            except torch.OutOfMemoryError:
                self._shrink()
                pending += _halves(part)
                if len(part.spans) == 1 and part.spans[0].length == 1:
                    yield part.spans, [SpanResult(error="out_of_memory: one token of this request does not fit the device's memory")]
            except Exception as error:
                if _is_fatal(error):
                    raise
                if len(part.spans) > 1:
                    pending += _halves(part)
                    continue
                log.exception("step %d: request %s failed alone", plan.step, part.spans[0].seq.request.id)
                yield part.spans, [SpanResult(error=f"internal_error: {type(error).__name__} while computing this request")]
            else:
                yield part.spans, results

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
        log.warning("out of memory in a step: at most %d rows a step for the next %d steps", self.max_rows, RECOVERY_STEPS)


def _halves(plan: Plan) -> list[Plan]:
    """Two plans of half the spans, the one to run first last; none for a single span."""
    if len(plan.spans) < 2:
        return []
    middle = len(plan.spans) // 2
    return [Plan(plan.step, plan.spans[middle:]), Plan(plan.step, plan.spans[:middle])]


def _holds(span: Span, copies: list[PageCopy]) -> bool:
    return any(copy.target in span.seq.tables[copy.group] for copy in copies)


def _is_fatal(error: Exception) -> bool:
    """After these the CUDA context is lost: only a new process helps."""
    return isinstance(error, RuntimeError) and ("CUDA error" in str(error) or type(error).__name__ == "AcceleratorError")
