"""A server on a real port, in a thread, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from tests.api.fake_client import FakeClient, tokenizer


class Running:
    """One server: its base url, its fake engine, and its app's service."""

    def __init__(self, client: FakeClient, journal: str | None = None, **settings) -> None:
        import uvicorn

        from kvasir.api.http.connections import Protocol, Server
        from kvasir.api.server import create_app
        from kvasir.api.text.text import Text
        from kvasir.config import ServerConfig

        self.engine = client
        config = ServerConfig(**settings)
        text = Text(tokenizer, config.tool_call_parser, config.reasoning_parser, config.processors)
        self.app = create_app(client, text, config, journal)
        self.service = self.app.state.service
        # With the protocol named, asyncio switches Nagle's algorithm off as it does for a port of its own.
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = Server(
            uvicorn.Config(
                self.app,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                h11_max_incomplete_event_size=1 << 16,
                timeout_graceful_shutdown=2,
            )
        )
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.socket]))

    def call(self, function, *args) -> None:
        """Run something on the server's loop and wait for it (events are not thread safe)."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(*args), done.set()))
        assert done.wait(60)

    def wait_ready(self) -> Running:
        """Wait until the start has ended, well or badly."""
        self.until(lambda: self.service.phase != "starting")
        return self

    @staticmethod
    def until(condition, seconds: float = 120.0) -> None:
        """Wait until the condition holds; the limit is generous, for busy machines."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "this did not happen in time"
            time.sleep(0.005)

    def idle(self) -> None:
        """Wait until nothing is open any more, neither in the engine nor in the counters of the server."""
        self.until(lambda: not self.engine.open and not self.service.concurrency.open)

    def stop(self) -> None:
        """End the server and wait for its thread."""
        self.server.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(client: FakeClient | None = None, **settings) -> Iterator[Running]:
    """A server that has started, and is stopped at the end of the block."""
    server = Running(client or FakeClient(), **settings).wait_ready()
    try:
        yield server
    finally:
        server.stop()


def all_routes(server: Running) -> set[tuple[str, str]]:
    """Method and path of every route of the app, of any kind, so that a new route is covered without a change here."""
    return {
        (method, route.path.replace("{name:path}", "fake"))
        for route in server.app.routes
        for method in route.methods or {"GET"}
    }


def key(text: str) -> dict[str, str]:
    """The header that sends a key."""
    return {"authorization": f"Bearer {text}"}
