"""The keeper of one engine process on another host: it starts the process, watches it, and passes frames on.

A front connects to it over TCP with mutual TLS. Frames of requests and tokens pass through without being decoded. The
keeper adds what the front cannot see from afar: the flight record, and how the process ended.

When the connection is cut the process stays, since to load the weights takes longest. The front has taken its requests
back by then; the process cancels them when the next connection comes, and late tokens have an older epoch. Without a
connection for ``PATIENCE_SECONDS`` the process ends, so that no device is held for a front that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import msgspec

from kvasir.client import ipc, messages
from kvasir.client.child import Child, ChildError
from kvasir.client.engine_process import ENGINE
from kvasir.cluster import wire
from kvasir.errors import ConfigError
from kvasir.logs import log

# Seconds between two looks at the flight record.
BEAT_SECONDS = 0.25
# Seconds that a process stays without a connection.
PATIENCE_SECONDS = 60.0
# Seconds that a connection has to say hello.
HELLO_SECONDS = 10.0
# Seconds that the process gets for an orderly end when the keeper closes.
STOP_SECONDS = 10.0


class Keeper:
    """Keeps one engine process for one front. All methods belong to one event loop. ``factory`` and ``environment``: as
    in ``Child``."""

    def __init__(self, factory: str = ENGINE, environment: dict[str, str] | None = None) -> None:
        self._factory, self._environment = factory, environment or {}
        self.child: Child | None = None
        self.load: messages.Heartbeat | None = None  # the latest of the process
        self._hello: messages.Hello | None = None  # of the process
        self._ready: messages.Ready | None = None
        self._front: ipc.AsyncChannel | None = None
        self._attached: asyncio.Task | None = None
        self._pump: asyncio.Task | None = None  # reads what the process sends, with a connection or without
        self._leaving: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext) -> int:
        """Listen for the front, and return the port. ``port`` 0: any."""
        self._server = await asyncio.start_server(self._connected, host, port, ssl=tls, limit=1 << 20)
        return self._server.sockets[0].getsockname()[1]

    @property
    def serving(self) -> bool:
        """Whether the process is ready and a front is connected."""
        return self._front is not None and self._ready is not None

    async def close(self) -> None:
        """Drop the connection and end the process."""
        if self._server is not None:
            self._server.close()
        if self._attached is not None:
            self._attached.cancel()
            await asyncio.wait({self._attached})
        await self._end()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not wire.peer_is(writer.get_extra_info("peercert"), wire.FRONT):
            log.warning("a connection that is not the front's was refused")
            writer.close()
            return
        await self.attach(reader, writer)

    async def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a front until its connection ends. A later connection takes the place of an earlier one, which may be
        dead without anybody having noticed."""
        before, self._attached = self._attached, asyncio.current_task()
        channel = ipc.AsyncChannel(reader, writer, wire.ToKeeper)
        try:
            if before is not None and not before.done():
                before.cancel()
                await asyncio.wait({before})
            await self._serve(channel)
        except (ipc.FrameError, TimeoutError, OSError) as e:
            log.error("keeper: %s", e or type(e).__name__)
        except asyncio.CancelledError:
            pass  # another connection has come, or the keeper closes
        finally:
            if self._front in (channel, None):  # None: the process was still starting
                self._front = None
                self._leave_later()
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close()

    async def _serve(self, channel: ipc.AsyncChannel) -> None:
        hello = await asyncio.wait_for(channel.receive(), HELLO_SECONDS)
        if not isinstance(hello, messages.Hello):
            raise ipc.FrameError("the first message of a connection must be a hello")
        if self._leaving is not None:
            self._leaving.cancel()
        beats = asyncio.create_task(self._beat(channel))
        sends = asyncio.create_task(self._send(channel))
        starts = asyncio.create_task(self._engage(hello, channel))
        try:
            await asyncio.wait({sends, starts}, return_when=asyncio.FIRST_COMPLETED)
            if not starts.done() or not starts.result():  # the front is gone, or the process could not start
                return
            await asyncio.wait({sends, self._pump}, return_when=asyncio.FIRST_COMPLETED)
            if self._pump.done() and self.child is not None:
                await self._bury(channel)
        finally:
            for task in (beats, sends, starts):
                task.cancel()
            await asyncio.wait({beats, sends, starts})

    async def _engage(self, hello: messages.Hello, channel: ipc.AsyncChannel) -> bool:
        """Bring the process that ``hello`` describes: the present one, or another. Returns False when it cannot be."""
        same = self._hello is not None and msgspec.structs.replace(hello, spawned=0.0) == self._hello
        if same and self._ready is not None and not self._pump.done():
            self.child.send(ipc.encode(messages.Forget()))
        else:
            await self._end()
            self._hello = msgspec.structs.replace(hello, spawned=0.0)
            try:
                self.child = Child(hello.config, self._factory, self._environment, hello.prefix_key, hello.rank)
                self._ready = await self.child.ready(hello.config.service.startup_timeout)
            except ConfigError as e:
                channel.send(ipc.encode(messages.Refused(str(e))))
                await self._end()
                return False
            except (ChildError, OSError) as e:
                channel.send(ipc.encode(messages.Crash(str(e))))
                await self._end()
                return False
            self._pump = asyncio.create_task(self._read(self.child))
        channel.send(ipc.encode(self._ready))
        self._front = channel
        return True

    async def _read(self, child: Child) -> None:
        """Pass on what the process sends, to whoever is connected; without a connection nobody needs it."""
        with contextlib.suppress(ipc.FrameError):
            while (body := await child.receive_body()) is not None:
                name = wire.tag(body)
                if name == "Crash":
                    child.crash = msgspec.msgpack.decode(body, type=messages.Crash).traceback
                elif name == "Heartbeat":
                    self.load = msgspec.msgpack.decode(body, type=messages.Heartbeat)
                front = self._front
                if front is not None:
                    front.send(ipc.HEADER.pack(len(body)) + body)
                    with contextlib.suppress(OSError):
                        await front.flush()

    async def _send(self, channel: ipc.AsyncChannel) -> None:
        """Pass on what the front sends."""
        while (body := await channel.receive_body()) is not None:
            child, name = self.child, wire.tag(body)
            if child is None:
                continue
            if name == "Kill":
                child.kill()
            elif name == "DumpStacks":
                child.dump_stacks()
            else:
                child.send(ipc.HEADER.pack(len(body)) + body)

    async def _beat(self, channel: ipc.AsyncChannel) -> None:
        while True:
            child = self.child
            if child is not None and not child.flight.closed and self._front is channel:
                flight = child.flight
                channel.send(ipc.encode(wire.Beat(flight.progress, flight.steps, flight.activity, flight.slow)))
            await asyncio.sleep(BEAT_SECONDS)

    async def _bury(self, channel: ipc.AsyncChannel) -> None:
        """Tell the front how the process ended."""
        child = self.child
        await child.reap(1.0)
        channel.send(
            ipc.encode(
                wire.Ended(
                    obituary=child.obituary(),
                    from_outside=child.ended_from_outside,
                    at_work=child.at_work,
                    launches=child.launches,
                    ended=child.ended,
                )
            )
        )
        self.child = self._hello = self._ready = None

    def _leave_later(self) -> None:
        loop = asyncio.get_running_loop()
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = loop.call_later(PATIENCE_SECONDS, lambda: loop.create_task(self._end()))

    async def _end(self) -> None:
        """End the process, in order where it listens."""
        child, self.child, self._hello, ready, self._ready = self.child, None, None, self._ready, None
        pump, self._pump = self._pump, None  # the next connection may bring another one meanwhile
        if self._leaving is not None:
            self._leaving.cancel()
        if child is not None:
            if ready is not None:
                child.send(ipc.encode(messages.Stop()))
            await child.reap(STOP_SECONDS if ready is not None else 0.0)
        if pump is not None:
            pump.cancel()
            await asyncio.wait({pump})
