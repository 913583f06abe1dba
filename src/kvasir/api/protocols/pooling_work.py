"""One HTTP request's vectors: its engine requests from submission to the last vector, closed in every case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from kvasir.api.http.metrics import Metrics
from kvasir.client.interface import EngineClient
from kvasir.errors import RequestError
from kvasir.types import Event, Request


class PoolingWork:
    """The work of one body; see ``service.Work``. ``cached``: prompt tokens that the prefix cache had."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, requests: list[Request], release: Callable[[], None]
    ) -> None:
        self._metrics, self._requests, self._release = metrics, requests, release
        self._streams: list[AsyncIterator[Event]] = [client.generate(request) for request in requests]
        self._arrival = min(request.arrival for request in requests)
        self._closed = False
        self._reason = "disconnected"
        self.cached = 0

    async def open(self) -> None:
        """Wait until the engine has accepted everything. Raises the first RequestError, with nothing left open."""
        for event in await self._all([asyncio.ensure_future(anext(stream)) for stream in self._streams]):
            assert event.kind == "accepted", event

    async def vectors(self) -> list[Event]:
        """Wait for the pooled event of every request, in their order. Raises RequestError."""
        each = zip(self._streams, self._requests, strict=True)
        events = await self._all([asyncio.ensure_future(self._pooled(*one)) for one in each])
        self.cached = sum(event.num_cached for event in events)
        self._reason = "finished"
        return events

    async def _all(self, tasks: list[asyncio.Future[Event]]) -> list[Event]:
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException as e:
            if isinstance(e, RequestError):
                self._reason = e.code or "refused"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # no iterator is running when it is closed
            raise

    async def _pooled(self, stream: AsyncIterator[Event], request: Request) -> Event:
        async for event in stream:
            if event.pooled is not None:
                if event.queued is not None:
                    spent = time.monotonic() - request.arrival
                    self._metrics.queue_time.observe(event.queued)
                    self._metrics.prefill_time.observe(max(0.0, spent - event.queued))
                self._metrics.finished("stop", len(request.prompt_ids), 0, None)
                return event
        raise RequestError("the engine ended the request without an answer", status=500, code="internal_error")

    async def close(self, reason: str = "") -> None:
        """Cancel what still runs; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for stream in self._streams:
                await stream.aclose()  # type: ignore[attr-defined]
        finally:
            self._release()
            self._metrics.ended(reason or self._reason, time.monotonic() - self._arrival)
