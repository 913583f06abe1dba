"""The work of a background response: it goes on without its client, who reads its events from any place or asks for
its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from kvasir.api.http.errors import error_object
from kvasir.api.http.generation import Generation
from kvasir.api.http.streaming import sse
from kvasir.errors import RequestError
from kvasir.logs import log

# Most events of a response that are kept for readers; the oldest are dropped.
MAX_EVENTS = 1 << 16
# Seconds that a run gets to end once the engine has stopped.
SETTLE_SECONDS = 5.0


class Job(Protocol):
    """The response that a run generates. ``object``: the response as clients see it."""

    id: str
    stream: bool
    object: dict[str, Any]

    @property
    def going(self) -> bool:
        """Whether the response has not ended yet."""

    def generate(self, release: Callable[[], None]) -> Generation:
        """Make the work in the engine, not yet opened."""

    def told(self, generation: Generation) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield the events as pairs of name and fields. Raises RequestError when the server stops."""

    def fail(self, error: RequestError) -> tuple[str, dict[str, Any]]:
        """End the response with an error; returns the event."""

    def cancel(self) -> tuple[str, dict[str, Any]]:
        """End the response as cancelled; returns the event."""


class BackgroundRun:
    """The ``service.Work`` of a background response. ``num_bytes``: memory of its events.

    ``accepted``: awaited once the engine has accepted the request; its RequestError refuses the response. ``ended``:
    awaited at the end, but not when the server stops first: the next server may then go on from its journal.
    """

    def __init__(
        self,
        job: Job,
        release: Callable[[], None],
        accepted: Callable[[BackgroundRun], Awaitable[None]],
        ended: Callable[[BackgroundRun], Awaitable[None]],
    ) -> None:
        self.job = job
        self.num_bytes = 0
        self.suspended = False  # the server stopped before the end
        self._over = False
        self._release, self._accepted, self._ended = release, accepted, ended
        self._generation = job.generate(release)
        self._task: asyncio.Task | None = None
        self._ending: asyncio.Future | None = None
        self._cancelled = False
        self._events: list[bytes] = []
        self._first = 0  # sequence number of the first event that is kept
        self._news = asyncio.Event()

    @property
    def going(self) -> bool:
        return not self._over

    async def open(self) -> None:
        """Wait until the engine has accepted the request, then go on in a task. Raises RequestError."""
        await self._generation.open()
        await self._accepted(self)
        self._task = asyncio.create_task(self._run(), name=f"response {self.job.id}")

    async def close(self, reason: str = "disconnected") -> None:
        """Give up what was not accepted yet: nobody knows its id. Accepted work goes on without its client."""
        if self._task is None:
            await self._generation.close(reason)

    def resume(self) -> None:
        """Start work that an earlier server had accepted: a full queue makes it wait, not fail."""
        self._task = asyncio.create_task(self._reopen(), name=f"response {self.job.id}")

    async def _reopen(self) -> None:
        while True:
            try:
                await self._generation.open()
                break
            except RequestError as e:
                if e.status not in (429, 503) or e.code == "shutting_down":
                    self.suspended = e.code == "shutting_down"
                    return await self._finish(None if self.suspended else self.job.fail(e))
                await asyncio.sleep(e.retry_after or 1.0)
                self._generation = self.job.generate(self._release)
        await self._run()

    async def _run(self) -> None:
        generation = self._generation
        try:
            async for name, fields in self.job.told(generation):
                self._add(name, fields)
        except asyncio.CancelledError:
            if not self._cancelled:  # the event loop ends
                raise
        except RequestError:  # the server stops
            self.suspended = True
        except Exception:
            log.exception("response %s failed", self.job.id)
            self._add(*self.job.fail(RequestError("internal error", status=500, code="internal_error")))
        finally:
            await generation.close("cancelled" if self._cancelled else "disconnected")
        await self._finish(self.job.cancel() if self._cancelled and self.job.going else None)

    async def _finish(self, event: tuple[str, dict[str, Any]] | None) -> None:
        """End the run, once, whoever asks for it and whatever cancels the asker."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(event))
        await asyncio.shield(self._ending)

    async def _end(self, event: tuple[str, dict[str, Any]] | None) -> None:
        if event is not None:
            self._add(*event)
        if not self.suspended:
            await self._ended(self)
        self._over = True
        self._wake()

    def _add(self, name: str, fields: dict[str, Any]) -> None:
        if self.job.stream:
            number = self._first + len(self._events)
            self._events.append(sse({"type": name, "sequence_number": number, **fields}, name))
            self.num_bytes += len(self._events[-1])
            while len(self._events) > MAX_EVENTS:
                self._first += 1
                self.num_bytes -= len(self._events.pop(0))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def cancel(self) -> None:
        """Cancel the work and wait until the engine is released; what has ended stays as it is."""
        if self._task is None or self._over:
            return
        if self.job.going:
            self._cancelled = True
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._over:  # it was cancelled before it began
            await self._generation.close("cancelled")
            await self._finish(self.job.cancel() if self.job.going else None)

    async def settle(self) -> None:
        """Wait until the work has seen that the engine stopped."""
        if self._task is not None and not self._over:
            await asyncio.wait({self._task}, timeout=SETTLE_SECONDS)
            self._task.cancel()  # it waits for a place in the queue
            await asyncio.gather(self._task, return_exceptions=True)

    def check_start(self, after: int) -> None:
        """Raise RequestError when the events after number ``after`` are not kept."""
        if after + 1 < self._first:
            raise RequestError(
                f"the events before number {self._first} are gone; start after a later one, or fetch the response",
                param="starting_after",
                code="events_gone",
            )

    async def events(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after the one numbered ``after``: the kept ones, then each new one, to the end."""
        at = after + 1
        while True:
            news = self._news
            while (at := max(at, self._first)) < self._first + len(self._events):
                at += 1
                yield self._events[at - 1 - self._first]
            if not self.going and at >= self._first + len(self._events):
                if self.suspended:
                    raise RequestError(
                        "the server is shutting down; the next one continues the response if it has the journal",
                        status=503,
                        code="shutting_down",
                        retry_after=5.0,
                    )
                return
            if news is self._news:
                await news.wait()

    async def guarded(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield ``events``, with an error as the last one."""
        try:
            async for event in self.events(after):
                yield event
        except RequestError as e:
            yield sse(error_object(e))

    def object(self) -> dict[str, Any]:
        """The response as it is now."""
        return self.job.object
