"""Messages between two processes as msgpack frames on a Unix socket, and the flight record in shared memory.

A frame is a 4-byte big-endian length and that many bytes of msgpack. A frame that is empty, too long, cut short or not
one of the expected messages raises ``FrameError``; the connection is then useless and both sides drop it.

The flight record answers two questions about a process that no longer talks: does it still make progress, and which
requests was it working on when it died? The engine process writes it, the client only reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import mmap
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HEADER = struct.Struct(">I")
# Longest body of a frame; a longer one is a fault, and must not fill the memory of the process that reads it.
MAX_FRAME_BYTES = 64 << 20
# Size of the buffers for reading and of the socket's send buffer.
_BUFFER_BYTES = 1 << 20


class ClosedError(Exception):
    """The other side is gone."""


class FrameError(Exception):
    """The other side sent something that is not a valid frame. The connection cannot be used any more."""


def encode(message: Any) -> bytes:
    """Return one frame. Raises FrameError when it would be too long; TypeError, ValueError or OverflowError when the
    message cannot be encoded."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


class Decoder:
    """Decoder of frames whose messages belong to one union of types."""

    def __init__(self, messages: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)

    def length(self, header: bytes) -> int:
        """Length of the body that the header announces. Raises FrameError when it is out of range."""
        (length,) = HEADER.unpack(header)
        if not 0 < length <= MAX_FRAME_BYTES:
            raise FrameError(f"a frame announces {length} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
        return length

    def body(self, data: bytes) -> Any:
        """The message in the body of a frame. Raises FrameError when it is not one of the union."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            raise FrameError(f"a frame of {len(data)} bytes is not a valid message: {e}") from e


class AsyncChannel:
    """The client's side of the socket, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, messages: Any) -> None:
        self._reader, self._writer, self._decoder = reader, writer, Decoder(messages)

    @classmethod
    async def accept(cls, listener: socket.socket, messages: Any) -> AsyncChannel:
        """Wait for the next connection to ``listener``, a non-blocking socket."""
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_BUFFER_BYTES)
        return cls(reader, writer, messages)

    async def receive(self) -> Any | None:
        """The next message, or None when the other side closed between two frames. Raises FrameError."""
        body = await self.receive_body()
        return None if body is None else self._decoder.body(body)

    async def receive_body(self) -> bytes | None:
        """The next frame without its header, not decoded; else as ``receive``."""
        try:
            header = await self._reader.readexactly(HEADER.size)
            return await self._reader.readexactly(self._decoder.length(header))
        except asyncio.IncompleteReadError as e:
            if e.expected == HEADER.size and not e.partial:
                return None
            raise FrameError("the connection closed in the middle of a frame") from e
        except OSError:
            return None

    def send(self, frame: bytes) -> None:
        """Queue an encoded frame. On a closed connection this does nothing; ``receive`` reports the loss."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def flush(self) -> None:
        """Wait until the other side has taken most of what was sent. Raises OSError when it is gone."""
        await self._writer.drain()

    def abort(self) -> None:
        """Drop the connection at once; what was not sent yet is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class BlockingChannel:
    """The engine's side of the socket. One thread may receive while another sends."""

    def __init__(self, connection: socket.socket, messages: Any) -> None:
        self._socket, self._decoder = connection, Decoder(messages)
        self._file = connection.makefile("rb", buffering=_BUFFER_BYTES)

    @classmethod
    def connect(cls, path: str, messages: Any) -> BlockingChannel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.connect(path)
        return cls(connection, messages)

    def receive(self) -> Any | None:
        """Wait for the next message; None when the other side closed between two frames. Raises FrameError."""
        header = self._read(HEADER.size)
        if not header:
            return None
        if len(header) < HEADER.size:
            raise FrameError("the connection closed in the middle of a frame")
        length = self._decoder.length(header)
        body = self._read(length)
        if len(body) < length:
            raise FrameError("the connection closed in the middle of a frame")
        return self._decoder.body(body)

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except ConnectionError:
            return b""

    def send(self, frame: bytes) -> None:
        """Send an encoded frame, waiting for room. Raises ClosedError."""
        try:
            self._socket.sendall(frame)
        except OSError as e:
            raise ClosedError(str(e)) from e

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Activity(enum.IntEnum):
    """The present activity of the engine process."""

    IDLE = 0  # between steps: no request is to blame for a death
    BUSY = 1  # in a step whose requests are not known yet: any request that the process holds may be to blame
    LAUNCHED = 2  # working on the requests whose tickets are recorded


class FlightStep(NamedTuple):
    """A launch in the flight record. ``seconds``: ``time.monotonic()`` at the launch. ``kept``: ticket, start and
    length of the first spans."""

    step: int
    seconds: float
    rows: int
    spans: int
    slow: bool
    kept: list[tuple[int, int, int]]


class Flight:
    """The flight record: counters, flags and a list of tickets, all of 64 bits, in a memory-mapped file.

    ``progress`` changes whenever the process is idle or gets something done. ``steps`` counts finished steps. ``slow``
    says that the present step may take long because kernels are compiled. A ring behind the tickets holds the last
    launched steps, as numbers only: it outlives the process, and no text of a request is ever in it.
    """

    _PROGRESS, _STEPS, _ACTIVITY, _COUNT, _SLOW, _LAUNCHES, _TICKETS = range(7)
    CAPACITY = (128 << 10) // 8 - _TICKETS
    # Steps that the ring holds, and spans that it keeps of one step.
    RING, SPANS = 256, 32
    _HEAD = 5  # words of a step before its spans: number + 1 (0: being written), time, rows, spans, slow
    _ENTRY = _HEAD + 3 * SPANS
    _WORDS = CAPACITY + _TICKETS + RING * _ENTRY

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        size = self._WORDS * 8
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(handle, size)
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._words = memoryview(self._map).cast("Q")

    @property
    def progress(self) -> int:
        return self._words[self._PROGRESS]

    @property
    def steps(self) -> int:
        return self._words[self._STEPS]

    @property
    def slow(self) -> bool:
        return bool(self._words[self._SLOW])

    @property
    def activity(self) -> Activity:
        return Activity(self._words[self._ACTIVITY])

    @property
    def tickets(self) -> list[int]:
        return self._words[self._TICKETS : self._TICKETS + self._words[self._COUNT]].tolist()

    def beat(self) -> None:
        self._words[self._PROGRESS] += 1

    def idle(self) -> None:
        self._words[self._ACTIVITY] = Activity.IDLE

    def busy(self) -> None:
        self._words[self._ACTIVITY] = Activity.BUSY

    def launch(self, tickets: Iterable[int], slow: bool = False) -> None:
        """Record the tickets of the requests that are worked on from now. A death inside this call blames all requests,
        never the wrong one."""
        self.busy()
        self._words[self._SLOW] = slow
        numbers = list(tickets)
        if len(numbers) <= self.CAPACITY:
            for place, ticket in enumerate(numbers, self._TICKETS):
                self._words[place] = ticket
            self._words[self._COUNT] = len(numbers)
            self._words[self._ACTIVITY] = Activity.LAUNCHED

    def stepped(self) -> None:
        self._words[self._STEPS] += 1

    def record(self, step: int, rows: int, spans: Collection[tuple[int, int, int]], slow: bool) -> None:
        """Record a launch. ``spans``: ticket, start and length of each; the first ``SPANS`` are kept."""
        words, launches = self._words, self._words[self._LAUNCHES]
        at = self._WORDS - self.RING * self._ENTRY + launches % self.RING * self._ENTRY
        words[at] = 0
        kept = [number for span in islice(spans, self.SPANS) for number in span]
        head = time.monotonic_ns(), rows, len(spans), slow
        struct.pack_into(f"{len(head) + len(kept)}Q", self._map, 8 * (at + 1), *head, *kept)
        words[at] = step + 1
        words[self._LAUNCHES] = launches + 1

    def recorded(self) -> list[FlightStep]:
        """The last launches, oldest first, without one whose record a death cut off."""
        launches, found = self._words[self._LAUNCHES], []
        for launch in range(max(0, launches - self.RING), launches):
            at = self._WORDS - self.RING * self._ENTRY + launch % self.RING * self._ENTRY
            mark, nanoseconds, rows, spans, slow, *kept = self._words[at : at + self._ENTRY].tolist()
            if mark:
                numbers = kept[: 3 * min(spans, self.SPANS)]
                triples = list(zip(numbers[::3], numbers[1::3], numbers[2::3]))
                found.append(FlightStep(mark - 1, nanoseconds / 1e9, rows, spans, bool(slow), triples))
        return found

    @property
    def closed(self) -> bool:
        return self._map.closed

    def close(self) -> None:
        self._words.release()
        self._map.close()
