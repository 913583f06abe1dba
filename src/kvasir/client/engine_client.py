"""The asynchronous engine: starts the engine process, feeds it, watches it, and replaces it when it dies or hangs.

Front ends see requests go in and events come out. Behind that, every request is journalled until its last event; when the
engine process ends, a new one is started and gets what the journal holds, with the tokens already delivered. Readers see a
pause: no gap, no duplicate. Never imports torch.

Who is to blame for a death: the requests that the process was working on. They are *suspects*: the next process gets them
first and one at a time. A suspect that makes new tokens has passed; one that is there when the process dies again,
``max_crashes_per_request`` times in all, is *quarantined*: it alone fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from kvasir.client import ipc, journal, messages
from kvasir.client.child import Child, ChildError
from kvasir.client.engine_process import ENGINE
from kvasir.client.interface import Health
from kvasir.client.journal import Entry, Journal
from kvasir.client.outbox import Outbox
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError
from kvasir.logs import log
from kvasir.types import EngineStats, Event, ModelInfo, Request

MAX_DEATHS = 5  # deaths in a row, without a token in between, after which the engine is given up
LONG_LIFE_SECONDS = 60.0  # a process that lived this long does not count as dying in a row
MAX_BACKOFF_SECONDS = 5.0
MAX_TRIAL_TOKENS = 64
RETRY_SECONDS = 5.0
STOP_SECONDS = 10.0  # for an orderly end of the process
COUNTERS = (
    "step",
    "prompt_tokens",
    "generation_tokens",
    "forwards",
    "cached_tokens",
    "prefix_queries",
    "preemptions",
    "failed",
    "busy_seconds",
    "draft_steps",
    "drafts",
    "drafted_tokens",
    "drafted_by",
    "accepted_tokens",
    "accepted_by_depth",
    "drafted_by_depth",
    "draft_saved_seconds",
)  # of EngineStats: they go on where an engine process ends
TICKS = 20  # looks at the flight record per watchdog period


class AsyncEngine:
    """Implements ``interface.EngineClient``. Everything but ``start_process`` belongs to the event loop of ``start``.

    ``factory``: "module:callable" that builds the core from an EngineConfig, inside the engine process.
    ``num_restarts`` and ``num_quarantined`` count since ``start``.
    """

    info: ModelInfo

    def __init__(self, config: EngineConfig, *, factory: str = ENGINE) -> None:
        self.config = config
        self.startup: dict[str, float] = {}  # seconds by phase of the latest start
        self.num_restarts = 0
        self.num_quarantined = 0
        self._factory = factory
        self._journal = Journal()
        self._outboxes: dict[int, Outbox] = {}  # by ticket
        self._child: Child | None = None
        self._connected = False
        self._recovering = False  # some requests may be suspects, or are not submitted yet
        self._deaths = 0
        self._stuck = ""
        self._why_down = "not started"
        self._born = 0.0  # when the present process was ready
        self._failed = False  # given up for good
        self._deadline: float | None = None  # of the drain
        self._stopped: asyncio.Future | None = None
        self._supervisor: asyncio.Task | None = None
        self._stats = EngineStats()
        self._counted: dict[str, Any] = {}  # counters of the processes that ended

    # ----------------------------------------------------------------------------------------------------- life of it

    def start_process(self) -> None:
        """Start the engine process without waiting for it; cheap, needs no event loop. ``start`` calls it when you did not."""
        if self._child is None:
            self._child = Child(self.config, self._factory)
            self._why_down = "starting"

    async def start(self) -> None:
        """Return when requests can be served. Raises ConfigError when the engine cannot start."""
        assert self._supervisor is None, "start() was called twice"
        self.start_process()
        try:
            self._welcome(await self._child.ready(self.config.service.startup_timeout))
        except BaseException as e:
            await self._child.reap(0.0)
            self._why_down = f"the start failed: {e}"
            if isinstance(e, ChildError):
                raise ConfigError(f"the engine could not start: {e}") from e
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def stop(self, drain: float | None = None) -> None:
        """Refuse new requests, let the others finish for ``drain`` seconds (default: ``drain_timeout``), journal the rest
        and answer it with 503, end the process. A second call may shorten the drain; all calls return at the end."""
        seconds = self.config.service.drain_timeout if drain is None else drain
        deadline = time.monotonic() + max(0.0, seconds)
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        if self._stopped is None:
            self._stopped = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        while len(self._journal) and time.monotonic() < self._deadline:
            await asyncio.sleep(0.02)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        orderly, self._connected = self._connected, False
        self._write_journal()
        for entry in self._journal:
            self._fail(entry, self._shutting_down())
        if self._child is not None:
            if orderly:
                self._child.send(ipc.encode(messages.Stop()))
            await self._child.reap(STOP_SECONDS if orderly else 0.0)
        self._why_down = "stopped"

    def _shutting_down(self) -> RequestError:
        return RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=RETRY_SECONDS)

    def _engine_down(self) -> RequestError:
        return RequestError("the engine is down", status=503, code="engine_down", retry_after=RETRY_SECONDS)

    def _write_journal(self) -> None:
        left = [entry.request for entry in self._journal if not entry.closed]
        path = self.config.service.journal
        if not left:
            return
        if not path:
            log.warning("%d requests did not finish in time; no journal file is set", len(left))
            return
        try:
            log.warning("%d requests did not finish in time; written to %s", journal.write(path, left), path)
        except OSError as e:  # a full disk must not keep readers from their terminal reply
            log.error("%d unfinished requests could not be written to %s: %s", len(left), path, e)

    # -------------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """The request's events: ``accepted``, then tokens by branch; ends after the last branch has its ``finish_reason``.

        Raises RequestError for a refusal or a terminal error: 400 or 413 when the request cannot be sent, 409 for an id
        in use, 429 and 503 (with ``retry_after``) when there is no room, 500 (code "quarantined") when the request kills
        the engine. Closing the iterator cancels the request.
        """
        entry, outbox = self._open(request)
        try:
            remaining = len(entry.live_branches)
            while remaining:
                event = await outbox.get()
                if event.kind == "error":
                    raise RequestError(
                        event.message,
                        status=event.status,
                        param=event.param,
                        code=event.code,
                        retry_after=event.retry_after,
                    )
                remaining -= event.finish_reason is not None
                yield event
        finally:
            self._close(entry)

    def _open(self, request: Request) -> tuple[Entry, Outbox]:
        if self._deadline is not None:
            raise self._shutting_down()
        if self._failed:
            raise self._engine_down()
        if self._supervisor is None:
            raise RequestError("the engine is not started", status=503, code="not_started", retry_after=RETRY_SECONDS)
        _check(request)
        most = (
            self.config.scheduler.max_num_seqs + self.config.scheduler.max_queued_requests
        )  # never stricter than the core
        if len(self._journal) >= most and sum(not entry.accepted for entry in self._journal) >= most:
            # A burst between two steps is a full queue, as the core would say; else the engine restarts, or hangs.
            status, code = (429, "queue_full") if self._connected else (503, "overloaded")
            raise RequestError(
                f"{most} requests wait for the engine", status=status, code=code, retry_after=RETRY_SECONDS
            )
        entry = self._journal.add(request)
        outbox = self._outboxes[entry.ticket] = Outbox()
        if entry.done:  # all branches of a resumed request had ended
            self._journal.remove(entry)
        elif self._connected:
            self._submit_held() if self._recovering else self._submit(entry)
        return entry, outbox

    def _close(self, entry: Entry) -> None:
        """Nobody reads any more. The entry stays until the engine confirms its end, so that its id is not free too early:
        late events of this request must not reach another."""
        self._outboxes.pop(entry.ticket, None)
        if self._journal.get(entry.id) is entry and not entry.closed:
            entry.closed = True
            self._cancel(entry, None)

    async def cancel(self, request_id: str, branch: int | None = None) -> bool:
        """End a request, or one branch, with ``finish_reason="cancelled"``. False when there is no such live request."""
        entry = self._journal.get(request_id)
        if entry is None or entry.closed or (branch is not None and branch not in entry.live_branches):
            return False
        self._cancel(entry, branch)
        return True

    async def cancel_many(self, targets: Iterable[tuple[str, int | None]]) -> None:
        """``cancel`` for each, in one message; of those that are not live, nothing."""
        held = []
        for request_id, branch in targets:
            entry = self._journal.get(request_id)
            if (
                entry is not None
                and not entry.closed
                and (branch is None or branch in entry.live_branches)
                and self._mark(entry, branch)
            ):
                held.append((request_id, branch))
        if held:
            self._child.send(ipc.encode(messages.CancelMany(held)))

    def _cancel(self, entry: Entry, branch: int | None) -> None:
        if self._mark(entry, branch):
            self._child.send(ipc.encode(messages.Cancel(entry.id, branch)))

    def _mark(self, entry: Entry, branch: int | None) -> bool:
        """An end was asked for. Whether the engine process must hear of it; else it ends here."""
        entry.cancelled.update(entry.live_branches if branch is None else [branch])
        if not entry.submitted:
            self._end_cancelled(entry)
        return entry.submitted

    def _end_cancelled(self, entry: Entry) -> None:
        """End what was cancelled of a request that no engine process holds."""
        identity = {"request_id": entry.id, "epoch": entry.request.epoch}
        if entry.cancelled and not entry.accepted:
            self._deliver(Event(kind="accepted", **identity))
        for branch in sorted(entry.cancelled.intersection(entry.live_branches)):
            index = len(entry.request.emitted[branch])
            self._deliver(Event(kind="tokens", branch=branch, index=index, finish_reason="cancelled", **identity))

    def _fail(self, entry: Entry, error: RequestError) -> None:
        """The terminal reply of a request that cannot go on."""
        outbox = self._outboxes.get(entry.ticket)
        if outbox is not None:
            outbox.put(
                Event(
                    kind="error",
                    request_id=entry.id,
                    epoch=entry.request.epoch,
                    status=error.status,
                    param=error.param,
                    code=error.code,
                    message=error.message,
                    retry_after=error.retry_after,
                )
            )
        if entry.submitted and self._connected:
            self._close(entry)
        else:
            self._outboxes.pop(entry.ticket, None)
            self._journal.remove(entry)

    def _deliver(self, event: Event) -> None:
        """Journal an event and hand what is new of it to the reader."""
        entry = self._journal.get(event.request_id)
        if entry is None:
            return  # its end was delivered already
        try:
            news = entry.admit(event)
        except journal.GapError as e:
            log.error("request %s: %s", entry.id, e)
            self._fail(entry, RequestError(f"the engine lost output: {e}", status=500, code="lost_tokens"))
            return
        outbox = self._outboxes.get(entry.ticket)
        if news is not None and outbox is not None:
            self._deaths = 0 if news.token_ids else self._deaths
            outbox.put(news)
        if entry.done:
            self._journal.remove(entry)

    # -------------------------------------------------------------------------------------------------------- the process

    def _welcome(self, ready: messages.Ready) -> None:
        self._born = time.monotonic()
        self.info, self.startup = ready.info, ready.startup
        if ready.info.timed_attention:  # timed again, it might go on with other bits
            self.config = self.config.replace(attention_backend=ready.info.timed_attention)
        self._connected, self._stuck, self._why_down = True, "", ""

    async def _supervise(self) -> None:
        """Serve, and start over whenever the process ends."""
        try:
            while True:
                why = await self._serve(self._child)
                await self._bury(why)
                await self._revive()
        except ConfigError as e:
            await self._give_up(str(e))
        except Exception as e:  # our bug, but readers must not wait for ever
            log.exception("the engine's supervisor failed")
            await self._give_up(f"internal error: {e!r}")

    async def _serve(self, child: Child) -> str:
        """Deliver what the process sends until it ends. Returns why it did, if we know."""
        watchdog = asyncio.create_task(self._watch(child), name="engine watchdog")
        try:
            self._submit_held()
            while (message := await child.receive()) is not None:
                if isinstance(message, messages.Events):
                    for event in sorted(message.events, key=_is_later):
                        self._deliver(event)
                    if self._recovering:
                        self._submit_held()
                elif isinstance(message, messages.Heartbeat):
                    self._stats = message.stats
            return self._stuck
        except ipc.FrameError as e:
            return str(e)
        finally:
            watchdog.cancel()

    async def _watch(self, child: Child) -> None:
        """The watchdog: kill a process whose progress counter stands still. Counts its own looks, not seconds, so that a
        pause of this process is not mistaken for one of the other."""
        service = self.config.service
        seen, quiet = child.flight.progress, 0
        while True:
            await asyncio.sleep(service.watchdog / TICKS)
            progress = child.flight.progress
            seen, quiet = progress, quiet + 1 if progress == seen else 0
            slow = child.flight.activity is not ipc.Activity.IDLE and (child.flight.steps == 0 or child.flight.slow)
            limit = max(service.watchdog, service.startup_timeout) if slow else service.watchdog
            if quiet * service.watchdog >= limit * TICKS:
                break
        self._stuck = self._why_down = f"no progress for {limit:g} s"
        self._connected = False
        log.error("the engine process makes no progress for %g s: stacks, then restart", limit)
        child.dump_stacks()
        await asyncio.sleep(0.2)
        child.kill()

    async def _bury(self, why: str) -> None:
        """After the end of the process: find out who is to blame, rewind the rest."""
        child, lived = self._child, time.monotonic() - self._born
        self._connected = False
        self._why_down = why or "restarting"
        await child.reap(1.0)
        log.error(
            "%s%s; %d requests wait for the next", child.obituary(), f" ({why})" if why else "", len(self._journal)
        )
        self._deaths = 1 if lived > LONG_LIFE_SECONDS and not self._stuck else self._deaths + 1
        self.num_restarts += 1
        self._recovering = True
        self._counted = {name: _sum(self._counted.get(name), getattr(self._stats, name)) for name in COUNTERS}
        self._stats = EngineStats()  # nothing runs, and no page is in use
        self._blame(child)
        for entry in self._journal:
            self._rewind(entry)

    def _blame(self, child: Child) -> None:
        # A kill from outside is weak evidence: it counts half, and half a strike does not make a suspect.
        weight = 0.5 if child.ended_from_outside else 1.0
        for entry in self._journal:
            at_work = entry.submitted if child.at_work is None else entry.ticket in child.at_work
            if not at_work:
                continue
            entry.crashes += weight
            entry.strikes += weight
            if entry.strikes >= self.config.service.max_crashes_per_request:
                self._quarantine(entry)

    def _quarantine(self, entry: Entry) -> None:
        params = entry.request.params
        log.error(
            "request %s is quarantined: the engine died %d times on it (%d prompt tokens, %s output tokens, n=%d, temperature=%g, "
            "grammar=%s)",
            entry.id,
            round(entry.crashes),
            len(entry.request.prompt_ids),
            [len(tokens) for tokens in entry.request.emitted],
            params.n,
            params.temperature,
            params.grammar and params.grammar.kind,
        )
        self.num_quarantined += 1
        self._deaths = 0  # with the culprit gone there is hope again
        self._fail(entry, RequestError("this request made the engine fail repeatedly", status=500, code="quarantined"))

    async def _revive(self) -> None:
        """Start processes until one is ready. Raises ConfigError when that is hopeless."""
        while True:
            if self._deaths >= MAX_DEATHS:
                raise ConfigError(
                    f"the engine process died {self._deaths} times in a row; the last time: {self._child.obituary()}"
                )
            if self._deaths > 1:
                await asyncio.sleep(min(MAX_BACKOFF_SECONDS, 0.1 * 2**self._deaths))
            try:
                self._child = Child(self.config, self._factory)
                self._welcome(await self._child.ready(self.config.service.startup_timeout))
                return
            except (ChildError, OSError) as e:
                log.error("the engine could not restart: %s", e)
                self._deaths += 1
                await self._child.reap(0.0)

    async def _give_up(self, why: str) -> None:
        self._connected, self._failed, self._why_down = False, True, why
        log.error("the engine is down: %s", why)
        for entry in self._journal:
            self._fail(entry, self._engine_down())
        await self._child.reap(0.0)

    # ------------------------------------------------------------------------------------------------------ submitting

    def _submit(self, entry: Entry) -> None:
        try:
            frame = ipc.encode(messages.Submit(entry.ticket, entry.request))
        except ipc.FrameError as e:
            self._fail(
                entry,
                RequestError(f"the request outgrew what the engine can be sent: {e}", status=500, code="too_long"),
            )
            return
        entry.submitted = True
        self._child.send(frame)

    def _submit_held(self) -> None:
        """Suspects first, each alone in the engine; when none is left, everything."""
        for entry in self._journal:
            # The trial grows with each crash, so that a request which kills the engine now and then is caught as well.
            if entry.submitted and entry.fresh >= min(MAX_TRIAL_TOKENS, 2 ** max(0, int(entry.crashes) - 1)):
                entry.strikes = 0.0
        suspects = sorted((entry for entry in self._journal if entry.strikes >= 1), key=lambda entry: -entry.strikes)
        if not suspects:
            for entry in self._journal:
                if not entry.submitted:
                    self._submit(entry)
            self._recovering = any(entry.strikes for entry in self._journal)
        elif not any(entry.submitted for entry in suspects):
            for entry in self._journal:
                if entry.submitted:  # it has passed; it goes on when all have
                    self._child.send(ipc.encode(messages.Cancel(entry.id)))
                    self._rewind(entry)
            self._submit(suspects[0])

    def _rewind(self, entry: Entry) -> None:
        """Take an entry back from the engine, whose late events are then of an older epoch."""
        entry.rewind()
        self._end_cancelled(entry)

    # ----------------------------------------------------------------------------------------------------------- state

    def health(self) -> Health:
        """``ready`` while the engine process is there and moves; ``live`` until it is given up."""
        draining = self._deadline is not None
        return Health(
            live=not self._failed,
            ready=self._connected and not draining,
            reason=self._why_down or ("draining" if draining else ""),
        )

    def stats(self) -> EngineStats:
        """The latest heartbeat, with what this side knows of starts and restarts, of processes before this one, and of what waits here."""
        counted = {name: _sum(value, getattr(self._stats, name)) for name, value in self._counted.items()}
        held = sum(len(entry.live_branches) for entry in self._journal if not entry.submitted)
        return dataclasses.replace(
            self._stats,
            startup=self.startup,
            restarts=self.num_restarts,
            quarantined=self.num_quarantined,
            num_waiting=self._stats.num_waiting + held,
            **counted,
        )


def _sum(a: Any, b: Any) -> Any:
    """Of two counters, of tables of them by name or place, or of one that is known (the other is None)."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict):
        return {key: _sum(a.get(key), b.get(key)) for key in a | b}
    return [_sum(*pair) for pair in itertools.zip_longest(a, b)] if isinstance(a, list) else a + b


def _is_later(event: Event) -> bool:
    """Whether it may wait for the others of its step: first tokens are written first, ahead of hundreds of streams that run already."""
    return event.index > 0 or event.kind == "error"


def _check(request: Request) -> None:
    """Whether the engine process could read it. Raises RequestError: one malformed request must not end a process."""
    try:
        ipc.Decoder(messages.ToEngine).body(ipc.encode(messages.Submit(0, request))[ipc.HEADER.size :])
    except ipc.FrameError as e:
        too_long = "limit" in str(e)
        raise RequestError(f"the request cannot be sent to the engine: {e}", status=413 if too_long else 400) from e
    except (TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"the request cannot be sent to the engine: {e}") from e
