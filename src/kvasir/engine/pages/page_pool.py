"""The pages of one cache group, and what each of them is used for.

A page is in exactly one state. It is *in use* if it stands in the tables of one or more sequences. Otherwise it is
*free*; *cached* (the prefix index knows it, and it may be taken, in the order of ``eviction.py``); or in *limbo* (a
launched step may still read or write it; when that step retires, it becomes free or cached). Page 0 of every group is a
dummy that pads tables and is never handed out.

A copy to or from a lower tier *holds* its pages until it has landed. A hold counts like a table: nobody writes to a
page that is held, or takes it for something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvasir.engine.pages.eviction import IdlePages
from kvasir.engine.pages.prefix import Node, PrefixIndex
from kvasir.engine.pages.returns import UNKNOWN, Kind
from kvasir.types import Sequence

OnFree = Callable[[int, list[int]], None]


def pages_for(num_tokens: int, page_slots: int) -> int:
    """Number of pages that hold ``num_tokens``."""
    return -(-num_tokens // page_slots)


def pages_to_write(seq: Sequence, group: int, num_tokens: int, page_slots: int) -> tuple[int, int]:
    """The first page of a group's table that holds positions from the next span's first to ``num_tokens - 1``, and the
    page after the last."""
    first, end = seq.place(group, seq.num_computed + seq.num_ahead), seq.place(group, num_tokens)
    return first // page_slots, pages_for(end, page_slots)


class PagePool:
    """The pages of one cache group. ``index`` is told when a cached page is taken for something else.

    ``cached``: none at first. ``nested``: a page is of use only together with those before it in its prefix.
    """

    def __init__(
        self,
        group: int,
        window: int | None,
        num_pages: int,
        index: PrefixIndex | None,
        cached: IdlePages,
        *,
        nested: bool,
        on_free: OnFree | None,
    ) -> None:
        self.group = group
        self.window = window
        self.nested = nested
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, 0, -1))
        self.cached = cached
        self.limbo: dict[int, int] = {}  # page -> the step that must retire first
        self.refs = [0] * num_pages  # number of tables that each page stands in, and of copies that hold it
        self.holds: Counter[int] = Counter()  # number of copies that hold each page
        self.fresh: dict[int, None] | None = None  # indexed pages that no lower tier has, oldest first; None: no tier
        self.sources: set[int] = set()  # given back in this plan, and read by its page copies
        self.evicted = [0, 0]  # cached pages that were taken: those that no lower tier had, and those that one had
        self.nodes: list[Node | None] = [None] * num_pages  # the prefix node that each page is the content of
        self.kinds: list[Kind] = [UNKNOWN] * num_pages  # of the prefix that each page was last used for
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
        evicted = [self._evict() for _ in range(count - len(taken))]
        if evicted and self._on_free:
            self._on_free(self.group, evicted)
        for page in (taken := taken + evicted):
            self.refs[page] = 1
        return taken

    def leaving(self) -> Iterator[int]:
        """The cached pages in the order in which they will be taken."""
        return iter(self.cached)

    def hold(self, page: int) -> None:
        """Keep a page that is not free for a copy, until ``let_go``."""
        self.share(page)
        self.holds[page] += 1

    def take_held(self, count: int) -> list[int]:
        """Take ``count`` pages for a copy into them. The caller has checked ``num_available``."""
        taken = self.take(count)
        self.holds.update(taken)
        return taken

    def let_go(self, pages: Iterable[int], after_step: int | None) -> None:
        """End the holds of copies that have landed. The first of ``pages`` is the first to be taken again."""
        pages = list(pages)
        self.holds.subtract(pages)
        self.holds = +self.holds
        self.drop(pages, after_step)

    def num_landing(self) -> int:
        """Number of pages that come back when the copies in flight have landed."""
        return sum(self.refs[page] == holds for page, holds in self.holds.items())

    def share(self, page: int) -> None:
        """Count one reference more of a page that is in use, cached or in limbo."""
        if not self.refs[page] and self.limbo.pop(page, None) is None:
            self.cached.remove(page)
        self.refs[page] += 1

    def drop(self, pages: Iterable[int], after_step: int | None, kind: Kind | None = None) -> None:
        """Count one reference less of each page. The first of ``pages`` is the first to be taken again. ``kind``: of
        the prefix that they were used for; None: as it was noted before."""
        idle = []
        for page in pages:
            assert self.refs[page] > 0, f"page {page} of group {self.group} is given back twice"
            self.refs[page] -= 1
            if self.refs[page]:
                continue
            if kind is not None:
                self.kinds[page] = kind
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
        if self.nested and node.parent.number and not node.parent.pages[self.group]:
            self._index.epoch += 1  # who found this node while its parent had a page must look again
        self._index.put(node, self.group, page)
        self.nodes[page] = node
        if self.fresh is not None:
            self.fresh[page] = None

    def unlist(self, page: int) -> None:
        """Make the prefix index forget a page."""
        node = self.nodes[page]
        self.nodes[page] = None
        if self.nested and node.children[self.group]:
            self._index.epoch += 1  # the pages behind it are of no use any more
        if self.fresh is not None:
            self.fresh.pop(page, None)
        self._index.take(node, self.group)

    def _evict(self) -> int:
        """Take the next cached page out of the index. One with children that have pages stays, if another can go."""
        for _ in range(len(self.cached)):
            page = self.cached.first()
            if not self.nested or not self.nodes[page].children[self.group]:
                break
            self.cached.pass_over(page)
        self.cached.remove(page)
        self.evicted[any(group == self.group for _, group in self.nodes[page].slots)] += 1
        self.unlist(page)
        return page

    def _rest(self, pages: list[int]) -> None:
        freed = []
        for page in pages:
            if self.nodes[page] is None:
                freed.append(page)
            else:
                self.cached.add(page, self.kinds[page], self.nodes[page].number)
        self.free.extend(freed)
        if freed and self._on_free:
            self._on_free(self.group, freed)
