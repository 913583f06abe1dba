"""The messages between the client and the engine process: typed, tagged by name, carried as msgpack.

The client sends ``Hello`` on the process's standard input and everything else over the socket. Nothing is ever
unpickled; a message that does not match its type is refused whole.
"""

from __future__ import annotations

import msgspec

from kvasir.client import ipc
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from kvasir.types import AdapterInfo, EngineStats, Event, Load, ModelInfo, Request


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """The engine to build. ``spawned``: ``time.monotonic()`` at the start of the process, for the start-up breakdown.
    ``prefix_key``: 32 bytes that key the prefix index of one of several engines, which reports its load, its pages and
    the digest of its weights; empty: it is the only one. ``rank``: its number among them."""

    config: EngineConfig
    log_level: str = "INFO"
    spawned: float = 0.0
    prefix_key: bytes = b""
    rank: int = 0


class Submit(msgspec.Struct, tag=True):
    """Queue a request. ``ticket``: a number that is never used twice; the flight record names requests by it.
    ``age``: seconds since its arrival. The reader sets ``request.arrival`` by it, because hosts' clocks differ."""

    ticket: int
    request: Request
    age: float = 0.0


class Cancel(msgspec.Struct, tag=True):
    """End a request, or one branch of it."""

    request_id: str
    branch: int | None = None


class CancelMany(msgspec.Struct, tag=True):
    """End many at once: pairs of request id and branch (None for all branches)."""

    targets: list[tuple[str, int | None]]


class LoadAdapter(msgspec.Struct, tag=True):
    """Load an adapter from a folder. ``again``: at once, because requests that name it follow."""

    name: str
    path: str
    again: bool = False


class UnloadAdapter(msgspec.Struct, tag=True):
    """Forget an adapter that no request names."""

    name: str


class Forget(msgspec.Struct, tag=True):
    """Cancel all requests and count submissions from 0 again: the connection was cut, and the client has taken its
    requests back."""


class TellPages(msgspec.Struct, tag=True):
    """Send a ``PageNews`` of all pages, because one was lost."""


class Stop(msgspec.Struct, tag=True):
    """Close the engine and exit with status 0."""


class Ready(msgspec.Struct, tag=True):
    """The engine is built. ``startup``: seconds by phase."""

    info: ModelInfo
    startup: dict[str, float]


class Refused(msgspec.Struct, tag=True):
    """The configuration cannot work (a ``ConfigError``); the process exits."""

    message: str


class Events(msgspec.Struct, tag=True):
    """All events of one step, in order."""

    events: list[Event]


class AdapterNews(msgspec.Struct, tag=True):
    """The end of a load or an unload. ``info``: of an adapter that is loaded. ``status``: 0, or that of the error
    ``message``."""

    name: str
    info: AdapterInfo | None = None
    status: int = 0
    message: str = ""
    code: str | None = None


class Heartbeat(msgspec.Struct, tag=True):
    """The state of the process. ``load``: one of several replicas reports it, with the number of ``Submit`` messages
    that are counted in, and the number of its last ``PageNews``."""

    stats: EngineStats
    load: Load | None = None
    submits: int = 0
    page_news: int = 0


class PageNews(msgspec.Struct, tag=True):
    """Changes of the prefix index, as keys of pages. ``number``: counts from 1 in each process, so that a gap shows.
    ``whole``: ``stored`` is all there is."""

    number: int
    stored: list[bytes]
    evicted: list[bytes]
    whole: bool = False


class Crash(msgspec.Struct, tag=True):
    """An exception that the engine did not catch; the process exits right after."""

    traceback: str


ToEngine = Submit | Cancel | CancelMany | LoadAdapter | UnloadAdapter | Forget | TellPages | Stop
ToClient = Ready | Refused | Events | AdapterNews | Heartbeat | PageNews | Crash


def error_event(request: Request, error: RequestError) -> Event:
    """The event that ends ``request`` with ``error``."""
    return Event(
        kind="error",
        request_id=request.id,
        epoch=request.epoch,
        status=error.status,
        param=error.param,
        code=error.code,
        message=error.message,
        retry_after=error.retry_after,
    )


def check(request: Request) -> None:
    """Raise RequestError unless the engine process could read the request: one malformed request must not end it."""
    try:
        ipc.Decoder(ToEngine).body(ipc.encode(Submit(0, request, 0.0))[ipc.HEADER.size :])
    except ipc.FrameError as e:
        too_long = "limit" in str(e)
        raise RequestError(f"the request cannot be sent to the engine: {e}", status=413 if too_long else 400) from e
    except (TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"the request cannot be sent to the engine: {e}") from e
