"""Pages in each replica's prefix cache: those that its engine reports, and those that it is about to compute.

Engines send the keys of the pages that they store and evict, in numbered messages. The key of the hash is the front's,
so the keys of a prompt are the same here and there (``client/page_keys.py``). After a gap in the numbers a replica's
pages are asked for again as a whole. Until a request ends, its own pages count as cached where it was sent: requests
with the same prefix that come before the first report should follow it.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, field

from kvasir.client import messages, page_keys
from kvasir.types import ModelInfo, Request

# Messages after which a whole report that was asked for is asked for again.
PATIENCE = 10


@dataclass(slots=True)
class Known:
    """The state of one replica. ``number``: of the last message that was applied. ``asked``: number of the message
    after which the whole was asked for; None: nothing is missing."""

    pages: set[bytes] = field(default_factory=set)
    expected: Counter[bytes] = field(default_factory=Counter)
    number: int = 0
    asked: int | None = None


class PrefixMap:
    """Keys of pages by the number of the replica. ``secret`` keys the hash, so nobody can construct a collision."""

    def __init__(self) -> None:
        self.secret = os.urandom(32)
        self._known: dict[int, Known] = {}
        self._sent: dict[str, tuple[int, list[bytes]]] = {}  # by request: where it is, and its keys

    def keys(self, request: Request, info: ModelInfo) -> list[bytes]:
        """The keys of the full pages of what a replica computes for ``request`` before its next token; [] for a replica
        that does not cache."""
        size = info.page_slots
        if not info.prefix_root:
            return []
        tokens = request.prompt_ids + request.emitted[0] if request.emitted else request.prompt_ids
        digest = functools.partial(page_keys.keyed, self.secret)
        key = page_keys.tenant_key(digest, info.prefix_root, request.tenant)
        found = []
        for end in range(size, len(tokens) + 1, size):
            key = page_keys.page_key(digest, key, tokens[end - size : end], request.kv_variant(end))
            found.append(key)
        return found

    def cached(self, replica: int, keys: list[bytes]) -> int:
        """Number of pages of the longest prefix that a replica has."""
        known = self._of(replica)
        has, soon = known.pages, known.expected
        return next((i for i, key in enumerate(keys) if key not in has and key not in soon), len(keys))

    def expect(self, replica: int, request_id: str, keys: list[bytes]) -> None:
        """Note that a replica is about to compute a request."""
        self.settle(request_id)
        self._sent[request_id] = replica, keys
        self._of(replica).expected.update(keys)

    def settle(self, request_id: str) -> None:
        """Note that a request has ended or was taken back: what its replica reports is all there is."""
        replica, keys = self._sent.pop(request_id, (-1, []))
        if keys:
            expected = self._of(replica).expected
            for key in keys:
                expected[key] -= 1
                if expected[key] <= 0:
                    del expected[key]

    def take(self, replica: int, news: messages.PageNews) -> bool:
        """Apply a message. Returns whether the whole must be asked for, because one before it is missing."""
        known = self._of(replica)
        if news.whole:
            known.pages, known.number, known.asked = set(news.stored), news.number, None
            return False
        if known.asked is None and news.number == known.number + 1:
            known.pages.update(news.stored)
            known.pages.difference_update(news.evicted)
            known.number = news.number
            return False
        return self.missed(replica, news.number)

    def missed(self, replica: int, number: int) -> bool:
        """Whether the whole must be asked for, given that messages up to ``number`` were sent."""
        known = self._of(replica)
        if number <= known.number or (known.asked is not None and number < known.asked + PATIENCE):
            return False
        known.asked = number
        return True

    def pages(self, replica: int) -> set[bytes]:
        """The pages that a replica has reported."""
        return self._of(replica).pages

    def forget(self, replica: int) -> None:
        """Note that a replica's process is gone, with its cache and its requests."""
        self._known.pop(replica, None)
        for request_id in [request_id for request_id, (where, _) in self._sent.items() if where == replica]:
            del self._sent[request_id]

    def _of(self, replica: int) -> Known:
        return self._known.setdefault(replica, Known())
