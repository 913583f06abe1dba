"""Many replicas as one synchronous core, for callers without an event loop: ``LLM(..., replicas=2)``.

A front runs on a thread of its own. ``submit`` hands it a request, and ``step`` waits for what has come back.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from kvasir.client.front import Front
from kvasir.client.messages import error_event
from kvasir.cluster.cluster_client import open_client, with_replicas
from kvasir.config import EngineConfig, Settings
from kvasir.errors import RequestError
from kvasir.types import EngineStats, Event, ModelInfo, Request

# Longest wait of a step for an event, in seconds: an interrupt is seen in between.
WAIT_SECONDS = 0.05
# Pause before a request that found a full queue is sent again, in seconds.
AGAIN_SECONDS = 0.2


def of_replicas(config: EngineConfig, replicas: int) -> Any:
    """A core over ``replicas`` engines on this host. Raises ConfigError."""
    return ClusterCore(with_replicas(config, replicas))


class ClusterCore:
    """The methods of ``interface.EngineCore`` that ``LLM`` uses. ``client``: the front; by default one that
    ``settings`` describe. Raises ConfigError when the replicas cannot start."""

    info: ModelInfo
    adapters = None

    def __init__(self, settings: Settings, client: Front | None = None) -> None:
        self.scheduler = SimpleNamespace(prompts_first=False)  # replicas stream, whatever the caller prefers
        self._client = client or open_client(settings)
        scheduler = settings.scheduler
        # No replica's queue is full, even if all requests go to the same one.
        self._most = min(
            2 * settings.server.replicas * scheduler.max_num_seqs,
            scheduler.max_num_seqs + scheduler.max_queued_requests,
        )
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._cancelled: dict[str, set[int | None]] = {}  # branches whose later events nobody wants; None: all
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)
        self._thread.start()
        try:
            self._wait(self._client.start())
        except BaseException:
            self._end_loop()
            raise
        self.info = self._client.info

    def submit(self, request: Request) -> list[Event]:
        """Hand a request over. Its events come from ``step``. Returns one ``error`` event with status 429 when so many
        are open that it should come later."""
        if len(self._open) >= self._most:
            full = RequestError("enough requests are open", status=429, code="queue_full", retry_after=AGAIN_SECONDS)
            return [error_event(request, full)]
        self._open.add(request.id)
        asyncio.run_coroutine_threadsafe(self._read(request), self._loop)
        return []

    async def _read(self, request: Request) -> None:
        while True:
            try:
                async for event in self._client.generate(request):
                    self._events.put(event)
                break
            except RequestError as e:
                if e.status == 429:  # a replica's queue is full after all; nothing was computed
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                self._events.put(error_event(request, e))
                break
        self._open.discard(request.id)

    def cancel(self, request_id: str, branch: int | None = None) -> list[Event]:
        """End a request or a branch of it. No further event of it comes."""
        if request_id in self._open:
            self._cancelled.setdefault(request_id, set()).add(branch)
            asyncio.run_coroutine_threadsafe(self._client.cancel(request_id, branch), self._loop)
        return []

    def step(self) -> list[Event]:
        """The events that have come, after a wait of at most ``WAIT_SECONDS`` for the first."""
        events: list[Event] = []
        ended = self._cancelled.keys() - self._open  # all their events are in the queue now
        try:
            events.append(self._events.get(timeout=WAIT_SECONDS))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            wanted = [event for event in events if not self._is_cancelled(event)]
            for request_id in ended:
                del self._cancelled[request_id]
            return wanted

    def _is_cancelled(self, event: Event) -> bool:
        branches = self._cancelled.get(event.request_id, ())
        return None in branches or (event.kind == "tokens" and event.branch in branches)

    def has_work(self) -> bool:
        """Whether a request is open, or events of one that has ended wait for a step."""
        return bool(self._open) or not self._events.empty()

    def stats(self) -> EngineStats:
        """Statistics of all replicas."""
        return self._client.stats()

    def close(self) -> None:
        """End the replicas."""
        self._wait(self._client.stop(0.0))
        self._end_loop()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
