"""Middleware for questions that every route gets: HEAD, and preflights of browsers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from kvasir.api.http.errors import error_response
from kvasir.errors import RequestError
from kvasir.logs import log

Scope = dict[str, Any]
# Most origins whose refusal is logged.
MAX_LOGGED = 8


class HeadAsGet:
    """ASGI middleware: HEAD is answered like GET, without the body. The route meets a reader that leaves after the
    head, so a stream ends there."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)
        answered = asyncio.Event()

        async def leave() -> dict[str, Any]:
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send_head(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        return await self.app({**scope, "method": "GET"}, leave, send_head)


class Preflights:
    """ASGI middleware: refuses the preflight of a browser on a page that may not call this server, and says which flag
    allows it. A preflight never has a key, so without this it would meet the key guard. Consoles of browsers do not
    show the reply, so the log tells of the first few origins too."""

    def __init__(self, app: Callable, allowed: Collection[str]) -> None:
        self.app = app
        self.allowed = allowed
        self.logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" and scope["method"] == "OPTIONS" else {}
        if b"access-control-request-method" not in headers or b"origin" not in headers:
            return await self.app(scope, receive, send)
        origin = headers[b"origin"].decode("latin-1")[:200]
        if origin in self.allowed or "*" in self.allowed:
            return await self.app(scope, receive, send)
        message = f"pages from {origin} may not call this server (CORS). Start it with --allowed-origins {origin}"
        if origin not in self.logged and len(self.logged) < MAX_LOGGED:
            self.logged.add(origin)
            log.warning("%s", message.encode("unicode_escape").decode())  # it is the client's text
        error = RequestError(message, status=403, code="cors_refused")
        return await error_response(error, scope)(scope, receive, send)
