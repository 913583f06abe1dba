"""The events that wait for the reader of one request: bounded, without losing a token or blocking the engine."""

from __future__ import annotations

import asyncio
from collections import deque

from kvasir.client.pieces import join
from kvasir.types import Event


class Outbox:
    """A queue of events. New tokens join the waiting event of their branch, so a reader that falls behind gets longer
    deltas and not more of them."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._newest: dict[int, Event] = {}  # branch -> the last of its waiting events with tokens
        self._filled: asyncio.Future | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Append an event and wake the reader. ``event`` may be extended later, so the caller must not keep it."""
        if event.kind == "tokens":
            newest = self._newest.get(event.branch)
            if newest is not None and join(newest, event):
                return
            self._newest[event.branch] = event
        self._events.append(event)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def get(self) -> Event:
        """Wait for the next event and take it; for one reader at a time."""
        while not self._events:
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled
        event = self._events.popleft()
        if self._newest.get(event.branch) is event:
            del self._newest[event.branch]
        return event
