"""The two ends of the line between engine and trainer, and the trainer's process.

The engine's end starts the process, reads its messages in a thread, and starts it again when it dies, three times at
most. The trainer's end makes sure that the process is gone when the engine is: the socket closes with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.client import ipc
from kvasir.learn import messages
from kvasir.learn.messages import SOCKET, FromEngine, FromTrainer, Order, Renewed, Stop
from kvasir.logs import log

COMMAND = [sys.executable, "-P", "-m", "kvasir.learn.online"]
# Starts after the first one, and the seconds that pass before each: a fault that comes back must not burn a core.
RESTARTS, PAUSE = 3, 2.0
# Seconds that the process gets to end by itself.
GRACE = 2.0
NICE = 10  # of a trainer on the CPU: the engine's threads come first


def private_folder() -> Path:
    """A new folder of mode 0700 for a socket, an order and weights."""
    return Path(tempfile.mkdtemp(prefix="kvasir-learn-"))


class Trainer:
    """The trainer's process as the engine sees it. ``order``: makes the order for each start. ``command``: what is
    started, with ``--folder FOLDER`` behind it."""

    def __init__(
        self, folder: Path, order: Callable[[], Order], command: list[str] | None = None, pause: float = PAUSE
    ) -> None:
        self.folder, self._order, self._command, self._pause = folder, order, command or COMMAND, pause
        self.ended = ""  # why there is no trainer any more
        self._starts = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel: ipc.BlockingChannel | None = None
        self._sending = threading.Lock()  # held while the channel changes or is written to
        self._late: Renewed | None = None  # came after the order was made and before the trainer could hear
        self._process: subprocess.Popen | None = None
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(1)
        self._listener.settimeout(0.2)
        self._thread = threading.Thread(target=self._run, name="kvasir-trainer", daemon=True)
        self._thread.start()

    def poll(self) -> list[FromTrainer]:
        """The messages that have come. Never waits."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def send(self, message: FromEngine) -> None:
        """Send a message. Where the trainer is not there it is lost, except that one which starts hears of new
        weights."""
        with self._sending, contextlib.suppress(ipc.ClosedError):
            if self._channel is not None:
                self._channel.send(ipc.encode(message))
            elif isinstance(message, Renewed):
                self._late = message

    @property
    def pid(self) -> int | None:
        """The process id; None: none runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def end(self, reason: str) -> None:
        """End the process for good. Does not wait."""
        self.ended = self.ended or reason
        self._closing.set()  # first, so that a trainer which connects now is told, too
        self.send(Stop())

    def close(self) -> None:
        """End the process, wait until it is gone, and remove the folder."""
        self.end("the engine stops")
        self._thread.join(GRACE)
        process = self._process
        if self._thread.is_alive() and process is not None:  # it does not listen: it hangs, or was stopped
            process.kill()
        self._thread.join(GRACE + 5)
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._starts += 1
            try:
                self._serve_one()
            except (OSError, ipc.FrameError, ValueError) as error:
                log.warning("the trainer failed: %s", error)
            finally:
                self._reap()
            if self._closing.is_set():
                return
            if self._starts > RESTARTS:
                self.ended = self.ended or f"the trainer died {self._starts} times"
                log.error("no more learning: %s. Drafts go on with the weights there are", self.ended)
                return
            log.warning("the trainer died and is started again (%d of %d)", self._starts, RESTARTS)
            self._closing.wait(self._pause)

    def _serve_one(self) -> None:
        """Start the process and read its messages until it is gone."""
        with self._sending:
            self._late = None
        order = self._order()
        order.write(self.folder)
        # In a session of its own it gets no Ctrl-C. Output goes to stderr, as stdout may belong to a program.
        command = [*self._command, "--folder", str(self.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        if order.device == "cpu":  # from its first import on
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        connection = self._accept()
        if connection is None:
            return
        channel = self._meet(connection)
        while (message := channel.receive()) is not None:
            if isinstance(message, messages.Ended):
                self.ended = message.reason
                self._closing.set()
            self._inbox.put(message)

    def _meet(self, connection: socket.socket) -> ipc.BlockingChannel:
        """Open the channel, and say what the trainer has missed since its order was made."""
        channel = ipc.BlockingChannel(connection, FromTrainer)
        with self._sending, contextlib.suppress(ipc.ClosedError):
            self._channel = channel
            if self._late is not None:
                channel.send(ipc.encode(self._late))
            if self._closing.is_set():
                channel.send(ipc.encode(Stop()))
        return channel

    def _accept(self) -> socket.socket | None:
        assert self._process is not None
        while not self._closing.is_set() and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection = self._listener.accept()[0]
                connection.settimeout(None)
                return connection
        return None

    def _reap(self) -> None:
        with self._sending:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process = self._process
        if process is not None:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Engine:
    """The engine as the trainer's process sees it. ``on_close`` is called in a thread when the engine is gone; by
    default it removes the folder and ends the process at once."""

    def __init__(self, folder: Path, on_close: Callable[[], None] | None = None) -> None:
        self._folder = folder
        self._on_close = on_close or self._vanish
        self._channel = ipc.BlockingChannel.connect(str(folder / SOCKET), FromEngine)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def poll(self, wait: float = 0.0) -> list[FromEngine]:
        """The messages that have come, waiting up to ``wait`` seconds for the first. A Stop ends the process by
        itself."""
        found = []
        until = time.monotonic() + wait
        with contextlib.suppress(queue.Empty):
            while True:
                left = 0.0 if found else max(0.0, until - time.monotonic())
                found.append(self._inbox.get(timeout=left) if left else self._inbox.get_nowait())
        return found

    def send(self, message: FromTrainer) -> None:
        """Send a message. Raises ipc.ClosedError."""
        self._channel.send(ipc.encode(message))

    def _read(self) -> None:
        with contextlib.suppress(ipc.FrameError):
            while (message := self._channel.receive()) is not None:
                if isinstance(message, Stop):
                    os._exit(0)
                self._inbox.put(message)
        self._on_close()

    def _vanish(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)
