"""Responses that are kept, so that clients can fetch, continue, cancel and delete them.

They live in memory, each for ``KEEP_SECONDS``, and those of one key in ``KEY_BYTES``; the oldest go first. A caller
sees the responses of its own key only. Background responses are also written to the server's journal
(``responses_journal``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvasir.api.streaming import encode
from kvasir.errors import RequestError

if TYPE_CHECKING:
    from kvasir.api.responses_background import BackgroundRun

# Seconds that a response is kept after it was created: one day.
KEEP_SECONDS = 86_400.0
# Most bytes of the responses of one key, as JSON: a thousand conversations of 64 KiB.
KEY_BYTES = 64 << 20
# Most bytes of the responses of all keys.
ALL_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Stored:
    """One response. ``owner``: the caller's key. ``created``: Unix time. ``items``: the conversation up to and with its
    output. ``run``: its work, if that is done in the background. ``size``: bytes of items and object as JSON."""

    id: str
    owner: str
    created: float
    items: list[dict[str, Any]]
    object: dict[str, Any]
    run: BackgroundRun | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.measure()

    def measure(self) -> None:
        """Bring ``size`` up to date. Conversations share items with those that they continue; each counts its own."""
        self.size = len(encode(self.items)) + len(encode(self.object))

    @property
    def bytes(self) -> int:
        return self.size + (self.run.num_bytes if self.run is not None else 0)

    @property
    def going(self) -> bool:
        return self.run is not None and self.run.going

    def current(self) -> dict[str, Any]:
        """The response as clients see it now."""
        return self.run.object() if self.run is not None else self.object

    def conversation(self) -> list[dict[str, Any]]:
        """The items that a continuation starts from. Raises RequestError for a response without a whole answer."""
        status = self.current()["status"]
        if status not in ("completed", "incomplete"):
            raise RequestError(
                f"the response '{self.id}' is {status}, so it cannot be continued",
                param="previous_response_id",
                code="response_not_completed",
            )
        return self.items


class ResponseStore:
    """The kept responses by id, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, Stored] = {}

    def __iter__(self) -> Iterator[Stored]:
        return iter(list(self._kept.values()))

    def put(self, stored: Stored) -> None:
        """Keep a response, and forget those that are too old or too much; work that goes on is never forgotten."""
        self._kept[stored.id] = stored
        self.tidy()

    def tidy(self) -> None:
        """Forget the responses that are beyond the bounds."""
        oldest = time.time() - KEEP_SECONDS
        for old in [s for s in self if s.created < oldest and not s.going]:
            self.drop(old.id)
        totals: dict[str, int] = {}
        for stored in self:
            totals[stored.owner] = totals.get(stored.owner, 0) + stored.bytes
        whole = sum(totals.values())
        for old in [s for s in self if not s.going]:
            if totals[old.owner] > KEY_BYTES or whole > ALL_BYTES:
                self.drop(old.id)
                totals[old.owner] -= old.bytes
                whole -= old.bytes

    def get(self, name: str, owner: str, param: str = "response_id") -> Stored:
        """The caller's response of this id. Raises RequestError 404, also for a response of another key."""
        stored = self._kept.get(name)
        if (
            stored is None
            or stored.owner != owner
            or (stored.created < time.time() - KEEP_SECONDS and not stored.going)
        ):
            raise RequestError(
                f"there is no response '{name[:200]}'; responses are kept with store=true, for "
                f"{KEEP_SECONDS / 3600:g} hours at most and in memory",
                status=404,
                param=param,
                code="response_not_found",
            )
        return stored

    def drop(self, name: str) -> None:
        """Forget a response."""
        self._kept.pop(name, None)
