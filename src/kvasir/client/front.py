"""The front of the engine: it keeps the only journal, hands each request to a replica, and delivers what comes back.

Requests go in and events come out. Every request is journalled until its last event. When the process of a replica
ends, its requests go on elsewhere, or in the next process, with the tokens already delivered. Readers see a pause, but
no gap and no duplicate. This module never imports torch.

The requests that a process was working on are to blame for its death. They are *suspects*: the replica that died tries
them, one at a time, while the other replicas serve everybody else. No other replica tries them, so that a request takes
down one replica at most; a suspect whose replica is given up or drained fails. A suspect that makes new tokens has
passed. One that is at work when a process dies for the ``max_crashes_per_request``-th time is *quarantined*: it alone
fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from kvasir.client import ipc, journal, messages
from kvasir.client.adapters import Registry
from kvasir.client.child import Child
from kvasir.client.interface import Health
from kvasir.client.journal import Entry, Journal
from kvasir.client.outbox import Outbox
from kvasir.client.replica import Replica
from kvasir.client.totals import together
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from kvasir.logs import log
from kvasir.types import EngineStats, Event, ModelInfo, Request

# Most new tokens that a suspect has to make before it has passed.
MAX_TRIAL_TOKENS = 64
# Time after which a refused client may try again (Retry-After).
RETRY_SECONDS = 5.0


class Front:
    """All of ``interface.EngineClient`` except for adapters, over one replica or several. All methods except
    ``start_process`` belong to the event loop of ``start``.

    ``configs``: one for each replica. ``environments``: what each finds in its environment. ``starts``: how a process
    of each starts. ``prefix_key``: keys the prefix index of each; empty: there is one replica, which need not report
    its load or prove its weights.
    ``factory``: "module:callable" that builds the core from an EngineConfig, inside the engine process.
    ``num_restarts`` and ``num_quarantined`` count since ``start``.
    """

    info: ModelInfo

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        factory: str,
        environments: Sequence[dict[str, str]] | None = None,
        prefix_key: bytes = b"",
        starts: Sequence[Callable[..., Child]] | None = None,
    ) -> None:
        self.config = configs[0]
        self.num_quarantined = 0
        self._journal = Journal()
        self.replicas = [
            Replica(number, config, factory, self, Registry(self._journal), environment, prefix_key, start)
            for number, (config, environment, start) in enumerate(
                zip(configs, environments or [{}] * len(configs), starts or [Child] * len(configs))
            )
        ]
        self._outboxes: dict[int, Outbox] = {}  # by ticket
        self._recovering = False  # after a death: some requests may be suspects, or not held by a replica yet
        self._trial: Replica | None = None  # the replica that tries suspects, and serves nobody else meanwhile
        self._deadline: float | None = None  # end of the drain
        self._started = False
        self._stopped: asyncio.Future | None = None

    @property
    def num_restarts(self) -> int:
        """Restarts of all replicas."""
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def startup(self) -> dict[str, float]:
        """Seconds by phase of the latest start of the first replica."""
        return self.replicas[0].startup

    # ------------------------------------------------------------------------------------------------- start and stop

    def start_process(self) -> None:
        """Start the engine processes without waiting for them; cheap, and needs no event loop.
        ``start`` does it otherwise."""
        for replica in self.replicas:
            replica.start_process()

    async def start(self) -> None:
        """Wait until requests can be served. Raises ConfigError when a replica cannot start."""
        assert not self._started, "start() was called twice"
        self.start_process()
        starts = [asyncio.ensure_future(replica.start()) for replica in self.replicas]
        try:
            await asyncio.gather(*starts)
            await self.agree()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for replica in self.replicas:
                if replica.connected:
                    await replica.end(await replica.leave())
            raise
        self._started = True
        for replica in self.replicas:
            replica.supervise()

    async def stop(self, drain: float | None = None) -> None:
        """Refuse new requests, let the others finish for ``drain`` seconds (default: ``drain_timeout``), journal the
        rest and answer it with 503, end the processes.

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
        orderly = [await replica.leave() for replica in self.replicas]
        self._write_journal()
        for entry in self._journal:
            self._fail(entry, self._shutting_down())
        await asyncio.gather(*(replica.end(well) for replica, well in zip(self.replicas, orderly)))

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
        if all(replica.out for replica in self.replicas):
            raise self._engine_down()
        if not self._started:
            raise RequestError("the engine is not started", status=503, code="not_started", retry_after=RETRY_SECONDS)
        messages.check(request)
        # Never stricter than the cores.
        scheduler = self.config.scheduler
        most = len(self.replicas) * (scheduler.max_num_seqs + scheduler.max_queued_requests)
        if len(self._journal) >= most and sum(not entry.accepted for entry in self._journal) >= most:
            # In a burst between two steps the queue is full (429, as the core says); else the engine restarts or hangs.
            status, code = (429, "queue_full") if self._connected() else (503, "overloaded")
            message = f"{most} requests wait for the engine already"
            raise RequestError(message, status=status, code=code, retry_after=RETRY_SECONDS)
        entry = self._journal.add(request)
        outbox = self._outboxes[entry.ticket] = Outbox()
        if entry.done:  # all branches of a resumed request had ended
            self._journal.remove(entry)
        elif self._connected():
            self._submit_next() if self._recovering else self._place(entry)
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
        """Cancel each of ``targets`` that is live, with one message to each replica that holds some."""
        held: dict[int, list[tuple[str, int | None]]] = {}  # by the number of the replica
        for request_id, branch in targets:
            entry = self._journal.get(request_id)
            if (
                entry is not None
                and not entry.closed
                and (branch is None or branch in entry.live_branches)
                and self._mark(entry, branch)
            ):
                held.setdefault(entry.holder, []).append((request_id, branch))
        for number, theirs in held.items():
            self.replicas[number].send(messages.CancelMany(theirs))

    def _cancel(self, entry: Entry, branch: int | None) -> None:
        if self._mark(entry, branch):
            self.replicas[entry.holder].send(messages.Cancel(entry.id, branch))

    def _mark(self, entry: Entry, branch: int | None) -> bool:
        """Note that a cancel was asked for. Returns whether a replica must hear of it;
        else the end comes here."""
        entry.cancelled.update(entry.live_branches if branch is None else [branch])
        if entry.holder is None:
            self._end_cancelled(entry)
        return entry.holder is not None

    def _end_cancelled(self, entry: Entry) -> None:
        """End the cancelled branches of a request that no replica holds."""
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
        if entry.holder is not None and self.replicas[entry.holder].connected:
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
            if news.token_ids and entry.holder is not None:
                self.replicas[entry.holder].deaths = 0
            outbox.put(news)
        if entry.done:
            self._journal.remove(entry)
            self.finished(entry)

    def finished(self, entry: Entry) -> None:
        """Note that a request has ended, and where. By default nothing is noted."""

    # ----------------------------------------------------------------------------------------------------- the replicas

    def hello(self, replica: Replica, info: ModelInfo) -> None:
        """Take the facts of a process that is ready."""
        self.info = info

    async def agree(self) -> None:
        """Make replicas that are ready for the first time alike, where they have chosen something themselves."""

    def ready(self, replica: Replica) -> None:
        """Submit what waits for a replica."""
        self._submit_next()

    def events(self, replica: Replica, events: list[Event]) -> None:
        """Deliver the events of one step of a replica."""
        for event in sorted(events, key=_is_later):
            self._deliver(event)
        if self._recovering:
            self._submit_next()

    def pages(self, replica: Replica, news: messages.PageNews) -> None:
        """Take what has changed in a replica's prefix index. By default nobody asks."""

    def told_until(self, replica: Replica, number: int) -> None:
        """Check that all page news of a replica up to ``number`` have come. By default nobody asks."""

    def died(self, replica: Replica, child: Child, why: str) -> None:
        """Blame the requests at work for the end of a process, and take all its requests back."""
        theirs = [entry for entry in self._journal if entry.holder in (None, replica.number)]
        because = f" ({why})" if why else ""
        name = f"replica {replica.number}: " if len(self.replicas) > 1 else ""
        log.error("%s%s%s; %d requests wait for the next one", name, child.obituary(), because, len(theirs))
        self._recovering = True
        replica.dump(child, why, theirs)
        # A kill from outside is weak evidence: it counts as half a strike, which does not make a suspect.
        weight = 0.5 if child.ended_from_outside else 1.0
        for entry in replica.blamed(child, theirs):
            entry.crashes += weight
            entry.strikes += weight
            entry.blamed_in = replica.number
            if entry.strikes >= self.config.service.max_crashes_per_request:
                replica.deaths = 0  # without this request the next process may live
                self._quarantine(entry)
        for entry in theirs:
            self._rewind(entry)
        self._submit_next()

    def gave_up(self, replica: Replica) -> None:
        """Go on with the other replicas; without one, every request fails."""
        if all(other.out for other in self.replicas):
            for entry in self._journal:
                self._fail(entry, self._engine_down())
            return
        self._leave_to_others(replica)

    def _leave_to_others(self, replica: Replica) -> None:
        """Let the requests of a replica that is no longer connected go on in the others. Its suspects fail, because
        they may take down the next one."""
        self._recovering = True
        for entry in list(self._journal):
            if entry.holder == replica.number:
                self._rewind(entry)
            if entry.strikes >= 1 and entry.blamed_in == replica.number and not entry.done:
                log.error("request %s fails: it may have crashed replica %d, which is gone", entry.id, replica.number)
                self._fail(entry, _suspected(replica))
        self._submit_next()

    def _num_held(self, replica: Replica) -> int:
        return sum(entry.holder == replica.number for entry in self._journal)

    def _connected(self) -> bool:
        return any(replica.connected for replica in self.replicas)

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
        self._fail(entry, RequestError("this request made the engine fail repeatedly", status=500, code="quarantined"))

    # ------------------------------------------------------------------------------------------------------ submitting

    def choose(self, request: Request, ready: list[Replica]) -> Replica:
        """The replica that gets a request: one of ``ready``, which is not empty."""
        return ready[0]

    def _place(self, entry: Entry) -> None:
        """Submit a request to one of the replicas that can take it; without one, it waits."""
        ready = [replica for replica in self.replicas if replica.connected and replica is not self._trial]
        if ready:
            self._submit(entry, self.choose(entry.request, ready))

    def _submit(self, entry: Entry, replica: Replica) -> None:
        age = time.monotonic() - entry.request.arrival
        try:
            replica.send(messages.Submit(entry.ticket, entry.request, age))
        except ipc.FrameError as e:
            self._fail(
                entry,
                RequestError(f"the request outgrew what the engine can be sent: {e}", status=500, code="too_long"),
            )
            return
        entry.holder = replica.number
        replica.submits += 1

    def _submit_next(self) -> None:
        """Submit the next suspect, alone in the replica that it may have crashed, and to the other replicas all other
        requests that nobody holds. One replica at a time tries its suspects."""
        for entry in self._journal:
            # The trial grows with each crash, so that a request that kills the engine only sometimes is caught, too.
            if entry.holder is not None and entry.fresh >= min(MAX_TRIAL_TOKENS, 2 ** max(0, int(entry.crashes) - 1)):
                entry.strikes = 0.0
        suspects = sorted((entry for entry in self._journal if entry.strikes >= 1), key=lambda entry: -entry.strikes)
        if self._trial is None or all(entry.blamed_in != self._trial.number for entry in suspects):
            self._trial = self.replicas[suspects[0].blamed_in] if suspects else None
        theirs = [entry for entry in suspects if self._trial is not None and entry.blamed_in == self._trial.number]
        if self._trial is not None and self._trial.connected and all(entry.holder is None for entry in theirs):
            self._take_back(self._trial)  # what it holds has passed, and goes on elsewhere or when all have
            self._submit(theirs[0], self._trial)
        for entry in self._journal:
            if entry.holder is None and entry.strikes < 1:
                self._place(entry)
        self._recovering = any(entry.strikes or entry.holder is None for entry in self._journal)

    def _take_back(self, replica: Replica) -> None:
        """Take all requests back from a replica that lives; nobody holds them then."""
        for entry in self._journal:
            if entry.holder == replica.number:
                replica.send(messages.Cancel(entry.id))
                self._rewind(entry)

    def _rewind(self, entry: Entry) -> None:
        """Take a request back from its replica and end the branches that were cancelled meanwhile."""
        entry.rewind()
        self._end_cancelled(entry)

    # ----------------------------------------------------------------------------------------------------------- state

    def health(self) -> Health:
        """State of the engine: ``ready`` while a replica makes progress, ``live`` until all were given up."""
        draining = self._deadline is not None
        down = [replica for replica in self.replicas if replica.why_down]
        alone = len(self.replicas) == 1
        reasons = [replica.why_down if alone else f"replica {replica.number}: {replica.why_down}" for replica in down]
        return Health(
            live=not all(replica.out for replica in self.replicas),
            ready=self._connected() and not draining,
            reason="; ".join(reasons) or ("draining" if draining else ""),
        )

    def stats(self) -> EngineStats:
        """Statistics at the latest heartbeats, plus restarts and the requests that no replica holds."""
        stats = together([replica.totals.now() for replica in self.replicas])
        unheld = sum(len(entry.live_branches) for entry in self._journal if entry.holder is None)
        own = {"startup": self.startup, "restarts": self.num_restarts, "quarantined": self.num_quarantined}
        return dataclasses.replace(stats, num_waiting=stats.num_waiting + unheld, **own)


def _suspected(replica: Replica) -> RequestError:
    return RequestError(
        f"the request may have crashed replica {replica.number}, which does not come back; no other one tries it",
        status=503,
        code="suspected",
    )


def _is_later(event: Event) -> bool:
    """Sort key: first tokens are delivered before the next tokens of streams that run already."""
    return event.index > 0 or event.kind == "error"
