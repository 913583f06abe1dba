"""Connections of the HTTP server: uvicorn's protocol with further limits, and its server without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvasir.api.service import Service
from kvasir.logs import log

# A connection that sends no whole request head within one to two of these periods is closed.
HEADER_SECONDS = 10.0
MAX_HEAD_BYTES = 1 << 16
# Most open files to ask for; the usual soft limit of 1024 is raised to the hard limit, up to this number.
MAX_FILES = 1 << 16
# Seconds between two lines of the log about the limit of open files.
FULL_SECONDS = 60.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The protocol of uvicorn on httptools with further limits: the length of a request's head, which httptools does
    not limit, its time to arrive, the time that a reply may stay unread, and the number of connections."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._service: Service = self.config.app.state.service  # type: ignore[union-attr]
        self._last_cycle: Any = None
        self._was_idle = False
        self._head_bytes = 0
        self._unread, self._stuck_since = 0, self.loop.time()
        self._watch = self.loop.call_later(HEADER_SECONDS, self._look)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            self._service.metrics.http("none", 503)
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        # After a refusal the rest of the body may still arrive.
        between = cycle is None or cycle.response_complete and not cycle.more_body
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if between and self.cycle is cycle else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("the head of the request is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        self._watch = self.loop.call_later(HEADER_SECONDS, self._look)
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
