"""An engine process on another host, as the front sees it: a connection to its keeper in place of a child process.

``RemoteChild`` has the methods of ``client.child.Child``. A cut connection counts as the end of the process, and blames
no request; the keeper decides whether the next connection finds the same process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvasir.client import ipc, messages
from kvasir.client.child import ChildError
from kvasir.cluster import wire
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log

# Opens a connection to a keeper: its streams. Raises OSError where that does not answer now.
Link = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
# Seconds between two tries to connect.
RETRY_SECONDS = 0.2
# Seconds that one try may take.
CONNECT_SECONDS = 10.0
# Seconds that a keeper has to confirm the end of its process.
ANSWER_SECONDS = 2.0


@dataclass(slots=True)
class RemoteFlight:
    """The flight record as the keeper last told it; see ``ipc.Flight``."""

    progress: int = 0
    steps: int = 0
    activity: ipc.Activity = ipc.Activity.IDLE
    slow: bool = False


class RemoteChild:
    """A connection to the keeper that ``link`` leads to. The constructor does not wait. ``factory`` and ``environment``
    are the keeper's own affair."""

    def __init__(
        self,
        link: Link,
        config: EngineConfig,
        factory: str = "",
        environment: dict[str, str] | None = None,
        prefix_key: bytes = b"",
        rank: int = 0,
    ) -> None:
        self.config, self._link = config, link
        self._hello = messages.Hello(
            config=config.engine_only(),
            log_level=logging.getLevelName(log.getEffectiveLevel()),
            prefix_key=prefix_key,
            rank=rank,
        )
        self.crash, self.killed = "", False
        self.at_work: list[int] | None = []
        self.launches: list[ipc.FlightStep] = []
        self.ended = 0.0
        self.flight = RemoteFlight()
        self._ended: wire.Ended | None = None
        self._channel: ipc.AsyncChannel | None = None
        self._over = asyncio.Event()  # the connection has ended

    async def ready(self, timeout: float) -> messages.Ready:
        """Wait until the engine is built, at most ``timeout`` seconds, also for a host that does not answer yet. Raises
        ConfigError and ChildError, as ``Child.ready`` does."""
        try:
            return await asyncio.wait_for(self._greet(), timeout)
        except TimeoutError as e:
            raise ChildError(f"the engine on another host was not ready within {timeout:g} s") from e
        except ipc.FrameError as e:
            raise ChildError(str(e)) from e

    async def _greet(self) -> messages.Ready:
        reader, writer = await self._connect()
        self._channel = ipc.AsyncChannel(reader, writer, wire.FromKeeper)
        self._channel.send(ipc.encode(self._hello))
        while (message := await self.receive()) is not None:
            if isinstance(message, messages.Ready):
                return message
            if isinstance(message, messages.Refused):
                raise ConfigError(message.message)
            if isinstance(message, messages.Crash):
                raise ChildError(message.traceback)
        raise ChildError(f"{self.obituary()} during start-up")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.wait_for(self._link(), CONNECT_SECONDS)
            except (OSError, TimeoutError) as e:
                log.warning("a keeper does not answer: %s", e or type(e).__name__)
                await asyncio.sleep(RETRY_SECONDS)

    async def receive(self) -> Any | None:
        """The next message of the engine, or None when the connection ended. Raises FrameError."""
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, wire.Beat):
                    self.flight = RemoteFlight(message.progress, message.steps, message.activity, message.slow)
                elif isinstance(message, wire.Ended):
                    self._ended = message
                    break
                else:
                    if isinstance(message, messages.Crash):
                        self.crash = message.traceback
                    return message
        except ipc.FrameError as e:
            self._over.set()
            if "in the middle" in str(e):  # cut off
                return None
            raise
        self._over.set()
        return None

    def send(self, frame: bytes) -> None:
        """Queue an encoded frame; does nothing before ``ready`` or after the connection closed."""
        if self._channel is not None:
            self._channel.send(frame)

    def dump_stacks(self) -> None:
        """Make the process write its stacks to the keeper's stderr."""
        self.send(ipc.encode(wire.DumpStacks()))

    def kill(self) -> None:
        """Ask for the end of the process at once. The connection is dropped when no answer comes: the keeper may hang,
        too."""
        self.killed = True
        self.send(ipc.encode(wire.Kill()))
        if self._channel is not None:
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._channel.abort)

    async def reap(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for the end of the process, kill it if it does not end, and close the
        connection. Sets ``at_work``."""
        if self._channel is None:
            return
        for seconds in (patience, ANSWER_SECONDS):
            if not self._over.is_set():
                try:
                    await asyncio.wait_for(self._drain(), seconds)
                except TimeoutError:
                    self.kill()
        if self._ended is not None:
            self.at_work, self.launches, self.ended = self._ended.at_work, self._ended.launches, self._ended.ended
        elif self.killed:
            self.at_work = None  # it hung: any request that it holds may be to blame
        self.ended = self.ended or time.monotonic()
        try:
            await asyncio.wait_for(self._channel.close(), ANSWER_SECONDS)
        except TimeoutError:
            self._channel.abort()

    async def _drain(self) -> None:
        try:
            while await self.receive() is not None:
                pass
        except ipc.FrameError:
            pass

    @property
    def ended_from_outside(self) -> bool:
        """Whether little speaks against a request: somebody killed the process, the connection was cut, or the keeper
        did not answer either, so that the whole host hangs."""
        return True if self._ended is None else self._ended.from_outside

    def obituary(self) -> str:
        """One line that says how the process ended."""
        if self._ended is not None:
            return self._ended.obituary
        return "the engine's host does not answer" if self.killed else "the connection to the engine's host was cut"
