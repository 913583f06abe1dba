"""Server-sent events, and replies that end when their client leaves, streamed or collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode
# Seconds between two pings of a silent stream: proxies close a connection that says nothing for a minute.
PING_SECONDS = 10.0


def sse(value: Any, event: str | None = None) -> bytes:
    """Encode one event: ``data: {...}`` and an empty line, after an ``event:`` line if it has a name."""
    data = b"data: " + encode(value) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


class Disconnected(Exception):
    """The client is gone, so no reply can be sent."""


async def _gone(receive: Callable[[], Awaitable[dict]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Callable[[], Awaitable[dict]], work: Awaitable[T]) -> T:
    """Await ``work``. If the client leaves first, cancel it and raise Disconnected."""
    task = asyncio.ensure_future(work)
    tasks = {task, asyncio.ensure_future(_gone(receive))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        # Cancel and wait, so that the work has released everything when this returns.
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A reply whose body is a generator of events. ``close`` is awaited in every case: at the end, or when the client
    leaves or is disconnected because it does not read (``server.Protocol``). ``ping``: an event to send when there was
    none for PING_SECONDS (empty: none)."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str],
        ping: bytes = b"",
    ) -> None:
        self.events = events
        self.close = close
        self.ping = ping
        self._silent = True
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        try:
            await unless_disconnected(receive, self._stream(send))
        except Disconnected:
            return
        finally:
            # A generator that was never started does not run its ``finally``.
            await self.events.aclose()
            await self.close()

    async def _stream(self, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._pings(send)) if self.ping else None
        try:
            async for data in self.events:
                self._silent = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pings(self, send: Callable) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._silent:
                await send({"type": "http.response.body", "body": self.ping, "more_body": True})
            self._silent = True
