"""Threads that turn bodies into requests, off the event loop and in turns by API key.

Usual bodies, large ones and those whose chat template is rendered in a process of its own have threads of their own, so
none of these kinds waits for another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvasir.api.http.memory import Trimmer
from kvasir.errors import RequestError, is_panic
from kvasir.fair_threads import FairThreads

T = TypeVar("T")
# Bytes from which on a body is large. Decoding one million numbers takes 0.1 s in which no other thread runs.
LARGE_BYTES = 1 << 20
# Threads of each kind. A process that renders a template may take 1 GiB and ten seconds.
USUAL, LARGE, APART = min(32, (os.cpu_count() or 1) + 4), 2, 3
PATIENCE_SECONDS = 30.0  # longest wait for a turn


class RendersApart(Exception):
    """A job renders its chat template in a process, and does not run in the threads for that."""


class Asks(Protocol):
    """The caller whose job it is (``service.Caller``). ``own_tenant``: the key whose turn it takes. ``apart``: its job
    may render a template in a process. ``warnings``: what the job has told so far."""

    own_tenant: str
    apart: bool
    warnings: list[str]


class Preparing:
    """The threads of one server."""

    def __init__(self) -> None:
        self.trimmer = Trimmer()
        self.usual = FairThreads(USUAL, "prepare")
        self.large = FairThreads(LARGE, "prepare-large")
        self.apart = FairThreads(APART, "prepare-apart")

    async def run(self, caller: Asks, size: int, job: Callable[[], T]) -> T:
        """Run a job on a body of ``size`` bytes. One that raises RendersApart runs again where it may render.

        Raises RequestError 503 when it waits too long for its turn, and 500 when a library panics."""
        threads = self.large if size >= LARGE_BYTES else self.usual
        if threads is self.large:
            self.trimmer.note(size)
        try:
            return await _turn(threads, caller.own_tenant, job, "requests")
        except RendersApart:
            caller.apart = True
            caller.warnings.clear()
        return await _turn(self.apart, caller.own_tenant, job, "chat templates")

    async def when_free(self, key: str, apart: bool, job: Callable[[], T]) -> T:
        """Run a job of work that was accepted before, however long it waits for its turn. ``apart``: it renders a
        template in a process. Raises RequestError 503 when the server shuts down."""
        future = (self.apart if apart else self.usual).submit(key, job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and not (task is not None and task.cancelling()):
                raise _shutting_down() from None
            raise

    def close(self) -> None:
        """Refuse what waits, and start nothing more."""
        self.trimmer.close()
        for threads in (self.usual, self.large, self.apart):
            threads.close()


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5.0)


async def _turn(threads: FairThreads, key: str, job: Callable[[], T], what: str) -> T:
    future = threads.submit(key, job)
    result = asyncio.wrap_future(future)
    try:
        await asyncio.wait({result}, timeout=PATIENCE_SECONDS)
        if future.cancelled():
            raise _shutting_down()
        if not future.running() and future.cancel():
            raise RequestError(
                f"the request waited {PATIENCE_SECONDS:g} s for other {what}; try again later",
                status=503,
                code="busy",
                retry_after=5.0,
            )
        return await result
    except BaseException as e:
        if not is_panic(e):
            raise
        raise RequestError(f"a library gave up on this request: {str(e)[:300]}", status=500, code="panic") from e
    finally:
        result.cancel()  # a client that left waits for nothing
