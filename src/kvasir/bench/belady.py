"""Belady's bound: the most hits that any rule of eviction can have on a given sequence of page uses.

The optimal rule looks into the future and evicts the page whose next use is farthest away (Belady, "A study of
replacement algorithms for a virtual-storage computer", 1966). It may also decline to keep a page at all. A prefix cache
can do no better: it keeps whole pages, too, and finds a page only together with those before it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Sequence


class PageUses:
    """Uses of pages in the order of time: a page is used when it is found in a cache, and when it has been computed.

    A cache that held a page at a use had held it since the use before. So no cache has more hits on these uses than
    ``optimal_hits`` for as many pages.
    """

    def __init__(self) -> None:
        self.numbers = array("q")
        self._known: dict[Hashable, int] = {}

    def add(self, key: Hashable) -> None:
        self.numbers.append(self._known.setdefault(key, len(self._known)))


def optimal_hits(uses: Sequence[int], capacity: int) -> int:
    """Number of ``uses`` that find their page in a cache of ``capacity`` pages with the optimal rule."""
    never = len(uses)
    following, last = [never] * len(uses), {}
    for i in range(len(uses) - 1, -1, -1):
        following[i] = last.get(uses[i], never)
        last[uses[i]] = i
    held: dict[int, int] = {}  # page -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, page); outdated entries are skipped
    hits = 0
    for page, after in zip(uses, following):
        found = held.pop(page, None) is not None
        hits += found
        if after == never:
            continue
        held[page] = after
        heapq.heappush(farthest, (-after, page))
        while len(held) > capacity:
            use, evicted = heapq.heappop(farthest)
            if held.get(evicted) == -use:
                del held[evicted]
    return hits
