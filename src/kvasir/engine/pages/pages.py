"""Page tables and their accounting: which sequences use which page of each cache group, and which pages may be taken.

What a page is used for is in ``page_pool.py``. Nothing here knows tensors. Bytes move only where ``grow`` says so, by
appending a ``PageCopy``.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Iterable

from kvasir.engine.pages.checks import check_pages
from kvasir.engine.pages.eviction import ByRecency, Eviction
from kvasir.engine.pages.page_pool import OnFree, PagePool, pages_to_write
from kvasir.engine.pages.prefix import Node, PrefixIndex
from kvasir.engine.pages.returns import Returns
from kvasir.engine.pages.states import StatePages
from kvasir.engine.pages.tier_seam import LowerTiers
from kvasir.engine.pages.visits import Visits
from kvasir.types import CacheGroup, PageCopy, Sequence, Span


class PageManager:
    """Pages of every cache group, the page tables of running sequences, and the prefix index over committed pages.

    ``num_pages``: per group, the dummy included. ``prefix_root``: bytes that all keys start from; None: no prefix
    caching.
    ``on_free(group, pages)``: called with pages whose content is gone (freed, or taken from the cache).
    ``eviction``: the order in which idle pages are taken; None: the least recently used first.
    ``state_interval``: tokens from one snapshot of a state to the next, a multiple of ``page_slots``.

    ``pools`` are those of groups whose pages hold tokens. A group of states, if there is one, comes last: ``states``.

    Methods that give back pages take ``after_step``, the last launched step that may still use them. The pages return
    to the pool at ``retire`` of that step. None: no step is in flight.
    """

    def __init__(
        self,
        groups: abc.Sequence[CacheGroup],
        num_pages: abc.Sequence[int],
        page_slots: int,
        prefix_root: bytes | None,
        state_interval: int = 0,
        *,
        eviction: Eviction | None = None,
        on_free: OnFree | None = None,
    ) -> None:
        assert len(groups) == len(num_pages) and all(n > 1 for n in num_pages), "every group needs page 0 and one more"
        self.groups = tuple(groups)
        self.page_slots = page_slots
        self.index = None if prefix_root is None else PrefixIndex(prefix_root, page_slots, len(groups))
        self.returns = Returns()
        eviction = eviction or ByRecency()
        self.all_pools = [
            PagePool(
                g,
                group.window,
                n,
                self.index,
                eviction.idle_pages(self.returns),
                nested=group.kind == "pages" and group.window is None,
                on_free=on_free,
            )
            for g, (group, n) in enumerate(zip(groups, num_pages))
        ]
        self.pools = [pool for pool, group in zip(self.all_pools, groups) if group.kind == "pages"]
        self.states: StatePages | None = None
        if len(self.pools) < len(groups):
            assert [group.kind for group in groups[len(self.pools) :]] == ["state"], "one group of states, the last"
            self.states = StatePages(self.all_pools[-1], page_slots, 0 if self.index is None else state_interval)
        self.queried_tokens = 0  # prompt tokens looked up in the prefix index at first admissions
        self.cached_tokens = 0  # those of them that were found
        self._windows = [pool for pool in self.pools if pool.window is not None]
        self.tiers: LowerTiers | None = None  # they take pages that leave the device, and bring them back
        self._nested = [pool.group for pool in self.all_pools if pool.nested]
        self.visits = Visits(self.index, self.returns, page_slots, [pool for pool in self.pools if pool.nested])
        # By sequence: the number of its pages in the index, and the node of the last (None: stop indexing it).
        self.tails: dict[Sequence, tuple[int, Node | None]] = {}

    # ------------------------------------------------------------------------------------------------------- numbers

    @property
    def num_total(self) -> int:
        return sum(pool.num_pages - 1 for pool in self.all_pools)

    @property
    def num_free(self) -> int:
        """Number of pages that can be handed out now: free and cached ones."""
        return sum(pool.num_available for pool in self.all_pools)

    @property
    def num_cached(self) -> int:
        """Number of pages that only the prefix index keeps."""
        return sum(len(pool.cached) for pool in self.all_pools)

    @property
    def num_limbo(self) -> int:
        return sum(len(pool.limbo) for pool in self.all_pools)

    def fits(self, num_tokens: int, max_span: int) -> bool:
        """Whether a sequence of ``num_tokens`` could run alone, in spans of at most ``max_span`` rows."""
        pages = -(-num_tokens // self.page_slots)
        room = self.states is None or self.states.pool.num_pages > 2  # a page to read, and one to write
        return room and all(min(pages, self._peak(pool, max_span)) < pool.num_pages for pool in self.pools)

    def missing(self, seq: Sequence, num_tokens: int, max_span: int) -> list[int]:
        """Number of pages by group that ``seq``, which has tables, still needs until ``num_tokens`` are computed."""
        missing = []
        for pool, table in zip(self.pools, seq.tables):
            pages = -(-seq.most_places(pool.group, num_tokens) // self.page_slots)
            in_use = len(table) - table.count(0) if pool.window else 0
            missing.append(max(0, min(pages - len(table), self._peak(pool, max_span) - in_use)))
        if self.states is not None:
            missing.append(self.states.missing(seq, num_tokens - seq.num_computed - seq.num_ahead))
        return missing

    # ------------------------------------------------------------------------------------------------ prefix and fork

    def match(self, seq: Sequence, limit: int | None = None) -> int:
        """Length in tokens of the longest cached prefix of ``seq``, in whole pages. Changes nothing.

        At most ``num_tokens - 1`` and ``limit`` tokens. Every group must still have all pages that the next row sees,
        and one of states a snapshot there.
        """
        return self._match(seq, limit)[1]

    def fetch(self, seq: Sequence, num_hit: int, limit: int | None) -> bool:
        """Whether ``seq``, for which there is room, should wait because more of its prefix comes from a lower tier."""
        return self.tiers is not None and self.tiers.fetch(seq, num_hit, limit)

    def arriving(self, seq: Sequence) -> bool:
        """Whether pages for which ``seq`` waits are still being copied."""
        return self.tiers is not None and self.tiers.arriving(seq)

    def _match(self, seq: Sequence, limit: int | None = None) -> tuple[int, int]:
        """Lengths of the longest cached prefix of ``seq`` without regard to states, and of that with them."""
        if self.index is None:
            return 0, 0
        size, states = self.page_slots, self.states
        limit = len(seq.tokens) - 1 if limit is None else min(limit, len(seq.tokens) - 1)
        node = self.index.deepest(seq, limit // size, self._nested)
        if not self._windows and states is None:
            return (node.number * size if node else 0,) * 2
        up = [node] if node else []  # from the deepest node towards the root, as far as somebody looked
        held, end = None, node.number if node else 0
        while end:
            gap = max((self._gap(pool, up, end) for pool in self._windows), default=-1)
            if gap >= 0:
                end = gap
                continue
            held = end if held is None else held
            if states is None or _upward(up, end).pages[states.group]:
                return held * size, end * size
            end -= 1
        return (held or 0) * size, 0

    def _gap(self, pool: PagePool, up: list[Node], end: int) -> int:
        """The last page that a window misses of those that the row after ``end`` pages sees; -1: none."""
        for page in range(end - 1, self.first(pool, end * self.page_slots) - 1, -1):
            if not _upward(up, page + 1).pages[pool.group]:
                return page
        return -1

    def page_key(self, seq: Sequence, page: int) -> bytes | None:
        """The prefix key of page ``page`` of ``seq.tokens``; None when it is not full or caching is off."""
        if self.index is None or (page + 1) * self.page_slots > len(seq.tokens):
            return None
        return self.index.key(seq, page)

    def place_key(self, seq: Sequence, num_tokens: int) -> bytes:
        """The prefix key of all full pages before position ``num_tokens`` of ``seq``; there must be an index."""
        return self.index.key(seq, num_tokens // self.page_slots - 1)

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether ``parent`` still has all pages that a child starting at ``num_tokens`` sees."""
        end = -(-num_tokens // self.page_slots)
        return (
            bool(parent.tables)
            and not parent.forgotten
            and parent.num_computed >= num_tokens
            and all(all(table[self.first(pool, num_tokens) : end]) for pool, table in zip(self.pools, parent.tables))
            and (self.states is None or self.states.can_fork(parent, num_tokens))
        )

    def lacking(
        self,
        seq: Sequence,
        num_hit: int,
        num_tokens: int,
        *,
        max_span: int | None = None,
        promised: abc.Sequence[int] | None = None,
        parent: Sequence | None = None,
    ) -> list[int]:
        """Number of pages that each group is short of to compute ``num_tokens`` tokens of ``seq`` from ``num_hit`` on.

        ``max_span``: most rows of a span. ``promised``: pages by group that are promised to others. ``parent``: the
        sequence to fork from, if the hit is not one in the prefix index.
        """
        pages = -(-num_tokens // self.page_slots)
        short = []
        for g, (pool, hit) in enumerate(zip(self.pools, self._hit_pages(seq, num_hit, parent))):
            kept = sum(1 for page in hit[: num_hit // self.page_slots] if page)
            revived = 0 if parent else sum(1 for page in hit if page in pool.cached)
            need = pages - num_hit // self.page_slots
            if pool.window is not None:
                need = min(need, max(0, self._peak(pool, max_span or num_tokens) - kept))
            reserved = promised[g] if promised else 0
            short.append(max(0, need + revived + reserved - pool.num_available))
        if self.states is not None:
            pool, reserved = self.states.pool, promised[-1] if promised else 0
            revived = num_hit > 0 and parent is None and self._snapshot(seq, num_hit) in pool.cached
            short.append(max(0, 1 + revived + reserved - pool.num_available))
        return short

    def admit(self, seq: Sequence, num_hit: int) -> None:
        """Give ``seq`` its tables, with the pages of a prefix of ``num_hit`` tokens that ``match`` found."""
        tables = self._hit_pages(seq, num_hit, None)
        if self.states is not None:
            tables.append([self._snapshot(seq, num_hit)] if num_hit else [])
            # Other prompts may leave a cached one at the same place as this prompt.
            stops = {self._match(seq)[0], (len(seq.tokens) - 1) // self.page_slots * self.page_slots}
            self.states.adopt(seq, tables[-1], num_hit, (stop for stop in stops if stop > num_hit))
        self._adopt(seq, tables, num_hit)
        self._count_hit(seq, num_hit)
        if self.index is not None:
            node = self.index.deepest(seq, num_hit // self.page_slots, self._nested)
            self._tail(seq, node.number if node else 0, node or self.index.tenant(seq))

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start ``child`` with the first ``num_tokens`` positions of ``parent``, in its pages (see ``can_fork``)."""
        assert self.can_fork(parent, num_tokens), f"{parent} no longer has the pages of {num_tokens} positions"
        tables = self._hit_pages(child, num_tokens, parent)
        if self.states is not None:
            tables.append(self.states.fork(parent, child, num_tokens))
        self._adopt(child, tables, num_tokens)
        if self.index is not None:
            self._tail(child, num_tokens // self.page_slots, self._node_at(parent, num_tokens))

    def resume(self, holder: Sequence, seq: Sequence, num_tokens: int) -> None:
        """Fork from a lease. It counts as a prefix hit, like those of ``admit``, once for all branches of a request."""
        self.fork(holder, seq, num_tokens)
        self._count_hit(seq, num_tokens)

    def _node_at(self, seq: Sequence, num_tokens: int) -> Node | None:
        """The node of the last full page before committed position ``num_tokens`` of ``seq``, which has tables."""
        count, node = self.tails[seq]
        for _ in range(count - num_tokens // self.page_slots if node else 0):
            node = node.parent
        return node

    def _snapshot(self, seq: Sequence, num_tokens: int) -> int:
        """The snapshot of a cached prefix of so many tokens."""
        node = self.index.deepest(seq, num_tokens // self.page_slots, self._nested)
        return node.pages[self.states.group]

    def forget_prefixes(self) -> None:
        """Hide all that is indexed so far from later lookups, because weights have changed."""
        if self.index is not None:
            self.index.forget()

    # ------------------------------------------------------------------------------------------------ slots and pages

    def grow(self, seq: Sequence, num_tokens: int, copies: list[PageCopy], states: bool = True) -> bool:
        """Make the slots from the next span's first position to position ``num_tokens - 1`` exist and writable.

        Takes free pages, then cached ones. A page that other tables share is replaced by a copy, appended to
        ``copies``, which run in order before the forward. All or nothing. ``states``: whether the rows move states.
        """
        first, end = (seq.num_computed + seq.num_ahead) // self.page_slots, -(-num_tokens // self.page_slots)
        wanted = []  # by group that needs pages; none is taken before all groups are known to have them
        for pool, table in zip(self.pools, seq.tables):
            if seq.forgotten:
                first, end = pages_to_write(seq, pool.group, num_tokens, self.page_slots)
            if end == first + 1 <= len(table) and pool.refs[table[first]] == 1 and pool.nodes[table[first]] is None:
                continue  # the common case: one more token in a page of its own
            shared, fresh = pool.wanted(table, first, end)
            if fresh + len(shared) > pool.num_available:
                return False
            wanted.append((pool, table, shared, range(first, min(end, len(table))), fresh))
        if self.states is not None and states:
            length = num_tokens - seq.num_computed - seq.num_ahead
            if not self.states.has(seq, length):
                return False
            self.states.grow(seq, length)
        for pool, table, shared, written, fresh in wanted:
            for i in written:
                if pool.nodes[table[i]] is not None and pool.refs[table[i]] == 1:
                    pool.unlist(table[i])  # the only user of an indexed page takes it out of the index to write to it
            taken = pool.take(len(shared) + fresh)
            for i in shared:
                source, table[i] = table[i], taken.pop()
                seq.num_sent = min(seq.num_sent, i)  # the device's copy of the table is out of date from here on
                copies.append(PageCopy(pool.group, source, table[i]))
                pool.drop([source], None)
                if self.tiers is not None:
                    pool.sources.add(source)
            table.extend(taken)
        return True

    def awaits(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether all pages that ``grow`` lacks are about to come back, for each group from its own limbo and from
        copies that land."""
        for pool, table in zip(self.pools, seq.tables):
            shared, fresh = pool.wanted(table, *pages_to_write(seq, pool.group, num_tokens, self.page_slots))
            if fresh + len(shared) > pool.num_available + len(pool.limbo) + pool.num_landing():
                return False
        if self.states is not None:
            needed = self.states.needs(seq, num_tokens - seq.num_computed - seq.num_ahead)
            return needed <= self.states.pool.num_available + self.states.returning()
        return True

    def commits_between(self, before: int, num_computed: int) -> bool:
        """Whether there is something to ``commit`` once a sequence advanced from ``before`` to ``num_computed``."""
        return before // self.page_slots != num_computed // self.page_slots or bool(self._windows)

    def commit(self, seq: Sequence, after_step: int | None = None) -> None:
        """Index the pages that are full now that ``num_computed`` advanced, and give back those that left a window."""
        if self.index is not None:
            count, node = self.tails[seq]
            if node is not None and seq.num_computed // self.page_slots > count:
                self._enlist(seq, count, node)
        for pool in self._windows:
            table = seq.tables[pool.group]
            i = end = min(self.first(pool, seq.num_computed), len(table))
            while i and table[i - 1]:
                i -= 1
            if i < end:
                pool.drop(table[i:end], after_step, self.visits.kind(seq))
                table[i:end] = [0] * (end - i)

    def truncate(self, seq: Sequence, num_tokens: int, after_step: int | None = None) -> None:
        """Give back the pages after the first ``num_tokens`` positions, as look-ahead that was not needed."""
        assert num_tokens >= seq.num_computed, "computed positions are never given back"
        for pool, table in zip(self.pools, seq.tables):
            keep = -(-seq.place(pool.group, num_tokens) // self.page_slots)
            if keep < len(table):
                pool.drop(reversed(table[keep:]), after_step)
                del table[keep:]
            seq.num_sent = min(seq.num_sent, keep)

    def release(self, seq: Sequence, after_step: int | None = None) -> None:
        """Give back everything, last page first, so that the tail of a prefix is taken for something else before its
        head."""
        kind = self.visits.kind(seq)
        for pool, table in zip(self.pools, seq.tables):
            pool.drop((page for page in reversed(table) if page), after_step, kind)
        if self.states is not None:
            last = seq.num_computed // self.page_slots * self.page_slots
            self.states.release(seq, self._node_at(seq, last) if last and self.index else None, kind, after_step)
        seq.tables, seq.forgotten = [], ()
        if seq.forgetting is not None:
            seq.forgetting.restart()
        seq.num_sent = 0
        _, node = self.tails.pop(seq, (0, None))
        if node is not None:
            self.index.drop(node)

    def retire(self, step: int) -> None:
        """Return to the pool the pages that were given back with ``after_step`` up to ``step``, which has ended."""
        for pool in self.all_pools:
            if pool.limbo:
                pool.retire(step)
        if self.tiers is not None and self.states is not None:
            self.states.retire(step)

    def freed_by(self, seqs: abc.Collection[Sequence]) -> list[int]:
        """Number of pages by group that would become available if all of ``seqs`` were released."""
        uses: list[Counter] = [Counter() for _ in self.pools]
        for seq in seqs:
            for counter, table in zip(uses, seq.tables):
                counter.update(table)
        pairs = zip(self.pools, uses)
        freed = [sum(1 for page, n in counter.items() if page and pool.refs[page] == n) for pool, counter in pairs]
        return freed if self.states is None else [*freed, self.states.freed_by(seqs)]

    # ----------------------------------------------------------------------------------------- states, around a plan

    def begin(self, step: int) -> list[PageCopy]:
        """Begin the plan of a step: take the snapshots that are due. The copies run before the forward."""
        if self.tiers is not None:
            for pool in self.pools:
                pool.sources.clear()
        if self.states is None:
            return []
        due = self.states.due().items()
        return self.states.begin(step, {seq: (self._node_at(seq, at), self.visits.kind(seq)) for seq, at in due})

    def place(self, spans: Iterable[Span], copies: list[PageCopy]) -> None:
        """End a plan: decide which states its spans read and write."""
        if self.states is not None:
            for span in spans:
                self.states.place(span, copies)
            self.states.end()

    def advance(self, span: Span, after_step: int | None = None) -> None:
        """Commit the state that a span has written, once its sequence has advanced."""
        if self.states is not None:
            node = None if span.start % self.page_slots or not self.index else self._node_at(span.seq, span.start)
            self.states.advance(span, node, after_step)

    def undo(self, span: Span, after_step: int | None = None) -> None:
        """Take back the state of a span that will be planned again."""
        if self.states is not None:
            self.states.undo(span, after_step)

    def lost(self, copies: Iterable[PageCopy]) -> None:
        """Forget the snapshots that were not written because these copies failed."""
        if self.states is not None:
            self.states.forget(copy.target for copy in copies if copy.group == self.states.group)

    def cut(self, seq: Sequence, start: int, length: int) -> int:
        """Length of a span of a prompt with up to ``length`` rows from ``start`` on: it ends where a snapshot is
        wanted."""
        return length if self.states is None else self.states.next_stop(seq, start, start + length) - start

    # -------------------------------------------------------------------------------------------------------- private

    def first(self, pool: PagePool, num_tokens: int) -> int:
        """The first page that the row at position ``num_tokens`` sees. It sees ``window`` positions with itself."""
        if pool.window is None:
            return 0
        return max(0, num_tokens - pool.window + 1) // self.page_slots

    def _peak(self, pool: PagePool, max_span: int) -> int:
        """Most pages a sequence has at once: for ``window - 1`` positions and a span, at the worst alignment."""
        if pool.window is None:
            return pool.num_pages  # no bound but the length itself
        return (pool.window - 1 + max_span + 2 * self.page_slots - 2) // self.page_slots

    def _hit_pages(self, seq: Sequence, num_hit: int, parent: Sequence | None) -> list[list[int]]:
        """Table of the first ``num_hit`` positions by group, with 0 for pages that the next row does not see."""
        end = -(-num_hit // self.page_slots)
        if parent is not None:
            tables = [table[:end] for _, table in zip(self.pools, parent.tables)]
        else:
            up = [self.index.deepest(seq, end, self._nested)] if end else []
            if up:
                assert up[0] is not None and up[0].number == end, "the hit is longer than the cached prefix"
                _upward(up, 1)
            nodes = up[::-1]
            tables = [[node.pages[pool.group] for node in nodes] for pool in self.pools]
        for pool, table in zip(self.pools, tables):
            first = self.first(pool, num_hit)
            table[:first] = [0] * first
            assert all(table[first:]), "the hit names a page that is gone"
        return tables

    def _count_hit(self, seq: Sequence, num_hit: int) -> None:
        """Count the tokens that a new prompt found in the cache. Later branches may find what the first has computed,
        so only the first counts."""
        if not seq.num_preempted and not seq.branch:
            seq.num_cached = min(num_hit, seq.num_prompt)
            self.queried_tokens += seq.num_prompt if self.index else 0
            self.cached_tokens += seq.num_cached

    def _adopt(self, seq: Sequence, tables: list[list[int]], num_tokens: int) -> None:
        assert not seq.tables, f"{seq} has pages already"
        for pool, table in zip(self.all_pools, tables):
            for page in table:
                if page:
                    pool.share(page)
        seq.tables = tables
        seq.num_computed = num_tokens

    def _tail(self, seq: Sequence, count: int, node: Node | None) -> None:
        if node is not None:
            node.users += 1
        self.tails[seq] = (count, node)

    def _enlist(self, seq: Sequence, count: int, node: Node) -> None:
        """Index the full pages from page ``count`` on. Pages whose content is indexed already stay private."""
        full = seq.num_computed // self.page_slots
        last = node
        for i in range(count, full):
            child = self.index.child(last, seq, i)
            if child is None:  # a collision: another prefix has this key; keep that one, and stop indexing here
                if last is not node:
                    self.index.prune(last)
                last = None
                break
            for pool, table in zip(self.pools, seq.tables):  # snapshots of states are hung in by ``StatePages``
                if table[i] and not child.pages[pool.group]:
                    pool.enlist(table[i], child)
            last = child
        self._tail(seq, full, last)
        self.index.drop(node)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant, given all sequences that have pages. Slow: for tests and debugging."""
        check_pages(self, sequences)


def _upward(up: list[Node], number: int) -> Node:
    """The node of page ``number``, counted from 1, on the way from ``up[0]`` to the root. ``up`` is made as long as
    that takes."""
    while up[-1].number > number:
        up.append(up[-1].parent)
    return up[up[0].number - number]
