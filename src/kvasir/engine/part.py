"""The parts of the step loop: whatever takes part in steps beside planning, launching and reading them.

The engine holds a list of parts and calls each of them at the places below, in the order of the list. A part defines
the places that it needs. The calls are bound once, at the start, so that a place that no part defines costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any, Protocol

from kvasir.errors import Failure
from kvasir.types import EngineStats, FinishReason, Plan, Request, Sequence, Span, SpanResult


class LiveRequests(Protocol):
    """The requests of an engine, as parts see them."""

    def all(self) -> Iterable[Request]:
        """The requests that have not ended."""

    def branches(self, request_id: str) -> Many[Sequence]:
        """The branches of a request that have not ended."""

    def accept(self, request_id: str) -> None:
        """Tell the client that its request was accepted, unless it knows."""

    def fail(self, request_id: str, failure: Failure) -> None:
        """End a whole request with one error."""

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End one branch."""

    def close_seat(self, seq: Sequence) -> None:
        """Forget what the device keeps of a sequence that will start again."""


class Part:
    """One part of the step loop."""

    def before_plan(self, requests: LiveRequests) -> None:
        """Do what has come up since the step before. Steps may be in flight."""

    def queued(self, seq: Sequence) -> None:
        """Take note of a new branch, before anything is planned for it."""

    def rest(self) -> bool:
        """Nothing can run: finish what was begun, so that something can; False: nothing was begun."""
        return False

    def pending(self) -> Iterable[Future]:
        """Work of other threads for which an engine that has nothing to run waits a moment."""
        return ()

    def at_work(self) -> Iterable[str]:
        """Ids of requests that may end the process although no step holds them."""
        return ()

    def launched(self, plan: Plan) -> None:
        """Take note of a plan that was launched."""

    def committing(self, span: Span, result: SpanResult, tokens: list[int]) -> None:
        """Prepare the commit of a span that verified a draft or a chain, which its sequence still has. ``tokens`` are
        those that are kept."""

    def committed(self, span: Span, result: SpanResult, ends: bool) -> None:
        """Take note of a committed span. ``ends``: its sequence is about to end."""

    def completed(self, plan: Plan, requests: LiveRequests) -> None:
        """Take note of a plan whose spans were all committed. The pages that it gave up are not free yet."""

    def measured(self, plan: Plan, stats: EngineStats, now: float) -> None:
        """Take note of a completed plan that was read at ``now``, in seconds. ``stats`` has its time and all tokens."""

    def replayed(self, seq: Sequence) -> None:
        """Take note of a branch that had ended before the engine was restarted."""

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        """Forget a branch that ends, in any state."""

    def forgotten(self, request_id: str) -> None:
        """Forget a request whose branches have all ended."""

    def idle(self) -> bool | None:
        """Do what has come up while there are no requests. True: there will be more in a moment."""

    def weights_changed(self, model: str | None) -> None:
        """Take note of other weights, those of the checkpoint ``model`` if that is known. No request is running."""

    def fill_stats(self, stats: EngineStats) -> None:
        """Put the part's counters into ``stats``."""

    def close(self) -> None:
        """End threads and processes."""


def bound(parts: Iterable[Part], place: str) -> tuple[Callable[..., Any], ...]:
    """The calls of the parts that define ``place``, in their order."""
    return tuple(getattr(part, place) for part in parts if getattr(type(part), place) is not getattr(Part, place))
