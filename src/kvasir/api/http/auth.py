"""API keys. Every route except the open paths needs one, so a route added later is guarded by default."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from kvasir.api.http.errors import error_response
from kvasir.errors import RequestError

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/ping"})
PUBLIC_METRICS = frozenset({"/metrics"})  # open as well with --public-metrics
ADMIN_PATHS = "/admin/"  # routes below it need the admin key, and API keys do not open them
Scope = dict[str, Any]
App = Callable[[Scope, Callable, Callable], Awaitable[None]]


class KeyGuard:
    """ASGI middleware: ``Authorization: Bearer KEY`` (OpenAI's clients) or ``x-api-key: KEY`` (Anthropic's), compared
    in constant time against all keys. Routes of operators take ``admin_key`` alone.

    Stores in ``scope["state"]``: ``key``, a digest that names the caller in counters (empty without keys), and
    ``tenant``, the salt of the prefix cache: the digest when there are two keys or more, else empty. Neither comes from
    the client. WebSocket upgrades are refused: no route speaks them.
    """

    def __init__(
        self,
        app: App,
        keys: Iterable[str] = (),
        open_paths: frozenset[str] = OPEN_PATHS,
        admin_key: str | None = None,
    ) -> None:
        self.app = app
        self.open_paths = open_paths
        self.admin = None if admin_key is None else hashlib.sha256(admin_key.encode()).digest()
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"websocket" in headers.get(b"upgrade", b"").lower():
            error = RequestError("no route speaks WebSocket", status=400, code="no_websocket")
            return await error_response(error, scope)(scope, receive, send)
        of_admin = self.admin is not None and scope["path"].startswith(ADMIN_PATHS)
        key = self.match(headers, [self.admin] if of_admin else self.digests)
        if key is None and scope["path"] not in self.open_paths:
            error = RequestError(
                f"a valid {'admin' if of_admin else 'API'} key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                status=401,
                code="invalid_api_key",
            )
            return await error_response(error, scope)(scope, receive, send)
        state = scope.setdefault("state", {})
        state["key"] = key or ""
        state["tenant"] = key or "" if len(self.digests) > 1 else ""
        return await self.app(scope, receive, send)

    def match(self, headers: Mapping[bytes, bytes], digests: list[bytes]) -> str | None:
        """The caller's name, or None without a valid key. It compares all keys, so the time tells nothing about
        them."""
        if not digests:
            return ""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer] if scheme.lower() == b"bearer" else []
        # Some clients send both, and a made-up one where the user gave none.
        given += [headers[b"x-api-key"]] if b"x-api-key" in headers else []
        hashes = [hashlib.sha256(key.strip()).digest() for key in given]
        found = [d for d in digests for one in hashes if hmac.compare_digest(d, one)]
        return _name(found[0]) if found else None


def name_of(key: str) -> str:
    """The name of a key in counters and logs: a digest that does not give the key away."""
    return _name(hashlib.sha256(key.encode()).digest())


def _name(digest: bytes) -> str:
    return hashlib.blake2b(digest, digest_size=16, person=b"kvasir-tenant").hexdigest()
