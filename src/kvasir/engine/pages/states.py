"""Pages of recurrent layers: the live state of each sequence, and snapshots in the prefix index.

A state page holds all recurrent layers of a sequence after one position, its *base*, and the inputs of up to
``LOOK_AHEAD`` rows after it (`kvasir.kv.state`). So a span can start anywhere from a page's base to the last row that
was put behind it. A short span, of up to ``LOOK_AHEAD`` rows, folds the rows before its start into its page, which then
has the span's start for a base. A kernel may let them wait there for some steps (`kvasir.kernels.gated_rows`): the base
is then an earlier one than is noted here, and whatever can start from the noted one still can. A longer span reads one
page and writes another. The new page is live for the spans that follow at once, and the old one is given back when the
span is committed, so that a step can be run again.

A sequence's table holds its live page, then the pages of long spans in flight, then one page that was taken for the
next span, if that needs one.

A *snapshot* is a page that hangs in the node of the prefix index whose end it belongs to. It is made at the last page
boundary of a prompt, where the prompt leaves a cached one, and every ``interval`` tokens. A snapshot is a copy of the
live page, or that page itself when its sequence gives it back. It takes free pages and the oldest other snapshots, and
nobody gives way to it. Who starts from it reads it, or copies it before a short span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.engine.pages.page_pool import PagePool
from kvasir.engine.pages.prefix import Node
from kvasir.engine.pages.returns import Kind
from kvasir.layers.spec import LOOK_AHEAD
from kvasir.types import PageCopy, Sequence, Span


@dataclass(slots=True)
class _Held:
    """The bases of a sequence's live page and of those that long spans in flight write. ``stops``: positions of the
    prompt at which a snapshot is wanted. ``moved``: a span of the sequence was committed since it started."""

    bases: list[int] = field(default_factory=list)
    stops: tuple[int, ...] = ()
    moved: bool = False


class StatePages:
    """The pages of the group of states, for `kvasir.engine.pages.pages.PageManager`.

    ``interval``: tokens from snapshot to snapshot, a multiple of a page; 0: no snapshots.
    """

    def __init__(self, pool: PagePool, page_slots: int, interval: int) -> None:
        assert interval % page_slots == 0, "snapshots are at the ends of pages"
        self.pool = pool
        self.group = pool.group
        self.page_slots = page_slots
        self.interval = interval
        self.rows = LOOK_AHEAD  # of a short span, at most
        self._held: dict[Sequence, _Held] = {}
        self._due: dict[Sequence, int] = {}  # where a snapshot can be copied from the live page, by sequence
        self._fresh: dict[int, int] = {}  # snapshots of the plan in the making, and what they are copied from
        self._unsure: dict[int, int] = {}  # snapshots that a step may still write, and this step
        self._step = 0  # of this plan

    # -------------------------------------------------------------------------------------------------- starts and ends

    def adopt(self, seq: Sequence, pages: list[int], base: int, stops: Iterable[int] = ()) -> None:
        """Let ``seq``, whose table starts with ``pages`` (one, or none at position 0), start at ``base``."""
        self._held[seq] = _Held([base] if pages else [], tuple(sorted(stops)))

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether the committed state of ``parent`` can be read from position ``num_tokens`` on."""
        held = self._held.get(parent)
        return bool(held and held.bases) and held.bases[0] <= num_tokens <= parent.num_computed

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> list[int]:
        """The pages that ``child`` starts with at position ``num_tokens``: the parent's live page."""
        self.adopt(child, pages := parent.tables[self.group][:1], num_tokens)
        return pages

    def release(self, seq: Sequence, node: Node | None, kind: Kind, after_step: int | None) -> None:
        """Give back all pages of ``seq``. Its live page becomes the snapshot of ``node`` if it can: the end of the
        sequence's last full page. ``kind``: of its prefix."""
        held, table = self._held.pop(seq), seq.tables[self.group]
        self._due.pop(seq, None)
        if node is not None and held.moved and held.bases[0] <= seq.num_computed // self.page_slots * self.page_slots:
            self._hang(table[0], node)  # ``moved``: its bytes are there, whatever became of a copy
        if not self._fresh.keys().isdisjoint(table) or not set(table).isdisjoint(self._fresh.values()):
            after_step = self._step  # the copies run in front of the step that is being planned
        self.pool.drop(reversed(table), after_step, kind)

    # -------------------------------------------------------------------------------------------------------- snapshots

    def next_stop(self, seq: Sequence, start: int, end: int) -> int:
        """The first position after ``start`` where a snapshot is wanted, so that a span must end there, or ``end``."""
        if not self.interval:
            return end
        regular = (start // self.interval + 1) * self.interval
        return min([end, regular, *(stop for stop in self._held[seq].stops if start < stop)])

    def _last_stop(self, seq: Sequence, end: int) -> int:
        """The last position up to ``end`` where a snapshot is wanted; 0: there is none."""
        if not self.interval:
            return 0
        return max(end // self.interval * self.interval, *(s for s in self._held[seq].stops if s <= end), 0)

    def begin(self, step: int, nodes: dict[Sequence, tuple[Node | None, Kind]]) -> list[PageCopy]:
        """Take the snapshots that are due, before step number ``step`` is planned. ``nodes``: by sequence, the node
        whose end its snapshot (``due``) belongs to (None: it is not indexed), and the kind of its prefix."""
        self._step, copies = step, []
        for seq, (node, kind) in nodes.items():
            if self.pool.num_available and node is not None and not node.pages[self.group]:
                (page,) = self.pool.take(1)
                self._hang(page, node)
                if self.pool.fresh is not None:  # no lower tier may have it before it is written
                    self.pool.fresh.pop(page, None)
                    self._unsure[page] = step
                self.pool.kinds[page] = kind
                self._fresh[page] = source = seq.tables[self.group][len(self._held[seq].bases) - 1]
                copies.append(PageCopy(self.group, source, page))
        return copies

    def due(self) -> dict[Sequence, int]:
        """The committed position of each sequence at which a snapshot can be copied from its live page now."""
        due, self._due = self._due, {}
        return {seq: at for seq, at in due.items() if self._held[seq].bases[-1] <= at <= seq.num_computed}

    def end(self) -> None:
        """Let the snapshots of the planned step be taken for something else from now on."""
        self.pool.drop(self._fresh, None)
        self._fresh = {}

    def retire(self, step: int) -> None:
        """Offer lower tiers the snapshots that steps up to ``step`` have written."""
        for page in [page for page, written in self._unsure.items() if written <= step]:
            del self._unsure[page]
            if self.pool.nodes[page] is not None:
                self.pool.fresh[page] = None

    def forget(self, pages: Iterable[int]) -> None:
        """Take snapshots that were not written out of the index again."""
        for page in pages:
            if self.pool.nodes[page] is not None:
                self.pool.unlist(page)
                if page in self.pool.cached:
                    self.pool.cached.remove(page)
                    self.pool.free.append(page)

    def _hang(self, page: int, node: Node) -> None:
        """Make a page the snapshot of ``node``, unless one of them is taken."""
        if self.pool.nodes[page] is None and not node.pages[self.group] and self.pool.refs[page] == 1:
            self.pool.enlist(page, node)

    # ------------------------------------------------------------------------------------------------------------ spans

    def needs(self, seq: Sequence, length: int) -> int:
        """Number of pages, 0 or 1, that are not yet taken for a next span of ``length`` rows."""
        table, lives = seq.tables[self.group], len(self._held[seq].bases)
        if len(table) > lives:
            return 0
        return int(length > self.rows or not lives or not self._own(table[lives - 1]))

    def _own(self, page: int) -> bool:
        """Whether a page can be written: no other table and no node has it."""
        return self.pool.refs[page] == 1 and self.pool.nodes[page] is None

    def has(self, seq: Sequence, length: int) -> bool:
        """Whether there is a page for the next span of ``seq``, or it needs none."""
        if not (needed := self.needs(seq, length)) or self.pool.num_available >= needed:
            return True
        # The only user of a snapshot may overwrite it where there is nothing else.
        lives = len(self._held[seq].bases)
        return length <= self.rows and bool(lives) and self.pool.refs[seq.tables[self.group][lives - 1]] == 1

    def grow(self, seq: Sequence, length: int) -> None:
        """Take the page for the next span of ``seq``, if it needs one; ``has`` said that there is one."""
        if self.needs(seq, length):
            if self.pool.num_available:
                seq.tables[self.group] += self.pool.take(1)
            else:
                self.pool.unlist(seq.tables[self.group][len(self._held[seq].bases) - 1])

    def missing(self, seq: Sequence, num_rows: int) -> int:
        """Number of pages that ``seq`` still takes to compute so many rows."""
        return max(0, (2 if num_rows > self.rows else 1) - len(seq.tables[self.group]))

    def returning(self) -> int:
        """Number of pages that come back when the spans and copies in flight have ended."""
        coming = len(self.pool.limbo) + self.pool.num_landing()
        return coming + sum(len(held.bases) - 1 for held in self._held.values() if held.bases)

    def place(self, span: Span, copies: list[PageCopy]) -> None:
        """Decide which pages a planned span reads and writes. A page that was taken and is not needed goes back."""
        table, held = span.seq.tables[self.group], self._held[span.seq]
        bases, lives = held.bases, len(held.bases)
        read = table[lives - 1] if lives else 0  # at position 0 a state starts from zero, whatever the page holds
        if span.length > self.rows:
            span.states = read, table[lives]
            bases.append(span.start + span.length)
        else:
            if not lives:
                bases.append(0)
            elif not self._own(read):
                # All copies read before any of them writes, so one of a fresh snapshot reads what that is a copy of.
                copies.append(PageCopy(self.group, self._fresh.get(read, read), table[lives]))
                del table[lives - 1]
                self.pool.drop([read], None)  # the copy reads it before anything can write to it
            page = table[len(bases) - 1]
            span.states = page, page
            if span.start and self._last_stop(span.seq, span.start) == span.start:
                self._due[span.seq] = span.start
            bases[-1] = span.start
        if len(table) > len(bases):
            self.pool.drop([table.pop()], None)

    def advance(self, span: Span, node: Node | None, after_step: int | None) -> None:
        """Commit a span. ``node``: that whose end is the span's start, if it starts where one ends."""
        seq, held = span.seq, self._held[span.seq]
        held.moved = True
        if span.length <= self.rows:
            at = self._last_stop(seq, seq.num_computed)
            if held.bases[-1] == span.start < at:
                self._due[seq] = at
        elif span.states[0]:  # none was read at position 0
            old = seq.tables[self.group].pop(0)
            held.bases.pop(0)
            if node is not None and self._last_stop(seq, span.start) == span.start:
                self._hang(old, node)
            self.pool.drop([old], after_step)

    def undo(self, span: Span, after_step: int | None) -> None:
        """Take back what a span that was not committed has written. It will be planned again."""
        seq = span.seq
        if span.length > self.rows:
            table, held = seq.tables[self.group], self._held[seq]
            at = table.index(span.states[1])
            self.pool.drop([table.pop(at)], after_step)
            held.bases.pop(at)
        elif span.stale:  # the page is of no use to anybody
            held = self._held[seq]
            held.bases[0], held.moved = span.start, False
        self._due.pop(seq, None)

    # ----------------------------------------------------------------------------------------------------------- checks

    def freed_by(self, seqs: Iterable[Sequence]) -> int:
        """Number of pages that would become available if all of ``seqs`` were released."""
        uses = Counter(page for seq in seqs for page in seq.tables[self.group])
        return sum(self.pool.refs[page] == n for page, n in uses.items())

    def check(self, seq: Sequence) -> None:
        """Assert the invariants of a sequence's pages. Slow: for tests and debugging."""
        table, bases = seq.tables[self.group], self._held[seq].bases
        assert len(table) == len(bases), f"{seq} keeps a page that no span uses"
        assert all(table) and bases == sorted(bases), f"{seq} has states out of order"
        if bases and not seq.num_ahead:
            assert bases[0] <= seq.num_computed <= bases[0] + self.rows, f"{seq} cannot go on from its state"
            assert len(bases) == 1, f"{seq} has states of spans that are not in flight"
        assert bases or not seq.num_computed, f"{seq} has no state"
