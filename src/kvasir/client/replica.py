"""One replica of the engine: its process is started, fed, watched, and replaced when it dies or hangs.

A replica knows no request. It sends frames, and tells its front what happens: a process is ready, these events came,
the process died, no other one will come. The front (``front.Front``) holds the journal, and so decides what a
death means for the requests. This module never imports torch.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvasir.client import crash_dump, ipc, messages
from kvasir.client.adapters import Registry
from kvasir.client.child import Child, ChildError
from kvasir.client.journal import Entry
from kvasir.client.totals import Totals
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.types import Event, Load, ModelInfo

# Deaths in a row, without a token in between, after which the replica is given up.
MAX_DEATHS = 5
# A process that lived this long starts a new row of deaths.
LONG_LIFE_SECONDS = 60.0
# Longest pause before another start.
MAX_BACKOFF_SECONDS = 5.0
# Time that the process gets for an orderly end.
STOP_SECONDS = 10.0
# Looks at the flight record per watchdog period.
TICKS = 20


class Listener(Protocol):
    """The side of the front that a replica reports to. No method blocks."""

    def hello(self, replica: Replica, info: ModelInfo) -> None:
        """Check the facts of a process that is ready. Raises ConfigError to refuse it for good."""

    def ready(self, replica: Replica) -> None:
        """Send what the process should work on; it holds nothing yet."""

    def events(self, replica: Replica, events: list[Event]) -> None:
        """Take all events of one step, in order."""

    def pages(self, replica: Replica, news: messages.PageNews) -> None:
        """Take what has changed in the prefix index of the process."""

    def told_until(self, replica: Replica, number: int) -> None:
        """Check that all page news up to ``number`` have come."""

    def died(self, replica: Replica, child: Child, why: str) -> None:
        """Take back the requests of a process that ended. ``why``: "" when only ``child`` knows."""

    def gave_up(self, replica: Replica) -> None:
        """Go on without the replica, for good: ``replica.why_down`` says why."""


class Replica:
    """A supervised engine process, which is another one after each death. All methods except ``start_process`` belong
    to one event loop.

    ``number``: names the replica in the journal and in the log. ``factory``: "module:callable" that builds the core
    from an EngineConfig, inside the process. ``connected``: messages reach a process that is ready. ``failed``: it was
    given up. ``drained``: an operator has ended the process. ``deaths``: in a row, without a token in between, which
    the front resets. ``num_restarts`` counts since ``start``. ``startup``: seconds by phase of the latest
    start. ``load``: the latest report of the process; ``submits``: requests sent to it, of which the report
    knows the first ``reported``. ``environment``: what the process finds in its environment. ``prefix_key``:
    of the prefix index; empty: it is the only replica, and does not report. ``start``: starts a process, here or on
    another host.
    """

    info: ModelInfo

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        factory: str,
        listener: Listener,
        adapters: Registry,
        environment: dict[str, str] | None = None,
        prefix_key: bytes = b"",
        start: Callable[..., Child] = Child,
    ) -> None:
        self.number, self.config, self.adapters = number, config, adapters
        self.child: Child | None = None
        self.connected = self.failed = self.drained = False
        self.why_down = "not started"
        self.deaths = self.num_restarts = 0
        self.startup: dict[str, float] = {}
        self.totals = Totals()
        self.load, self.reported, self.submits = Load(), 0, 0
        self._listener = listener
        self._start = functools.partial(
            start, factory=factory, environment=environment, prefix_key=prefix_key, rank=number
        )
        self._stuck = ""
        self._born = 0.0  # when the present process was ready
        self._supervisor: asyncio.Task | None = None

    # ------------------------------------------------------------------------------------------------- start and stop

    def start_process(self) -> None:
        """Start the process without waiting for it; cheap, and needs no event loop. ``start`` does it otherwise."""
        if self.child is None:
            self.child = self._start(self.config)
            self.why_down = "starting"

    async def start(self) -> None:
        """Wait until the process is ready. Raises ConfigError when it cannot start."""
        self.start_process()
        try:
            self._welcome(await self.child.ready(self.config.service.startup_timeout))
        except BaseException as e:
            await self.child.reap(0.0)
            self.connected, self.why_down = False, f"the start failed: {e}"
            if isinstance(e, ChildError):
                raise ConfigError(f"the engine could not start: {e}") from e
            raise

    async def start_again(self, **changes: Any) -> None:
        """End a process that nobody has sent a request to, and wait for one with other settings. Raises ConfigError."""
        await self.end(True)
        self.connected, self.child, self.config = False, None, self.config.replace(**changes)
        await self.start()

    @property
    def out(self) -> bool:
        """Whether no process will come by itself: the replica was given up or drained."""
        return self.failed or self.drained

    async def drain(self, orderly: bool) -> None:
        """End the process, in order where it listens; the front has taken its requests back and no longer sees it as
        connected. ``resume`` starts another one."""
        self.drained = True
        await self.leave()
        self.adapters.process_ended()
        await self.end(orderly)
        self.why_down = "drained"
        self.totals.process_ended()

    def resume(self) -> None:
        """Start another process after ``drain`` or the last failure, and serve with it."""
        self.child, self.deaths, self.failed, self.drained, self.why_down = None, 0, False, False, "starting"
        self.supervise()

    def supervise(self) -> None:
        """Serve from now on, and replace the process whenever it ends."""
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervisor of replica {self.number}")

    async def leave(self) -> bool:
        """Take no more events and send no more messages. Returns whether the process can still end in order."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        orderly, self.connected = self.connected, False
        return orderly

    async def end(self, orderly: bool) -> None:
        """End the process: with ``Stop`` where it listens, else at once."""
        if self.child is not None:
            if orderly:
                self.child.send(ipc.encode(messages.Stop()))
            await self.child.reap(STOP_SECONDS if orderly else 0.0)
        self.why_down = "stopped"

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, message: Any) -> None:
        """Queue a message for the process. Raises FrameError for one that is too long."""
        self.child.send(ipc.encode(message))

    def blamed(self, child: Child, entries: Iterable[Entry]) -> list[Entry]:
        """The requests among ``entries`` that the process which just died was working on."""
        return [
            entry
            for entry in entries
            if (entry.holder == self.number if child.at_work is None else entry.ticket in child.at_work)
        ]

    # ---------------------------------------------------------------------------------------------------- the process

    def _welcome(self, ready: messages.Ready) -> None:
        self._listener.hello(self, ready.info)
        self._born = time.monotonic()
        self.load, self.reported, self.submits = Load(), 0, 0
        self.info, self.startup = ready.info, ready.startup
        self.adapters.welcome(ready.info)
        self.config = self.config.replace(lora_modules=())  # the next process loads what is served then
        self.config = self.config.replace(**ready.info.timed)
        self.connected, self._stuck, self.why_down = True, "", ""

    async def _supervise(self) -> None:
        """Serve, and start another process whenever one ends."""
        try:
            while True:
                if self.child is not None:
                    why = await self._serve(self.child)
                    await self._bury(why)
                await self._revive()
        except ConfigError as e:
            await self._give_up(str(e))
        except Exception as e:  # a bug of ours, but readers must not wait for ever
            log.exception("the supervisor of replica %d failed", self.number)
            await self._give_up(f"internal error: {e!r}")

    async def _serve(self, child: Child) -> str:
        """Pass on the events of the process until it ends. Returns why it ended, or "" when we do not know."""
        watchdog = asyncio.create_task(self._watch(child), name=f"watchdog of replica {self.number}")
        try:
            for message in self.adapters.again():  # before any request that names one
                self.send(message)
            self._listener.ready(self)
            while (message := await child.receive()) is not None:
                if isinstance(message, messages.Events):
                    self._listener.events(self, message.events)
                elif isinstance(message, messages.AdapterNews):
                    self.adapters.news(message)
                elif isinstance(message, messages.Heartbeat):
                    self.totals.heartbeat(message.stats)
                    if message.load is not None:
                        self.load, self.reported = message.load, message.submits
                        self._listener.told_until(self, message.page_news)
                elif isinstance(message, messages.PageNews):
                    self._listener.pages(self, message)
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
        self._stuck = self.why_down = f"no progress for {limit:g} s"
        self.connected = False
        log.error("the engine process made no progress for %g s; its stacks follow, then it is restarted", limit)
        child.dump_stacks()
        await asyncio.sleep(0.2)
        child.kill()

    async def _bury(self, why: str) -> None:
        """Clean up after the end of the process, and tell the front."""
        child, lived = self.child, time.monotonic() - self._born
        self.connected = False
        self.why_down = why or "restarting"
        self.adapters.process_ended()
        await child.reap(1.0)
        self.deaths = 1 if lived > LONG_LIFE_SECONDS and not self._stuck else self.deaths + 1
        self.num_restarts += 1
        self._listener.died(self, child, why)
        self.totals.process_ended()

    def dump(self, child: Child, why: str, entries: Iterable[Entry]) -> None:
        """Write a crash dump, unless there are enough of this replica. Called before the requests are taken back."""
        if self.num_restarts <= crash_dump.MAX_DUMPS:
            crash_dump.keep(child, why, entries, self.totals.now(), self.config)

    async def _revive(self) -> None:
        """Start processes until one is ready. Raises ConfigError after ``MAX_DEATHS`` deaths in a row."""
        while True:
            if self.deaths >= MAX_DEATHS:
                raise ConfigError(
                    f"the engine process died {self.deaths} times in a row. The last time, {self.child.obituary()}"
                )
            if self.deaths > 1:
                await asyncio.sleep(min(MAX_BACKOFF_SECONDS, 0.1 * 2**self.deaths))
            try:
                self.child = self._start(self.config)
                self._welcome(await self.child.ready(self.config.service.startup_timeout))
                return
            except (ChildError, OSError) as e:
                log.error("the engine could not restart: %s", e)
                self.deaths += 1
                await self.child.reap(0.0)

    async def _give_up(self, why: str) -> None:
        self.connected, self.failed, self.why_down = False, True, why
        log.error("the engine is down: %s", why)
        self._listener.gave_up(self)
        if self.child is not None:
            await self.child.reap(0.0)
