"""Threads that jobs of several API keys take in turns."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class FairThreads:
    """``size`` threads named ``name``. A job waits in the queue of its key, and the keys take turns. A key leaves one
    thread free for others; the empty key, which stands for everybody, may use all."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self._lock = threading.Lock()  # guards the queues and the counts
        # By key, whose turn is next first.
        self._queues: OrderedDict[str, OrderedDict[Future, Callable[[], Any]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._closed = False
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)

    def submit(self, key: str, work: Callable[[], Any]) -> Future:
        """Put a job into the queue of its key. ``cancel`` of the result succeeds only while the job waits. After
        ``close`` it is cancelled at once."""
        future: Future = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._queues.setdefault(key, OrderedDict())[future] = work
        future.add_done_callback(lambda future: self._forget(key, future))
        self._dispatch()
        return future

    def waiting(self, key: str) -> int:
        """Number of jobs that wait in the queue of a key."""
        with self._lock:
            return len(self._queues.get(key, ()))

    def close(self) -> None:
        """Cancel what waits, and start nothing more."""
        with self._lock:
            self._closed = True
            waiting = [future for queue in self._queues.values() for future in queue]
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, key: str, future: Future) -> None:
        with self._lock:
            self._queues.get(key, {}).pop(future, None)

    def _dispatch(self) -> None:
        """Start what may start."""
        with self._lock:
            while not self._closed and self._running.total() < self.size and (job := self._next()):
                self._running[job[0]] += 1
                self._threads.submit(self._run, *job)

    def _next(self) -> tuple[str, Future, Callable[[], Any]] | None:
        """Take a job of the key whose turn it is."""
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and self._running[key] < (max(1, self.size - 1) if key else self.size):
                future, work = queue.popitem(last=False)
                self._queues.move_to_end(key)
                if future.set_running_or_notify_cancel():
                    return key, future, work
            if not queue:
                del self._queues[key]
        return None

    def _run(self, key: str, future: Future, work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # a panic of a library is no Exception
            future.set_exception(e)
        finally:
            del future, work  # the error refers to this frame
            with self._lock:
                self._running -= Counter([key])
            self._dispatch()
