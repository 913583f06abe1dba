"""Links run copies between tiers while steps run. Each copy is a future that is done once its bytes are there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from kvasir.kv.pool import KVPool

# Jobs whose copies run on the device while the next one is launched.
AHEAD = 2


class Link(Protocol):
    """Runs jobs in an order of its own."""

    def submit(self, job: Callable[[], Any]) -> Future:
        """Run ``job`` soon. The future has its result, or its exception, once the bytes that it copied are there."""

    def close(self) -> None:
        """End after the jobs that have begun; the others are cancelled."""


class ThreadLink:
    """Runs jobs in a thread, one after the other: copies in host memory, and files."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, f"kvasir-{name}")

    def submit(self, job: Callable[[], Any]) -> Future:
        return self._threads.submit(job)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class StreamLink:
    """Launches jobs on a CUDA stream of its own, from a thread of its own, behind what changed the pool's pages outside
    steps so far. Pages that a step writes are committed, and so complete, before they are copied."""

    def __init__(self, device: torch.device, pool: KVPool) -> None:
        import torch

        if pool.changed is None:
            pool.changed = torch.cuda.Event()
            pool.changed.record()
        self._torch, self._device, self._changed = torch, device, pool.changed
        self._stream = torch.cuda.Stream(device)
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvasir-stream-link", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Launch jobs as they come; wait for the oldest one's copies when there is nothing to launch."""
        flying: deque[tuple[Any, Future, Any]] = deque()  # event behind the copies, future, result
        closing = False
        while not closing or flying:
            if not closing and len(flying) < AHEAD and not (flying and self._jobs.empty()):
                item = self._jobs.get()
                if item is None:
                    closing = True
                    continue
                job, future = item
                if future.set_running_or_notify_cancel():
                    self._launch(job, future, flying)
                continue
            event, future, result = flying.popleft()
            try:
                event.synchronize()
            except Exception as error:  # the device is lost: the step loop meets the same error
                future.set_exception(error)
            else:
                future.set_result(result)
        while not self._jobs.empty():
            if (item := self._jobs.get()) is not None:
                item[1].cancel()

    def _launch(self, job: Callable[[], Any], future: Future, flying: deque[tuple[Any, Future, Any]]) -> None:
        try:
            with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._stream):
                self._stream.wait_event(self._changed)
                result = job()
                event = self._torch.cuda.Event(blocking=True)
                event.record(self._stream)
        except Exception as error:
            future.set_exception(error)
        else:
            flying.append((event, future, result))
