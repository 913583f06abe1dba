"""Connections of the HTTP server: uvicorn's protocol with further limits, and its server without signal handlers.

Both sides may end a connection in two steps. A client that has sent its request may close its writing side and still
gets the answer. A server that answers before it has read the whole request reads on for a while, because closing at
once would reset the connection, and a client that is still sending would lose the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import select
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvasir.api.http.service import Service
from kvasir.logs import log

# A connection that sends no whole request head within one to two of these periods is closed.
HEADER_SECONDS = 10.0
MAX_HEAD_BYTES = 1 << 16
# Most open files to ask for; the usual soft limit of 1024 is raised to the hard limit, up to this number.
MAX_FILES = 1 << 16
# Seconds between two lines of the log about the limit of open files.
FULL_SECONDS = 60.0
# After an answer to half a request: longest pause of the client, longest time in all, and most bytes that are read, as
# a multiple of the largest body.
PAUSE_SECONDS, LINGER_SECONDS, LINGER_BODIES = 5.0, 30.0, 16
# How often it is seen whether a client that closed its writing side is gone altogether. That shows when something is
# sent, so an interim response is, after these seconds and then again and again.
GONE_SECONDS, FIRST_PROBE_SECONDS, PROBE_SECONDS = 0.2, 1.0, 10.0
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _Cycle(RequestResponseCycle):
    """A request and its answer. An answer to half a request is the last one on its connection."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and self.more_body:
            self.keep_alive = False
        await super().send(message)


class _Transport:
    """A connection's transport whose ``close`` asks the protocol how."""

    def __init__(self, transport: Any, protocol: Protocol) -> None:
        self._transport, self._protocol = transport, protocol
        self.write = transport.write  # called for every token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._protocol.linger():
            self._transport.close()

    def is_closing(self) -> bool:
        return self._protocol.lingering or self._transport.is_closing()


class Protocol(HttpToolsProtocol):
    """The protocol of uvicorn on httptools with further limits: the length of a request's head, which httptools does
    not limit, its time to arrive, the time that a reply may stay unread, and the number of connections.

    ``lingering``: the answer was given before the request ended, and the rest of it is read and dropped."""

    lingering = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Transport(transport, self))
        self._service: Service = self.config.app.state.service  # type: ignore[union-attr]
        self._last_cycle: Any = None
        self._was_idle = False
        self._head_bytes = 0
        self._unread, self._stuck_since = 0, self.loop.time()
        self._watch = self.loop.call_later(HEADER_SECONDS, self._look)
        self._ending: asyncio.TimerHandle | None = None  # the look at a connection that one side has ended
        self._garbled = False
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            self._service.metrics.http("none", 503)
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._heard = self.loop.time()
            self._room -= len(data)
            if self._room < 0:
                self.transport.abort()
            return
        cycle = self.cycle
        between = cycle is None or cycle.response_complete
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if between and self.cycle is cycle else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("the head of the request is too long")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.cycle.__class__ = _Cycle  # uvicorn makes it, and gives no choice of the class

    def send_400_response(self, msg: str) -> None:
        self._garbled = True
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        if self._ending is not None:
            self._ending.cancel()
        self.lingering = True  # there is nothing left to wait for
        super().connection_lost(exc)

    # -------------------------------------------------------------------------------------------- ends of connections

    def linger(self) -> bool:
        """Read on where the client may still be sending; False: there is no reason to, or no more."""
        unread = self._garbled or self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if self.lingering or not unread:
            return False
        self.lingering = True
        self._room = LINGER_BODIES * self._service.settings.max_body_bytes
        self._heard = now = self.loop.time()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._ending = self.loop.call_later(PAUSE_SECONDS, self._linger_on, now + LINGER_SECONDS)
        return True

    def _linger_on(self, until: float) -> None:
        now = self.loop.time()
        if now >= until or now - self._heard >= PAUSE_SECONDS:
            self.transport.abort()
        else:
            pause = min(until, self._heard + PAUSE_SECONDS) - now
            self._ending = self.loop.call_later(pause, self._linger_on, until)

    def eof_received(self) -> bool:
        """Whether the connection stays open: the client has ended its side, and its request is being answered.

        HTTP/1.0 knows no interim responses, which tell a client that is gone from one that waits: there it is gone."""
        cycle = self.cycle
        if self.lingering or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._ending = self.loop.call_later(GONE_SECONDS, self._wait_for, self.loop.time() + FIRST_PROBE_SECONDS)
        return True

    def _wait_for(self, probe: float) -> None:
        """Disconnect a client that has ended both sides. ``probe``: when to send it something next."""
        if self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        now = self.loop.time()
        # Once an answer has begun, its own parts show whether somebody reads them.
        if now >= probe and not self.pipeline and not self.cycle.response_started:
            self.transport.write(PROBE)
            probe = now + PROBE_SECONDS
        self._ending = self.loop.call_later(GONE_SECONDS, self._wait_for, probe)

    def _look(self) -> None:
        self._watch = self.loop.call_later(HEADER_SECONDS, self._look)
        if self.lingering:
            return
        self._check_head()
        self._check_reader()

    def _check_head(self) -> None:
        idle = (self.cycle is None or self.cycle.response_complete) and self.cycle is self._last_cycle
        if idle and self._was_idle:
            self.transport.close()
        self._was_idle, self._last_cycle = idle or self.cycle is None, self.cycle

    def _check_reader(self) -> None:
        """Disconnect a client that stops reading, so that no stream runs for it and
        its connection frees its memory and descriptor."""
        unread, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not unread or unread != self._unread:
            self._unread, self._stuck_since = unread, now
        elif now - self._stuck_since > self._service.settings.request_timeout:
            self.transport.abort()


def _is_reset(sock: Any) -> bool:
    """Whether both sides of a connection have ended."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


class Server(uvicorn.Server):
    """The server of uvicorn without its signal handlers, because ours drain first. At the limit of open files one line
    a while is logged, not thousands of tracebacks a second; connections wait, and serving goes on."""

    _told = -FULL_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.should_exit and isinstance(error, ValueError) and "_start_serving" in context.get("message", ""):
            return  # a second after the limit asyncio listens again; the socket was closed meanwhile
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return loop.default_exception_handler(context)
        if loop.time() - self._told >= FULL_SECONDS:
            self._told = loop.time()
            log.error("no connection can be accepted: %s; raise the limit of open files (ulimit -n)", error.strerror)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed, and return it. Each connection takes one, and a failed
    ``accept`` makes asyncio write thousands of tracebacks a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return most if soft == resource.RLIM_INFINITY else soft
