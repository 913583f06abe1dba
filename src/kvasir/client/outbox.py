"""What waits for the reader of one request: bounded, never losing a token, never blocking the engine."""

from __future__ import annotations

import asyncio
from collections import deque

from kvasir.client.pieces import join
from kvasir.types import Event


class Outbox:
    """A queue of events. Tokens join those of their branch that still wait, so a reader that falls behind gets longer deltas,
    and not more of them."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._newest: dict[int, Event] = {}  # branch -> its newest waiting event of tokens
        self._filled: asyncio.Future | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        if event.kind == "tokens":
            newest = self._newest.get(event.branch)
            if newest is not None and join(newest, event):
                return
            self._newest[event.branch] = event
        self._events.append(event)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def get(self) -> Event:
        """For one reader at a time."""
        while not self._events:
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled
        event = self._events.popleft()
        if self._newest.get(event.branch) is event:
            del self._newest[event.branch]
        return event
