"""Which names a request may give this server: a page of a stranger can point a name of its own at 127.0.0.1 (DNS
rebinding), and the browser then lets it read what a server without a key answers. The name stays in ``Host``."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any

from kvasir.api.http.errors import error_response
from kvasir.config import ServerConfig
from kvasir.errors import RequestError
from kvasir.logs import log

# Most names whose refusal is logged.
MAX_LOGGED = 8
# A name or an address of version 4, or one of version 6 in brackets, each perhaps with a port.
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9._~-]+)(?::\d{0,5})?")


def names_of(settings: ServerConfig) -> tuple[str, ...] | None:
    """The names beside those of loopback that requests may give; None: any name.

    Without ``allowed_hosts``, names are checked only where a rebound name would open something: on a loopback address
    without a key. Elsewhere a server is reached by names that it cannot know.
    """
    if "*" in settings.allowed_hosts:
        return None
    bound = settings.host.strip("[]").lower()
    if not settings.allowed_hosts and (settings.uds or settings.api_key or not is_loopback(bound)):
        return None
    return (bound, *(name.lower().rstrip(".").strip("[]") for name in settings.allowed_hosts))


def is_loopback(name: str) -> bool:
    """Whether a name or address, in lower case and without brackets, always means this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class HostGuard:
    """ASGI middleware: 400 for a request without exactly one valid ``Host``, 403 for one whose name is not allowed.
    HTTP/1.0 needs no ``Host``: health checks of load balancers send none, and no browser speaks it."""

    def __init__(self, app: Callable, names: Collection[str] | None) -> None:
        self.app = app
        self.names = names
        self.logged: set[str] = set()

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "http" and (error := self._fault(scope)) is not None:
            return await error_response(error, scope)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _fault(self, scope: dict[str, Any]) -> RequestError | None:
        given = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"host"]
        if not given and scope.get("http_version") == "1.0":
            return None
        found = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None:
            what = "is not a host's name" if len(given) == 1 else "must be there once"
            return RequestError(f"the header Host {what}", code="bad_host")
        name = found[1].lower().strip("[]").rstrip(".")
        if self.names is None or is_loopback(name) or self._is_allowed(name):
            return None
        message = f"requests may not name this server '{name[:200]}'. Start it with --allowed-hosts {name[:200]}"
        if name not in self.logged and len(self.logged) < MAX_LOGGED:
            self.logged.add(name)
            log.warning("%s", message)
        return RequestError(message, status=403, code="host_refused")

    def _is_allowed(self, name: str) -> bool:
        assert self.names is not None
        return any(name == own or (own.startswith("*.") and name.endswith(own[1:])) for own in self.names)
