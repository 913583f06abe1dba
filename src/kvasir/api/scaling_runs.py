"""Runs of test-time scaling in the background: started, watched, cancelled. They live in memory and end with the server."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any

from kvasir.api import scaling
from kvasir.errors import RequestError
from kvasir.logs import log

MAX_RUNNING = 8
MAX_KEPT = 64  # ended runs
MAX_EVENTS = 4096  # of a run that are kept; the first ones go
ENDED = ("done", "failed", "cancelled")


class ScalingRun:
    """``status``: running, done, failed or cancelled. ``owner``: whose it is; nobody else sees it."""

    def __init__(self, name: str, owner: str, plan: scaling.Plan, release: Callable[[], None]) -> None:
        self.name, self.owner, self.plan, self.created = name, owner, plan, int(time.time())
        self.status = "running"
        self.error: RequestError | None = None
        self.results: list[dict[str, Any]] = []
        self.amounts: dict[str, float] | None = None
        self.num_done = 0
        self._events: list[dict[str, Any]] = []
        self._first = 0  # number of the first event that is kept
        self._news = asyncio.Event()
        self._release = release
        self.task = asyncio.create_task(self._run(), name=f"scaling run {name}")

    async def _run(self) -> None:
        try:
            solution = await self.plan.run(self._take)
            self.results, self.amounts = [scaling.summary(s) for s in solution.solved], solution.ledger.total()
            self.status = "done"
        except asyncio.CancelledError:
            self.status = "cancelled"
        except RequestError as e:
            self.status, self.error = "failed", e
        except Exception:
            log.exception("scaling run %s failed", self.name)
            self.status, self.error = "failed", RequestError("internal error", status=500, code="internal_error")
        finally:
            self._release()
            self._add({"event": "run.end", "status": self.status})

    def _take(self, event: dict[str, Any]) -> None:
        self.num_done += event["event"] == "end"
        self._add(scaling.told(event))

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if len(self._events) > MAX_EVENTS:
            gone = len(self._events) - MAX_EVENTS
            self._first += gone
            del self._events[:gone]
        self._news.set()
        self._news = asyncio.Event()

    async def cancel(self) -> None:
        """Return when it has ended and let go of the engine."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self.status == "running":  # it was cancelled before it began
            self.status = "cancelled"
            self._release()
            self._add({"event": "run.end", "status": self.status})

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Those that are kept, then each as it comes, to the end of the run."""
        at = 0
        while True:
            at = max(at, self._first)
            news = self._news
            while at < self._first + len(self._events):
                yield self._events[at - self._first]
                at += 1
                at = max(at, self._first)
            if self.status in ENDED and at >= self._first + len(self._events):
                return
            if news is self._news:
                await news.wait()

    def object(self) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.name, "object": "scaling.run", "created": self.created, "status": self.status,
                                 "problems": len(self.plan.problems), "done": self.num_done, "seed": self.plan.seed}
        if self.amounts is not None:
            found |= {"usage": scaling.usage(self.amounts), "results": self.results}
        if self.error is not None:
            found["error"] = {"message": self.error.message, "code": self.error.code, "param": self.error.param}
        return found


class ScalingRuns:
    """All of them, by name."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, ScalingRun] = OrderedDict()

    def start(self, name: str, owner: str, plan: scaling.Plan, release: Callable[[], None]) -> ScalingRun:
        """Raises RequestError 429 when too many run."""
        if sum(run.status == "running" for run in self._runs.values()) >= MAX_RUNNING:
            raise RequestError(f"{MAX_RUNNING} scaling runs are under way already", status=429, code="too_many_runs", retry_after=5.0)
        run = self._runs[name] = ScalingRun(name, owner, plan, release)
        for old in [n for n, r in self._runs.items() if r.status != "running"][:-MAX_KEPT]:
            del self._runs[old]
        return run

    def get(self, name: str, owner: str) -> ScalingRun:
        """Raises RequestError 404, also for another's."""
        run = self._runs.get(name)
        if run is None or run.owner != owner:
            raise RequestError(f"there is no scaling run '{name[:80]}'", status=404, param="id", code="run_not_found")
        return run

    async def close(self) -> None:
        await asyncio.gather(*(run.cancel() for run in self._runs.values() if run.status == "running"))
