"""Messages between the processes that try grammars and their caller: frames of msgpack over Unix sockets."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, TypeVar

import msgspec

M = TypeVar("M")


class Hello(msgspec.Struct):
    """The settings of the processes. ``compiler``: module and name of the class that compiles. ``seconds``: when a
    process ends by itself in a grammar that its caller does not end. ``memory_bytes``: most memory of a grammar."""

    compiler: str
    tokenizer_file: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    seconds: float
    memory_bytes: int
    path: list[str]


class Try(msgspec.Struct):
    """A grammar to try. Its text is UTF-8 in which lone surrogates pass: the compiler refuses them."""

    kind: str
    text: bytes
    whitespace: str
    parts: tuple[tuple[str, bytes], ...]


class Verdict(msgspec.Struct):
    """The answer to ``Try``, and the first message of a process. ``status`` 0: all is well, else the fields of a
    RequestError. ``last``: the process ends. ``pid``: of a process that is ready. ``ended``: the exit code of a process
    that ended by itself, negative for a signal."""

    status: int = 0
    message: str = ""
    param: str | None = None
    code: str | None = None
    last: bool = False
    pid: int = 0
    ended: int | None = None


class Closed(Exception):
    """The other end is gone."""


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def send(channel: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError when nobody reads it."""
    body = msgspec.msgpack.encode(message)
    channel.sendall(struct.pack("<I", len(body)) + body)


def receive(channel: socket.socket, kind: type[M], until: float | None = None) -> M | None:
    """The next message; None when it is not whole at ``until`` (time.monotonic). Raises Closed."""
    head = _read(channel, 4, until)
    body = None if head is None else _read(channel, struct.unpack("<I", head)[0], until)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def _read(channel: socket.socket, size: int, until: float | None) -> bytes | None:
    found = bytearray()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while len(found) < size:
        if until is not None and not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return None
        try:
            data = channel.recv(size - len(found))
        except OSError as e:
            raise Closed from e
        if not data:
            raise Closed
        found += data
    return bytes(found)
