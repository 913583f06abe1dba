"""The engine process: ``python -m kvasir.client.engine_process --socket PATH``, started and watched by the client.

It reads its configuration from standard input, connects, builds the engine, sends ``Ready`` and then loops: take
messages, run a step, send the step's events. A reader thread takes messages off the socket, so that a long step delays
no receipt and the process ends at once when its client does. It ignores SIGTERM and SIGINT: the client decides when it
stops.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvasir import logs
from kvasir.client import ipc, kv_events, messages
from kvasir.client.interface import EngineCore, PageLog
from kvasir.client.pieces import Pieces
from kvasir.errors import ConfigError, RequestError, of_a_file
from kvasir.logs import log
from kvasir.types import AdapterInfo, Event, Plan, Request

ENGINE = "kvasir.engine.engine:start"
# File name of the flight record, in the folder of the socket.
FLIGHT = "flight"
# Longest time between two heartbeats (statistics sent to the client).
HEARTBEAT_SECONDS = 0.25
# The same where a router looks at the load that they report.
REPORT_SECONDS = 0.1
# Pause between two looks at a core that has requests but cannot run any of them yet.
BLOCKED_POLL_SECONDS = 0.005
# New objects between two collections of Python's youngest generation.
YOUNG_OBJECTS = 10_000
# Exit codes EX_SOFTWARE and EX_CONFIG of sysexits.h.
CRASHED, REFUSED = 70, 78


class Loop:
    """The step loop around one core. ``beat_seconds``: longest sleep without an update of the flight record.
    ``reports``: heartbeats tell the load, and the client is told what changes in the prefix index. ``pages``: its log.
    ``publisher``: tells others."""

    def __init__(
        self,
        core: EngineCore,
        channel: ipc.BlockingChannel,
        inbox: queue.SimpleQueue,
        flight: ipc.Flight,
        beat_seconds: float,
        reports: bool = False,
        pages: PageLog | None = None,
        publisher: kv_events.Publisher | None = None,
    ) -> None:
        self._core, self._channel, self._inbox, self._flight = core, channel, inbox, flight
        self._beat_seconds = min(beat_seconds, HEARTBEAT_SECONDS if pages is None else REPORT_SECONDS)
        self._reports, self._submits = reports, 0
        self._pages, self._page_news, self._publisher = pages, 0, publisher
        self._tickets: dict[str, int] = {}  # request id -> ticket, while the core holds the request
        self._branches: dict[str, int] = {}  # request id -> branches that have not ended
        self._pieces = Pieces()
        self._last_step = core.stats().step
        self._next_heartbeat = 0.0
        core.on_launch = self._on_launch

    def run(self) -> None:
        """Serve until ``Stop`` comes. Exceptions of the core pass through: no request can be served after one."""
        wait = 0.0
        while self._take(wait):
            moved = True
            if self._core.has_work():
                self._flight.busy()
                events = self._core.step()
                self._flight.idle()
                moved = self._moved(events)
                self._send(events)
                wait = 0.0 if moved else BLOCKED_POLL_SECONDS
            elif self._core.idle():
                wait = 0.0
            else:
                wait = min(BLOCKED_POLL_SECONDS, self._beat_seconds) if self._tickets else self._beat_seconds
            if (desk := self._core.adapters) is not None and desk.busy:
                wait = min(wait, BLOCKED_POLL_SECONDS)
                for name, result in desk.loaded():
                    self._channel.send(ipc.encode(_news(name, result)))
            if moved or self._waits():
                self._flight.beat()
            self._heartbeat()

    def _moved(self, events: list[Event]) -> bool:
        """Whether the step did anything. A core that has work but does none is stuck, and the client must see that."""
        step = self._core.stats().step if not events else self._last_step
        moved = bool(events) or step != self._last_step
        self._last_step = step
        if moved:
            self._flight.stepped()
        return moved

    def _waits(self) -> bool:
        """Whether every request is blocked until a time limit of its own (``grammar_timeout``), which may be longer
        than the watchdog's."""
        stats = self._core.stats()
        return stats.num_blocked > 0 and not stats.num_running and not stats.num_waiting

    def _take(self, wait: float) -> bool:
        """Handle every message that has come, waiting up to ``wait`` seconds for the first.
        Returns False after ``Stop``."""
        try:
            message = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            while True:
                if isinstance(message, messages.Stop):
                    return False
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Submit):
            request = message.request
            self._flight.launch([message.ticket])
            self._tickets[request.id] = message.ticket
            self._branches[request.id] = request.params.n - len(set(request.ended))
            self._pieces.open(request)
            self._submits += 1
            events = self._submit(request)
        elif isinstance(message, messages.LoadAdapter | messages.UnloadAdapter):
            self._flight.launch([])
            self._adapt(message)
            events = []
        elif isinstance(message, messages.Forget):
            self._flight.launch(self._tickets.values())
            self._submits = 0
            events = [event for request_id in list(self._tickets) for event in self._core.cancel(request_id)]
        elif isinstance(message, messages.TellPages):
            self._flight.launch([])
            self._tell_pages(whole=True)
            events = []
        else:
            targets = (
                message.targets if isinstance(message, messages.CancelMany) else [(message.request_id, message.branch)]
            )
            self._flight.launch([self._tickets.get(request_id, 0) for request_id, _ in targets])
            events = [event for target in targets for event in self._core.cancel(*target)]
        self._flight.idle()
        self._send(events)

    def _adapt(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        """Load or unload an adapter, and say how it ended unless it is read in the background."""
        desk = self._core.adapters
        result: AdapterInfo | Exception | None = None
        try:
            if desk is None:
                raise RequestError("adapters are served with --enable-lora only", code="no_adapters")
            if isinstance(message, messages.UnloadAdapter):
                desk.unload(message.name)
            elif message.again:
                result = desk.load(message.name, message.path)
            else:
                return desk.start_loading(message.name, message.path)
        except (ConfigError, RequestError) as error:
            result = error
        self._channel.send(ipc.encode(_news(message.name, result)))

    def _submit(self, request: Request) -> list[Event]:
        try:
            return self._core.submit(request)
        except RequestError as e:
            return [messages.error_event(request, e)]

    def _on_launch(self, request_ids: Iterable[str], slow: bool, plan: Plan) -> None:
        tickets = self._tickets
        self._flight.launch([tickets.get(request_id, 0) for request_id in request_ids], slow)
        spans = [(tickets.get(s.seq.request.id, 0), s.start, s.length) for s in plan.spans]
        self._flight.record(plan.step, plan.num_rows, spans, slow)

    def _send(self, events: list[Event]) -> None:
        # Found before ``Pieces`` joins events.
        ended = [event for event in events if event.kind == "error" or event.finish_reason is not None]
        ready = self._pieces.ready(events)
        if ended:
            self._tell_pages()  # the client stops guessing what a request has cached when it ends
        if ready:
            try:
                self._channel.send(ipc.encode(messages.Events(ready)))
            except (ipc.FrameError, TypeError, ValueError, OverflowError):
                self._send_singly(ready)
        for event in ended:
            self._note_end(event)

    def _send_singly(self, events: list[Event]) -> None:
        """Send one event a frame, when the batch is too long or cannot be encoded:
        only the request at fault may fail."""
        lost: set[str] = set()
        for event in events:
            if event.request_id in lost:
                continue
            try:
                frame = ipc.encode(messages.Events([event]))
            except (ipc.FrameError, TypeError, ValueError, OverflowError) as e:
                lost.add(event.request_id)
                error = Event(
                    kind="error",
                    request_id=event.request_id,
                    epoch=event.epoch,
                    status=500,
                    code="reply_not_sendable",
                    message=f"the engine's reply cannot be sent: {e}",
                )
                frame = ipc.encode(messages.Events([error]))
            self._channel.send(frame)
        for request_id in lost:
            self._core.cancel(request_id)
            self._forget(request_id)

    def _note_end(self, event: Event) -> None:
        if event.request_id not in self._branches:
            return
        self._branches[event.request_id] -= 1
        if event.kind == "error" or self._branches[event.request_id] <= 0:
            self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        self._tickets.pop(request_id, None)
        self._branches.pop(request_id, None)
        self._pieces.close(request_id)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._beat_seconds
            self._tell_pages()
            load = self._core.load() if self._reports else None
            beat = messages.Heartbeat(self._core.stats(), load, self._submits, self._page_news)
            self._channel.send(ipc.encode(beat))

    def _tell_pages(self, whole: bool = False) -> None:
        """Send what has changed in the prefix index, or all that is in it."""
        if self._pages is None:
            return
        changes = self._pages.take()
        if self._publisher is not None:
            self._publisher.publish(self._pages, changes)
        whole = whole or changes.cleared
        if self._reports and (whole or changes):
            self._page_news += 1
            stored = [page.key for page in (self._pages.held() if whole else changes.stored)]
            news = messages.PageNews(self._page_news, stored, [] if whole else changes.evicted, whole)
            self._channel.send(ipc.encode(news))


def _news(name: str, result: AdapterInfo | Exception | None) -> messages.AdapterNews:
    """The message that tells how loading or unloading an adapter ended."""
    if isinstance(result, RequestError):
        return messages.AdapterNews(name, None, result.status, result.message, result.code)
    if isinstance(result, Exception):
        if not isinstance(result, ConfigError):
            log.error("adapter %s cannot be loaded", name, exc_info=result)
        return messages.AdapterNews(name, None, 400, str(result), "adapter_not_served")
    return messages.AdapterNews(name, result)


def _read_forever(channel: ipc.BlockingChannel, inbox: queue.SimpleQueue, folder: Path) -> None:
    """Run the reader thread. Without its client nobody can use this process, so it removes its folder and ends."""
    code = 0
    try:
        while (message := channel.receive()) is not None:
            if isinstance(message, messages.Submit):
                message.request.arrival = time.monotonic() - message.age
            inbox.put(message)
    except ipc.FrameError as e:
        log.error("engine process: %s", e)
        code = CRASHED
    _remove(folder)
    os._exit(code)


def _remove(folder: Path) -> None:
    for name in ("socket", FLIGHT):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def collect_rarely() -> None:
    """Keep Python's garbage collector out of the step loop.

    Objects made by start-up stay alive, so no collection needs to visit them again. A step makes thousands of objects
    that their reference counts free by the next step; with Python's default of 700 new objects between two collections,
    every step would visit them several times.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _factory(name: str) -> Callable[[Any], EngineCore]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _build(hello: messages.Hello, factory: str, started: float) -> tuple[EngineCore, dict[str, Any], dict[str, float]]:
    """Build the core; return it, what ``Loop`` does for a cluster, and the seconds of each start-up phase. Raises
    ConfigError."""
    gc.set_threshold(YOUNG_OBJECTS)  # objects made by a start stay alive, and would be visited half a dozen times
    build = _factory(factory)
    imported = time.monotonic()
    config = hello.config
    if config.runner.num_threads is None:
        # The HTTP process needs a core: compute threads that spin on all of them would starve it and themselves.
        config = config.replace(num_threads=max(1, (os.cpu_count() or 1) - 1))
    events = kv_events.parse(config.service.kv_events_config or "{}")
    publishes = events.enabled
    core = build(config)
    pages = core.join(hello.prefix_key or os.urandom(32)) if hello.prefix_key or publishes else None
    if publishes and pages is None:
        raise ConfigError("kv_events_config: there is no prefix cache whose events could be published; leave it out")
    publisher = kv_events.Publisher(events, hello.rank) if publishes else None
    collect_rarely()
    built = time.monotonic()
    spawn = max(0.0, started - hello.spawned) if hello.spawned else 0.0
    laps = {"spawn": spawn, "import": imported - started, "build": built - imported, **core.stats().startup}
    return core, {"reports": bool(hello.prefix_key), "pages": pages, "publisher": publisher}, laps


def serve(socket_path: str, factory: str, hello: messages.Hello, started: float) -> int:
    """Connect, build the engine and serve until told to stop. Returns the exit code."""
    folder = Path(socket_path).parent
    try:
        flight = ipc.Flight(folder / FLIGHT)
        channel = ipc.BlockingChannel.connect(socket_path, messages.ToEngine)
    except OSError as e:  # the client was killed during the imports of this process
        log.error("engine process: its client is gone (%s)", e)
        _remove(folder)
        return CRASHED
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    reader = threading.Thread(target=_read_forever, args=(channel, inbox, folder), name="reader", daemon=True)
    reader.start()
    try:
        try:
            core, cluster, startup = _build(hello, factory, started)
        except OSError as e:
            if (message := of_a_file(e)) is None:
                raise
            raise ConfigError(message) from e
        channel.send(ipc.encode(messages.Ready(core.info, startup)))
        beat = hello.config.service.watchdog / 4
        Loop(core, channel, inbox, flight, beat, **cluster).run()
        if cluster["publisher"] is not None:
            cluster["publisher"].close()
        core.close()
    except ipc.ClosedError:
        reader.join()  # the reader thread sees the closed socket too, cleans up and ends the process
    except ConfigError as e:
        _last_words(channel, messages.Refused(str(e)))
        return REFUSED
    except Exception:
        text = traceback.format_exc()
        log.error("engine process: %s", text, extra={"several_lines": True})
        _last_words(channel, messages.Crash(text[-(64 << 10) :]))
        return CRASHED
    return 0


def _last_words(channel: ipc.BlockingChannel, message: Any) -> None:
    with contextlib.suppress(ipc.ClosedError):  # the client may be gone
        channel.send(ipc.encode(message))


def main() -> None:
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser(
        prog="kvasir.client.engine_process", description="The engine process; `kvasir serve` starts it."
    )
    parser.add_argument("--socket", required=True)
    parser.add_argument("--factory", default=ENGINE)
    arguments = parser.parse_args()
    hello = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=messages.Hello)
    logs.setup(hello.log_level)
    code = serve(arguments.socket, arguments.factory, hello, started)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads and device contexts of a crashed engine may never end by themselves


if __name__ == "__main__":
    main()
