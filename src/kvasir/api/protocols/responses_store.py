"""Responses that are kept, so that clients can fetch, continue, cancel and delete them.

They live in memory, each for ``KEEP_SECONDS``, and those of one key in ``KEY_BYTES``; the oldest go first. A caller
sees the responses of its own key only. Background responses are also written to the server's journal
(``responses_journal``).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvasir.api.http.streaming import encode
from kvasir.errors import RequestError

if TYPE_CHECKING:
    from kvasir.api.protocols.responses_background import BackgroundRun

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
    """The kept responses by id, oldest first. Keeping one costs the same however many there are."""

    def __init__(self) -> None:
        # A plain dict would look through the places of all those forgotten before for its first entry.
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._by_owner: dict[str, OrderedDict[str, Stored]] = {}
        self._bytes: dict[str, int] = {}  # by owner
        self._whole = 0
        self._counted: dict[str, int] = {}  # bytes by id, as they went into the sums
        self._items: dict[str, str] = {}  # the ids of responses by those of their output items

    def __iter__(self) -> Iterator[Stored]:
        return iter(list(self._kept.values()))

    def put(self, stored: Stored) -> None:
        """Keep a response, and forget those that are too old or too much; work that goes on is never forgotten."""
        self._count(stored, stored.bytes)
        self._items |= dict.fromkeys(_item_ids(stored), stored.id)
        self._kept[stored.id] = self._by_owner.setdefault(stored.owner, OrderedDict())[stored.id] = stored
        oldest = time.time() - KEEP_SECONDS
        self._forget(self._kept, lambda old: old.created < oldest)
        self._forget(self._by_owner.get(stored.owner, {}), lambda old: self._bytes[old.owner] > KEY_BYTES)
        self._forget(self._kept, lambda old: self._whole > ALL_BYTES)

    def _count(self, stored: Stored, size: int) -> None:
        more = size - self._counted.pop(stored.id, 0)
        self._bytes[stored.owner] = self._bytes.get(stored.owner, 0) + more
        self._whole += more
        if size:
            self._counted[stored.id] = size

    def _forget(self, where: dict[str, Stored], needed: Callable[[Stored], bool]) -> None:
        """Forget responses from the oldest on, while that is needed."""
        going = 0  # work that goes on stands at the front and stays
        while (old := next(itertools.islice(where.values(), going, None), None)) is not None and needed(old):
            if old.going:
                going += 1
            else:
                self.drop(old.id)

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

    def item(self, name: str, owner: str, param: str) -> dict[str, Any]:
        """The output item of this id, of one of the caller's responses. Raises RequestError 404."""
        with contextlib.suppress(RequestError):
            stored = self.get(self._items.get(name, ""), owner)
            return next(item for item in stored.object["output"] if item.get("id") == name)
        raise RequestError(
            f"there is no item '{name[:200]}'; items of responses are kept with store=true, for "
            f"{KEEP_SECONDS / 3600:g} hours at most and in memory. Send the item itself",
            status=404,
            param=param,
            code="item_not_found",
        )

    def drop(self, name: str) -> None:
        """Forget a response."""
        stored = self._kept.pop(name, None)
        if stored is None:
            return
        self._count(stored, 0)
        for item in _item_ids(stored):
            self._items.pop(item, None)
        mine = self._by_owner[stored.owner]
        del mine[name]
        if not mine:
            del self._by_owner[stored.owner], self._bytes[stored.owner]


def _item_ids(stored: Stored) -> Iterator[str]:
    """The ids of a response's output items."""
    return (item["id"] for item in stored.object.get("output") or () if isinstance(item.get("id"), str))
