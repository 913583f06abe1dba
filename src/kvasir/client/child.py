"""One engine process as its parent sees it: a private folder, a socket, a flight record, and the ways to end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from kvasir.client import ipc, messages
from kvasir.client.engine_process import FLIGHT
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log

# Seconds between two looks at whether the process has ended or become ready.
_POLL_SECONDS = 0.02


class ChildError(Exception):
    """The engine process died or hung before it was ready."""


class Child:
    """A running engine process. The constructor starts it and does not wait, so that a server can start the engine
    before its own slow imports. Raises OSError when no process can be started.

    ``environment``: variables that the process gets in addition. ``prefix_key`` and ``rank``: see
    ``messages.Hello``.
    The folder has mode 0700, so that no other user can reach the socket; it is removed with the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        environment: dict[str, str] | None = None,
        prefix_key: bytes = b"",
        rank: int = 0,
    ) -> None:
        self.config, self._environment, self._prefix_key, self._rank = config, environment or {}, prefix_key, rank
        self.crash = ""  # what the process said about its own end
        self.killed = False  # whether we ended it
        # Set by ``reap``: tickets of the requests that the process was working on when it died; None: any that it held.
        self.at_work: list[int] | None = []
        self.launches: list[ipc.FlightStep] = []  # set by ``reap``: the last launches, oldest first
        self.ended = 0.0  # set by ``reap``: ``time.monotonic()`` when the process was found dead
        self._channel: ipc.AsyncChannel | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="kvasir-"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = str(self._folder / "socket")
            self._listener.bind(path)
            self._listener.listen(1)
            self._listener.setblocking(False)
            self.flight = ipc.Flight(self._folder / FLIGHT, create=True)
            self._process = self._spawn(path, factory)
        except BaseException:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _spawn(self, path: str, factory: str) -> subprocess.Popen:
        # -P: the working folder must not shadow the modules that the process imports. Output goes to stderr, because
        # stdout may belong to a program that prints results. In a session of its own the process gets no Ctrl-C.
        command = [sys.executable, "-P", "-m", "kvasir.client.engine_process", "--socket", path, "--factory", factory]
        hello = messages.Hello(
            config=self.config.engine_only(),
            log_level=logging.getLevelName(log.getEffectiveLevel()),
            spawned=time.monotonic(),
            prefix_key=self._prefix_key,
            rank=self._rank,
        )
        environment = {**os.environ, **self._environment}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True, env=environment)
        with contextlib.suppress(BrokenPipeError):  # the process died already; ``ready`` finds out
            process.stdin.write(msgspec.msgpack.encode(hello))
            process.stdin.close()
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, timeout: float) -> messages.Ready:
        """Wait until the engine is built, at most ``timeout`` seconds.

        Raises ConfigError when the engine refuses its configuration, and ChildError when it dies, hangs or sends an
        invalid frame.
        """
        handshake = asyncio.create_task(self._handshake())
        deadline = time.monotonic() + timeout
        try:
            while not (await asyncio.wait({handshake}, timeout=_POLL_SECONDS))[0]:
                if time.monotonic() > deadline:
                    raise ChildError(f"the engine process was not ready within {timeout:g} s")
                if self._channel is None and self._process.poll() is not None:
                    raise ChildError(f"the engine process {self._ending()} before it connected")
            return handshake.result()
        except ipc.FrameError as e:
            raise ChildError(str(e)) from e
        finally:
            if not handshake.done():
                handshake.cancel()
                await asyncio.wait({handshake})

    async def _handshake(self) -> messages.Ready:
        self._channel = await ipc.AsyncChannel.accept(self._listener, messages.ToClient)
        self._listener.close()
        message = await self._channel.receive()
        if isinstance(message, messages.Ready):
            return message
        if isinstance(message, messages.Refused):
            raise ConfigError(message.message)
        if isinstance(message, messages.Crash):
            raise ChildError(f"the engine process failed during start-up:\n{message.traceback}")
        await self._exited(1.0)
        raise ChildError(f"the engine process {self._ending()} during start-up")

    async def receive(self) -> Any | None:
        """The next message, or None when the connection ended. Raises FrameError."""
        assert self._channel is not None, "receive() before ready()"
        message = await self._channel.receive()
        if isinstance(message, messages.Crash):
            self.crash = message.traceback
        return message

    async def receive_body(self) -> bytes | None:
        """The next message as it came, for one who passes it on."""
        return await self._channel.receive_body()

    def send(self, frame: bytes) -> None:
        """Queue an encoded frame; does nothing before ``ready`` or after the connection closed."""
        if self._channel is not None:
            self._channel.send(frame)

    def dump_stacks(self) -> None:
        """Make the process write the stacks of all its threads to stderr."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.killed = True
        self._process.kill()

    async def reap(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for the process to end, kill it if
        it does not, clean up, and set ``at_work``."""
        try:
            if not await self._exited(patience):
                self.kill()
                await self._exited(60.0)
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._channel is not None:
                await self._channel.close()
            if not self.flight.closed:
                self.ended, self.launches = time.monotonic(), self.flight.recorded()
                self.at_work = {ipc.Activity.IDLE: [], ipc.Activity.BUSY: None}.get(
                    self.flight.activity, self.flight.tickets
                )
                self.flight.close()

    async def _exited(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return self._process.poll() is not None

    @property
    def ended_from_outside(self) -> bool:
        """Whether someone else killed the process: an operator, or the kernel when memory ran out. The engine itself
        never raises these signals."""
        return not self.killed and self._process.poll() in (-signal.SIGKILL, -signal.SIGTERM)

    def _ending(self) -> str:
        code = self._process.poll()
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def obituary(self) -> str:
        """One line that says how the process ended."""
        last = self.crash.strip().splitlines()[-1:]
        return f"the engine process {self._ending()}" + (f": {last[0]}" if last else "")
