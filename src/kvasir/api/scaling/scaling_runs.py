"""Background runs of test-time scaling: started, watched, cancelled.

Without a folder (``scaling_store``) they live in memory and end with the server. With one, the next server continues
the unfinished runs and still knows the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from kvasir.api.scaling import scaling
from kvasir.api.scaling.scaling_store import RunStore
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.scaling.journal import JournalFull

# Most runs at the same time.
MAX_RUNNING = 8
# Most ended runs that are kept.
MAX_KEPT = 64
# Most events of a run that are kept; the oldest are dropped.
MAX_EVENTS = 4096
ENDED = ("done", "failed", "cancelled")


class ScalingRun:
    """One run. ``status``: running, done, failed or cancelled. ``owner``: the caller's key; other callers cannot see
    the run. ``problems``: their number. ``seed``: as asked for."""

    def __init__(
        self, name: str, owner: str, *, problems: int, seed: int, created: int, store: RunStore | None = None
    ) -> None:
        self.name, self.owner, self.problems, self.seed, self.created = name, owner, problems, seed, created
        self.status = "running"
        self.error: RequestError | None = None
        self.results: list[dict[str, Any]] = []
        self.amounts: dict[str, float] | None = None
        self.num_done = 0
        self.task: asyncio.Task | None = None
        self._events: list[dict[str, Any]] = []
        self._first = 0  # number of the first event that is kept
        self._news = asyncio.Event()
        self._store = store
        self._suspended = False
        self._release: Callable[[], None] = lambda: None

    def begin(self, plan: scaling.Plan, release: Callable[[], None]) -> None:
        """Start the run. ``release`` is called once, at its end."""
        self._release = release
        self.task = asyncio.create_task(self._run(plan), name=f"scaling run {self.name}")

    async def _run(self, plan: scaling.Plan) -> None:
        try:
            solution = await plan.run(self._take, self._store and self._store.calls(self.name))
            self.results, self.amounts = [scaling.summary(s) for s in solution.solved], solution.ledger.total()
            self.status = "done"
        except asyncio.CancelledError:
            self.status = "cancelled"
        except RequestError as e:
            self.status, self.error = "failed", e
        except (JournalFull, OSError) as e:  # the next server goes on with it
            log.error("scaling run %s ends: %s", self.name, e)
            self.status, self.error = "failed", RequestError(str(e), status=503, code="no_room", retry_after=60.0)
        except Exception:
            log.exception("scaling run %s failed", self.name)
            self.status, self.error = "failed", RequestError("internal error", status=500, code="internal_error")
        finally:
            self._ended()

    def fail(self, error: RequestError) -> None:
        """End a run that cannot begin."""
        self.status, self.error = "failed", error
        self._ended()

    def _ended(self) -> None:
        self._release()
        # A run that ended because the server or its engine did is not over: the next server continues it.
        if self._store is not None and not self._suspended and not (self.error and self.error.status == 503):
            error = self.error and {"message": self.error.message, "code": self.error.code, "param": self.error.param}
            self._store.end(
                self.name,
                {
                    "status": self.status,
                    "error": error,
                    "results": self.results,
                    "amounts": self.amounts,
                    "done": self.num_done,
                },
            )
        self._add({"event": "run.end", "status": self.status})

    def restore(self, end: dict[str, Any]) -> None:
        """Take over the end of a run that an earlier server has seen."""
        self.status, self.results, self.amounts, self.num_done = (
            end["status"],
            end["results"],
            end["amounts"],
            end["done"],
        )
        self.error = RequestError(**end["error"]) if end["error"] else None
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

    async def cancel(self, suspend: bool = False) -> None:
        """Cancel the run and wait until it has released the engine. ``suspend``: the next server may continue it."""
        self._suspended = suspend
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        if self.status == "running":  # it was cancelled before it began
            self.status = "cancelled"
            self._ended()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events that are kept, then each new one, to the end of the run."""
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
        """The run as clients see it."""
        found: dict[str, Any] = {
            "id": self.name,
            "object": "scaling.run",
            "created": self.created,
            "status": self.status,
            "problems": self.problems,
            "done": self.num_done,
            "seed": self.seed,
        }
        if self.amounts is not None:
            found |= {"usage": scaling.usage(self.amounts), "results": self.results}
        if self.error is not None:
            found["error"] = {"message": self.error.message, "code": self.error.code, "param": self.error.param}
        return found


class ScalingRuns:
    """All runs of a server, by name."""

    def __init__(self, store: RunStore | None = None) -> None:
        self.store = store
        self._runs: OrderedDict[str, ScalingRun] = OrderedDict()

    def start(
        self, name: str, owner: str, plan: scaling.Plan, release: Callable[[], None], asked: dict[str, Any]
    ) -> ScalingRun:
        """Start a run. ``asked``: the data from which ``resume`` of another server makes the same plan.

        Raises RequestError 429 when too many runs are active, and 503 when the run cannot be written to disk.
        """
        if sum(run.status == "running" for run in self._runs.values()) >= MAX_RUNNING:
            raise RequestError(
                f"{MAX_RUNNING} scaling runs are active already", status=429, code="too_many_runs", retry_after=5.0
            )
        run = ScalingRun(
            name, owner, problems=len(plan.problems), seed=plan.seed, created=int(time.time()), store=self.store
        )
        if self.store is not None:
            try:
                self.store.begin(
                    name,
                    {
                        "owner": owner,
                        "problems": run.problems,
                        "seed": run.seed,
                        "created": run.created,
                        "asked": asked,
                    },
                )
            except OSError as e:
                raise RequestError(
                    f"the run cannot be kept on disk: {e.strerror}", status=503, code="no_room", retry_after=60.0
                ) from e
        self._runs[name] = run
        run.begin(plan, release)
        self._forget_old()
        return run

    async def resume(self, planned: Callable[[dict[str, Any], int], Awaitable[scaling.Plan]]) -> int:
        """Load the runs of earlier servers and continue the unfinished ones; return how many continue.

        ``planned(asked, seed)`` makes a run's plan or raises RequestError. Continued runs count against no limit,
        because they were admitted once.
        """
        going = 0
        for name, record, end in self.store.load() if self.store else []:
            run = self._runs[name] = ScalingRun(
                name,
                record["owner"],
                problems=record["problems"],
                seed=record["seed"],
                created=record["created"],
                store=self.store,
            )
            if end is not None:
                run.restore(end)
                continue
            try:
                run.begin(await planned(record["asked"], run.seed), lambda: None)
                going += 1
            except RequestError as e:
                run.fail(e)
            except Exception:  # one broken record must not keep the server from starting
                log.exception("scaling run %s cannot go on", name)
                run.fail(RequestError("the run's record cannot be read", status=500, code="internal_error"))
        self._forget_old()
        return going

    def _forget_old(self) -> None:
        for old in [n for n, r in self._runs.items() if r.status != "running"][:-MAX_KEPT]:
            del self._runs[old]
            if self.store is not None:
                self.store.drop(old)

    def get(self, name: str, owner: str) -> ScalingRun:
        """The caller's run of this name. Raises RequestError 404, also for a run of another caller."""
        run = self._runs.get(name)
        if run is None or run.owner != owner:
            raise RequestError(f"there is no scaling run '{name[:80]}'", status=404, param="id", code="run_not_found")
        return run

    async def close(self) -> None:
        """Suspend all runs and close the folder."""
        await asyncio.gather(*(run.cancel(suspend=True) for run in self._runs.values() if run.status == "running"))
        if self.store is not None:
            self.store.close()
