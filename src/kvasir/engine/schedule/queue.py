"""Sequences in policy order, without sorting again what has not changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvasir.types import Sequence


class Queue:
    """Sequences in policy order. It sorts when a new one does not belong at the end, and filters out those that left
    lazily.

    ``order``: the policy's sort. ``static``: whether the order of two sequences never changes.
    ``rows``: sum of the rows that they have to compute, as estimated when they came.
    """

    def __init__(self, order: Callable[[list[Sequence], float], list[Sequence]], static: bool) -> None:
        self._sort = order
        self._static = static
        self.rows = 0
        self._members: OrderedDict[Sequence, int] = OrderedDict()  # their rows, by order of entry
        self._order: list[Sequence] = []
        self._gone = False
        self._dirty = False

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._members

    def rows_of(self, seq: Sequence) -> int:
        return self._members[seq]

    def rows_before(self, seq: Sequence, now: float) -> int:
        """Rows of the sequences that would stand before ``seq``, which is not in the queue.

        It first checks whether ``seq`` would be the last, as most new ones are.
        """
        ordered = self.ordered(now)
        low, high, at = 0, len(ordered), len(ordered) - 1
        while low < high:
            low, high = (low, at) if self._sort([ordered[at], seq], now)[0] is seq else (at + 1, high)
            at = (low + high) // 2
        return self.rows - sum(self._members[other] for other in ordered[low:])

    def add(self, seq: Sequence, now: float, rows: int = 0) -> None:
        self._members[seq] = rows
        self.rows += rows
        if self._gone or (self._order and self._sort([self._order[-1], seq], now)[0] is seq):
            self._dirty = True
        elif not self._dirty:
            self._order.append(seq)

    def discard(self, seq: Sequence) -> None:
        if seq in self._members:
            self.rows -= self._members.pop(seq)
            self._gone = True

    def ordered(self, now: float) -> list[Sequence]:
        """All sequences in policy order. The returned list does not change while sequences come and go."""
        if self._dirty or not self._static:
            self._order = self._sort(list(self._members), now)
        elif self._gone:
            self._order = [seq for seq in self._order if seq in self._members]
        self._dirty = self._gone = False
        return self._order
