"""The protocols between the engine and its front ends: the synchronous core and its asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvasir.types import AdapterInfo, EngineStats, Event, Load, ModelInfo, Plan, Request


class AdapterDesk(Protocol):
    """The adapters of a core."""

    busy: bool
    """Whether one is being read, so that ``loaded`` will have news."""

    def load(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter now. Raises ConfigError (it is not served) or RequestError (the name is in use)."""

    def start_loading(self, name: str, path: str) -> None:
        """Do the same while steps run. Raises RequestError."""

    def loaded(self) -> list[tuple[str, AdapterInfo | Exception]]:
        """The ends of ``start_loading`` since the last call, by name."""

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises RequestError: 404 for an unknown name, 409 while a request names it."""


class StoredPage(Protocol):
    """A full page of tokens in the prefix index. ``key``: see ``page_keys``. ``variant``: of its keys and values.
    ``parent``: the page before, or the root of the tenant, whose own ``parent`` is None."""

    key: bytes
    tokens: list
    variant: str

    @property
    def parent(self) -> StoredPage | None: ...


class PageChanges(Protocol):
    """Pages that a prefix index has stored, and keys that it has evicted. ``cleared``: nothing that was told before
    holds any more."""

    stored: list[StoredPage]
    evicted: list[bytes]
    cleared: bool


class PageLog(Protocol):
    """The changes of a core's prefix index."""

    def take(self) -> PageChanges:
        """The changes since the last call; false when there are none."""

    def held(self) -> list[StoredPage]:
        """All pages that are stored now."""


class EngineCore(Protocol):
    """One model, one step loop, one thread. Implemented by ``engine.Engine``; tests use a fake without torch."""

    info: ModelInfo
    adapters: AdapterDesk | None
    """None: adapters are not served."""

    on_launch: Callable[[Iterable[str], bool, Plan], None]
    """Callback of whoever runs the core; does nothing by default. The core calls it just before each launch with three
    arguments. The first are the ids of the requests at work (in the plan, still in flight, or in preparation on another
    thread), so that a death can be blamed on the right ones. The second is whether the step may be slow: the first step
    of its kind may have kernels to compile. The third is the plan of the step, for the flight record."""

    def submit(self, request: Request) -> list[Event]:
        """Queue a request. Returns ``accepted`` or one ``error`` event (queue full: status 429 or 503 with
        ``retry_after``).

        When a grammar has to be compiled first, that event comes from a later step. A request with ``epoch > 0`` was
        queued once before and is never refused for a full queue.
        """

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        """End a request (or one branch) in any state with ``finish_reason='cancelled'``; idempotent."""

    def step(self) -> list[Event]:
        """Run one step and return events. Returns at once when nothing can run.

        A fault of one request never raises. The events may be those of the step before; ``has_work`` then stays true
        until a further call has returned the rest.
        """

    def has_work(self) -> bool:
        """Whether a step could do something now. Blocked requests do not count before their time has come."""

    def idle(self) -> bool:
        """Prepare something for later, for a fraction of a second at most; called when there is no work. Returns False
        when nothing is left to prepare."""

    def stats(self) -> EngineStats: ...

    def load(self) -> Load:
        """The work at hand, for a router."""

    def join(self, prefix_key: bytes) -> PageLog | None:
        """Become one of several engines, before the first request: put the digest of the weights, which it reads for
        it, into ``info``, key the prefix index with ``prefix_key``, and return the log of its pages (None: there is no
        prefix caching)."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Health:
    """State of the engine. ``live``: the HTTP process answers. ``ready``: requests progress. ``reason``: why not."""

    live: bool
    ready: bool
    reason: str = ""


class EngineClient(Protocol):
    """The engine as the HTTP server sees it. It owns the journal, so a killed engine process loses no request."""

    info: ModelInfo

    async def start(self) -> None: ...

    async def stop(self, drain: float | None = None) -> None:
        """Refuse new requests, let running ones finish for ``drain`` seconds, journal the rest, end the process."""

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """Yield the request's events. The first is ``accepted``; a refusal raises RequestError instead.

        The iterator ends after one terminal event per branch and raises RequestError on a terminal error. Closing it
        cancels the request.
        """

    async def cancel(self, request_id: str, branch: int | None = None) -> bool: ...

    async def cancel_many(self, targets: Iterable[tuple[str, int | None]]) -> None: ...

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Serve an adapter as ``name``, also after a restart of the engine. Raises RequestError."""

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests of an adapter, wait for those in progress, and forget it. Raises RequestError."""

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...
