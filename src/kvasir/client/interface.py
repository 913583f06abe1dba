"""What stands between the engine and its front ends: the synchronous core and its asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvasir.types import EngineStats, Event, ModelInfo, Request


class EngineCore(Protocol):
    """One model, one step loop, one thread. Implemented by ``engine.Engine``; tests use a fake without torch."""

    info: ModelInfo

    on_launch: Callable[[Iterable[str], bool], None]
    """Set by whoever runs the core; does nothing by default. The core calls it just before each launch with the ids of the
    requests at work (in the plan, still in flight, or in preparation on another thread), so that a death can be blamed on
    the right ones, and with whether the step may be slow: the first of its kind, which may have kernels to compile."""

    def submit(self, request: Request) -> list[Event]:
        """Queue a request: ``accepted``, or one ``error`` event (queue full: status 429 or 503 with ``retry_after``). Where a
        grammar has to be compiled first, it comes from a later step. A request with ``epoch > 0`` was queued once and is never refused for
        a full queue."""

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        """Stop a request (or one branch) in any state; idempotent. Ends it with ``finish_reason='cancelled'``."""

    def step(self) -> list[Event]:
        """Run one step. Never raises for the fault of one request. Returns at once when nothing is runnable. The events may
        be those of the step before: then there is work until a further call has returned the rest."""

    def has_work(self) -> bool:
        """Whether a step could do something now (blocked requests whose time has not come do not count)."""

    def idle(self) -> bool:
        """Called when there is no work: prepare something for later, for a fraction of a second at most. False: nothing is
        left to prepare."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Health:
    """``live``: the HTTP process answers. ``ready``: requests make progress. ``reason`` says why not."""

    live: bool
    ready: bool
    reason: str = ""


class EngineClient(Protocol):
    """What the HTTP server talks to. Owns the journal: a killed engine process loses no request."""

    info: ModelInfo

    async def start(self) -> None: ...

    async def stop(self, drain: float | None = None) -> None:
        """Stop taking requests, let running ones finish for ``drain`` seconds, journal the rest, end the process."""

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """The request's events. The first is ``accepted``, or RequestError is raised. Closing the iterator cancels the
        request. Ends after one terminal event per branch; raises RequestError on a terminal error."""

    async def cancel(self, request_id: str, branch: int | None = None) -> bool: ...

    async def cancel_many(self, targets: Iterable[tuple[str, int | None]]) -> None: ...

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...
