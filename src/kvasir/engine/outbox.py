"""What waits for the reader of one request: bounded in events, never losing a token, never blocking the engine."""

from __future__ import annotations

import asyncio
from collections import deque

from kvasir.engine.pieces import join
from kvasir.types import Event


class Outbox:
    """A queue of events. Beyond ``limit`` waiting events, new tokens join the newest waiting event of their branch, so a
    reader that falls behind gets fewer, longer deltas."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._newest: dict[int, Event] = {}  # branch -> its newest waiting event of tokens
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        if event.kind == "tokens":
            newest = self._newest.get(event.branch)
            if len(self._events) >= self._limit and newest is not None and join(newest, event):
                return
            self._newest[event.branch] = event
        self._events.append(event)
        self._filled.set()

    async def get(self) -> Event:
        while not self._events:
            self._filled.clear()
            await self._filled.wait()
        event = self._events.popleft()
        if self._newest.get(event.branch) is event:
            del self._newest[event.branch]
        return event
