"""The pages of one cache group, and what each of them is used for.

A page is in exactly one state. It is *in use* if it stands in the tables of one or more sequences. Otherwise it is
*free*; *cached* (the prefix index knows it, and it may be taken, least recently used first); or in *limbo* (a launched
step may still read or write it; when that step retires, it becomes free or cached). Page 0 of every group is a dummy
that pads tables and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvasir.engine.prefix import Node, PrefixIndex

OnFree = Callable[[int, list[int]], None]


class PagePool:
    """The pages of one cache group. ``index`` is told when a cached page is taken for something else."""

    def __init__(
        self, group: int, window: int | None, num_pages: int, index: PrefixIndex | None, on_free: OnFree | None
    ) -> None:
        self.group = group
        self.window = window
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.limbo: dict[int, int] = {}  # page -> the step that must retire first
        self.refs = [0] * num_pages  # number of tables that each page stands in
        self.nodes: list[Node | None] = [None] * num_pages  # the prefix node that each page is the content of
        self._index = index
        self._on_free = on_free

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def wanted(self, table: list[int], first: int, end: int) -> tuple[list[int], int]:
        """Return what must change before pages ``first`` to ``end`` of ``table`` can be written: the places of pages
        that other tables share, and the number of pages that it lacks."""
        return [i for i in range(first, min(end, len(table))) if self.refs[table[i]] > 1], max(0, end - len(table))

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages, each with one reference. The caller has checked ``num_available``."""
        taken = [self.free.pop() for _ in range(min(count, len(self.free)))]
        evicted = [self.cached.popitem(last=False)[0] for _ in range(count - len(taken))]
        for page in evicted:
            self.unlist(page)
        if evicted and self._on_free:
            self._on_free(self.group, evicted)
        for page in (taken := taken + evicted):
            self.refs[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Count one reference more of a page that is in use, cached or in limbo."""
        if not self.refs[page] and self.limbo.pop(page, None) is None:
            del self.cached[page]
        self.refs[page] += 1

    def drop(self, pages: Iterable[int], after_step: int | None) -> None:
        """Count one reference less of each page. The first of ``pages`` is the first to be taken again."""
        idle = []
        for page in pages:
            assert self.refs[page] > 0, f"page {page} of group {self.group} is given back twice"
            self.refs[page] -= 1
            if self.refs[page]:
                continue
            if after_step is None:
                idle.append(page)
            else:
                self.limbo[page] = after_step
        self._rest(idle)

    def retire(self, step: int) -> None:
        """Free or cache the pages in limbo that only steps up to ``step`` could use."""
        idle = [page for page, after in self.limbo.items() if after <= step]
        for page in idle:
            del self.limbo[page]
        self._rest(idle)

    def enlist(self, page: int, node: Node) -> None:
        """Make the prefix index know a page as the content of ``node``."""
        self._index.put(node, self.group, page)
        self.nodes[page] = node

    def unlist(self, page: int) -> None:
        """Make the prefix index forget a page."""
        node = self.nodes[page]
        self.nodes[page] = None
        self._index.take(node, self.group)

    def _rest(self, pages: list[int]) -> None:
        freed = []
        for page in pages:
            if self.nodes[page] is None:
                freed.append(page)
            else:
                self.cached[page] = None
        self.free.extend(freed)
        if freed and self._on_free:
            self._on_free(self.group, freed)
