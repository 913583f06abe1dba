"""The asynchronous engine: starts the engine process, feeds it, watches it, and replaces it when it dies or hangs.

Front ends see requests go in and events come out. Behind that, every request is journalled until its last event. When
the engine process ends, a new one is started and gets the requests in the journal, with the tokens already delivered.
Readers see a pause, but no gap and no duplicate. This module never imports torch.

The requests that the process was working on are to blame for its death. They are *suspects*: the next process gets them
first and one at a time. A suspect that makes new tokens has passed. One that is at work when a process dies for the
``max_crashes_per_request``-th time is *quarantined*: it alone fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable

from kvasir.client import crash_dump, ipc, journal, messages
from kvasir.client.adapters import Registry
from kvasir.client.child import Child, ChildError
from kvasir.client.engine_process import ENGINE
from kvasir.client.interface import Health
from kvasir.client.journal import Entry, Journal
from kvasir.client.outbox import Outbox
from kvasir.client.totals import Totals
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, RequestError
from kvasir.logs import log
from kvasir.types import AdapterInfo, EngineStats, Event, ModelInfo, Request

# Deaths in a row, without a token in between, after which the engine is given up.
MAX_DEATHS = 5
# A process that lived this long starts a new row of deaths.
LONG_LIFE_SECONDS = 60.0
# Longest pause before another start.
MAX_BACKOFF_SECONDS = 5.0
# Most new tokens that a suspect has to make before it has passed.
MAX_TRIAL_TOKENS = 64
# Time after which a refused client may try again (Retry-After).
RETRY_SECONDS = 5.0
# Time that the process gets for an orderly end.
STOP_SECONDS = 10.0
# Looks at the flight record per watchdog period.
TICKS = 20


class AsyncEngine:
    """The implementation of ``interface.EngineClient``. All methods except ``start_process`` belong to the event loop
    of ``start``.

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
        self._recovering = False  # after a death: some requests may be suspects, or not submitted yet
        self._deaths = 0
        self._stuck = ""
        self._why_down = "not started"
        self._born = 0.0  # when the present process was ready
        self._failed = False  # the engine was given up
        self._deadline: float | None = None  # end of the drain
        self._stopped: asyncio.Future | None = None
        self._supervisor: asyncio.Task | None = None
        self._totals = Totals()
        self._adapters = Registry(self._journal)

    # ------------------------------------------------------------------------------------------------- start and stop

    def start_process(self) -> None:
        """Start the engine process without waiting for it; cheap, and needs no event loop.
        ``start`` does it otherwise."""
        if self._child is None:
            self._child = Child(self.config, self._factory)
            self._why_down = "starting"

    async def start(self) -> None:
        """Wait until requests can be served. Raises ConfigError when the engine cannot start."""
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
        """Refuse new requests, let the others finish for ``drain`` seconds (default: ``drain_timeout``), journal the
        rest and answer it with 503, end the process.

        A second call may shorten the drain; all calls return at the end.
        """
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
            log.warning("%d requests did not finish in time and are lost: no journal file is set", len(left))
            return
        try:
            log.warning("%d requests did not finish in time; they were written to %s", journal.write(path, left), path)
        except OSError as e:  # a full disk must not keep readers from their terminal reply
            log.error("%d unfinished requests could not be written to %s: %s", len(left), path, e)

    # -------------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Yield the request's events: ``accepted``, then tokens by branch, until the last branch has a
        ``finish_reason``.

        Raises RequestError for a refusal or a terminal error: 400 or 413 when the request cannot be sent, 409 for an id
        in use, 429 and 503 (with ``retry_after``) when there is no room, 500 (code "quarantined") when the request
        kills the engine. Closing the iterator cancels the request.
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
        messages.check(request)
        # Never stricter than the core.
        most = self.config.scheduler.max_num_seqs + self.config.scheduler.max_queued_requests
        if len(self._journal) >= most and sum(not entry.accepted for entry in self._journal) >= most:
            # In a burst between two steps the queue is full (429, as the core says); else the engine restarts or hangs.
            status, code = (429, "queue_full") if self._connected else (503, "overloaded")
            message = f"{most} requests wait for the engine already"
            raise RequestError(message, status=status, code=code, retry_after=RETRY_SECONDS)
        entry = self._journal.add(request)
        outbox = self._outboxes[entry.ticket] = Outbox()
        if entry.done:  # all branches of a resumed request had ended
            self._journal.remove(entry)
        elif self._connected:
            self._submit_next() if self._recovering else self._submit(entry)
        return entry, outbox

    def _close(self, entry: Entry) -> None:
        """Cancel a request that nobody reads any more. Its entry stays until the engine confirms the end, so that the
        id is not free too early: late events of this request must not reach another one."""
        self._outboxes.pop(entry.ticket, None)
        if self._journal.get(entry.id) is entry and not entry.closed:
            entry.closed = True
            self._cancel(entry, None)

    async def cancel(self, request_id: str, branch: int | None = None) -> bool:
        """End a request, or one branch, with ``finish_reason="cancelled"``.
        False when there is no such live request."""
        entry = self._journal.get(request_id)
        if entry is None or entry.closed or (branch is not None and branch not in entry.live_branches):
            return False
        self._cancel(entry, branch)
        return True

    async def cancel_many(self, targets: Iterable[tuple[str, int | None]]) -> None:
        """Cancel each of ``targets`` that is live, with one message to the engine process."""
        submitted = []
        for request_id, branch in targets:
            entry = self._journal.get(request_id)
            if (
                entry is not None
                and not entry.closed
                and (branch is None or branch in entry.live_branches)
                and self._mark(entry, branch)
            ):
                submitted.append((request_id, branch))
        if submitted:
            self._child.send(ipc.encode(messages.CancelMany(submitted)))

    def _cancel(self, entry: Entry, branch: int | None) -> None:
        if self._mark(entry, branch):
            self._child.send(ipc.encode(messages.Cancel(entry.id, branch)))

    def _mark(self, entry: Entry, branch: int | None) -> bool:
        """Note that a cancel was asked for. Returns whether the engine process must hear of it;
        else the end comes here."""
        entry.cancelled.update(entry.live_branches if branch is None else [branch])
        if not entry.submitted:
            self._end_cancelled(entry)
        return entry.submitted

    def _end_cancelled(self, entry: Entry) -> None:
        """End the cancelled branches of a request that no engine process holds."""
        identity = {"request_id": entry.id, "epoch": entry.request.epoch}
        if entry.cancelled and not entry.accepted:
            self._deliver(Event(kind="accepted", **identity))
        for branch in sorted(entry.cancelled.intersection(entry.live_branches)):
            index = len(entry.request.emitted[branch])
            self._deliver(Event(kind="tokens", branch=branch, index=index, finish_reason="cancelled", **identity))

    def _fail(self, entry: Entry, error: RequestError) -> None:
        """Send the terminal reply of a request that cannot go on."""
        outbox = self._outboxes.get(entry.ticket)
        if outbox is not None:
            outbox.put(messages.error_event(entry.request, error))
        if entry.submitted and self._connected:
            self._close(entry)
        else:
            self._outboxes.pop(entry.ticket, None)
            self._journal.remove(entry)

    def _deliver(self, event: Event) -> None:
        """Journal an event and hand its new part to the reader."""
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

    # ---------------------------------------------------------------------------------------------------- the process

    def _welcome(self, ready: messages.Ready) -> None:
        self._born = time.monotonic()
        self.info, self.startup = ready.info, ready.startup
        self._adapters.welcome(ready.info)
        self.config = self.config.replace(lora_modules=())  # the next process loads what is served then
        if ready.info.timed_attention:  # a second timing might choose another backend, and so other bits
            self.config = self.config.replace(attention_backend=ready.info.timed_attention)
        self._connected, self._stuck, self._why_down = True, "", ""

    async def _supervise(self) -> None:
        """Serve, and start another process whenever one ends."""
        try:
            while True:
                why = await self._serve(self._child)
                await self._bury(why)
                await self._revive()
        except ConfigError as e:
            await self._give_up(str(e))
        except Exception as e:  # a bug of ours, but readers must not wait for ever
            log.exception("the engine's supervisor failed")
            await self._give_up(f"internal error: {e!r}")

    async def _serve(self, child: Child) -> str:
        """Deliver the events of the process until it ends. Returns why it ended, or "" when we do not know."""
        watchdog = asyncio.create_task(self._watch(child), name="engine watchdog")
        try:
            for message in self._adapters.again():  # before any request that names one
                child.send(ipc.encode(message))
            self._submit_next()
            while (message := await child.receive()) is not None:
                if isinstance(message, messages.Events):
                    for event in sorted(message.events, key=_is_later):
                        self._deliver(event)
                    if self._recovering:
                        self._submit_next()
                elif isinstance(message, messages.AdapterNews):
                    self._adapters.news(message)
                elif isinstance(message, messages.Heartbeat):
                    self._totals.heartbeat(message.stats)
            return self._stuck
        except ipc.FrameError as e:
            return str(e)
        finally:
            watchdog.cancel()

    async def _watch(self, child: Child) -> None:
        """Kill a process whose progress counter stands still (the watchdog). It counts its own looks and not seconds,
        so that a pause of this process is not mistaken for one of the engine process."""
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
        log.error("the engine process made no progress for %g s; its stacks follow, then it is restarted", limit)
        child.dump_stacks()
        await asyncio.sleep(0.2)
        child.kill()

    async def _bury(self, why: str) -> None:
        """Clean up after the end of the process: blame the requests at work and take all requests back."""
        child, lived = self._child, time.monotonic() - self._born
        self._connected = False
        self._why_down = why or "restarting"
        self._adapters.process_ended()
        await child.reap(1.0)
        because = f" ({why})" if why else ""
        log.error("%s%s; %d requests wait for the next one", child.obituary(), because, len(self._journal))
        self._deaths = 1 if lived > LONG_LIFE_SECONDS and not self._stuck else self._deaths + 1
        self.num_restarts += 1
        self._recovering = True
        if self.num_restarts <= crash_dump.MAX_DUMPS:
            crash_dump.keep(child, why, self._journal, self._totals.now(), self.config)
        self._totals.process_ended()
        self._blame(child)
        for entry in self._journal:
            self._rewind(entry)

    def _blame(self, child: Child) -> None:
        # A kill from outside is weak evidence: it counts as half a strike, which does not make a suspect.
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
            "request %s is quarantined: the engine died %d times while working on it (%d prompt tokens, "
            "%s output tokens, n=%d, temperature=%g, grammar=%s)",
            entry.id,
            round(entry.crashes),
            len(entry.request.prompt_ids),
            [len(tokens) for tokens in entry.request.emitted],
            params.n,
            params.temperature,
            params.grammar and params.grammar.kind,
        )
        self.num_quarantined += 1
        self._deaths = 0  # without this request the next process may live
        self._fail(entry, RequestError("this request made the engine fail repeatedly", status=500, code="quarantined"))

    async def _revive(self) -> None:
        """Start processes until one is ready. Raises ConfigError after ``MAX_DEATHS`` deaths in a row."""
        while True:
            if self._deaths >= MAX_DEATHS:
                raise ConfigError(
                    f"the engine process died {self._deaths} times in a row. The last time, {self._child.obituary()}"
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

    def _submit_next(self) -> None:
        """Submit the next suspect, alone in the engine; when none is left, all requests that are not submitted."""
        for entry in self._journal:
            # The trial grows with each crash, so that a request that kills the engine only sometimes is caught, too.
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
                if entry.submitted:  # it has passed, and goes on when all suspects have
                    self._child.send(ipc.encode(messages.Cancel(entry.id)))
                    self._rewind(entry)
            self._submit(suspects[0])

    def _rewind(self, entry: Entry) -> None:
        """Take a request back from the engine and end the branches that were cancelled meanwhile."""
        entry.rewind()
        self._end_cancelled(entry)

    # ----------------------------------------------------------------------------------------------------------- state

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Serve an adapter as ``name``, also after a restart of the process. Raises RequestError."""
        return await self._adapters.load(name, path, self._teller())

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests of an adapter, wait for those in progress, and forget it. Raises RequestError."""
        await self._adapters.unload(name, self._teller())

    def _teller(self) -> Callable[[object], None]:
        """A function that sends a message to the process. Raises RequestError where none may be sent."""
        if self._deadline is not None or not self._connected:
            raise self._engine_down() if self._deadline is None else self._shutting_down()
        return lambda message: self._child.send(ipc.encode(message))

    def health(self) -> Health:
        """State of the engine: ``ready`` while its process makes progress, ``live`` until the engine is given up."""
        draining = self._deadline is not None
        return Health(
            live=not self._failed,
            ready=self._connected and not draining,
            reason=self._why_down or ("draining" if draining else ""),
        )

    def stats(self) -> EngineStats:
        """Statistics at the engine's latest heartbeat, plus restarts and the requests that are not submitted."""
        stats = self._totals.now()
        unsubmitted = sum(len(entry.live_branches) for entry in self._journal if not entry.submitted)
        own = {"startup": self.startup, "restarts": self.num_restarts, "quarantined": self.num_quarantined}
        return dataclasses.replace(stats, num_waiting=stats.num_waiting + unsubmitted, **own)


def _is_later(event: Event) -> bool:
    """Sort key: first tokens are delivered before the next tokens of streams that run already."""
    return event.index > 0 or event.kind == "error"
