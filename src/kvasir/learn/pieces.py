"""The traces that a trainer holds: cut to size, used a few times each, some held back to judge by.

Legend: R rows.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvasir.learn.trace import PLAIN, REJECTED, Trace

USES = 4  # most steps that a trace takes part in
HELD_BACK = 8  # one sequence of so many is held back


def cut(trace: Trace, num_rows: int) -> Iterator[Trace]:
    """Yield pieces of at most about ``num_rows`` rows, each with the drafts that hang from its committed rows. A piece
    knows nothing of the ones before it."""
    if trace.num_rows <= num_rows:
        yield trace
        return
    kinds, parents = trace.kinds, trace.parents
    owner = np.arange(trace.num_rows)  # the committed row whose draft a row belongs to
    for row in np.flatnonzero(kinds == REJECTED).tolist():
        above = int(parents[row])
        owner[row] = row if above < 0 else owner[above]
        while above >= 0 and kinds[owner[row]] != PLAIN:
            above = int(parents[owner[row]])
            if above < 0:
                break
            owner[row] = owner[above]
    committed = np.flatnonzero(kinds != REJECTED)
    sizes = np.bincount(owner, minlength=trace.num_rows)[committed]
    number = (np.cumsum(sizes) - 1) // num_rows
    for n in np.unique(number).tolist():
        mine = committed[number == n]
        kept = np.flatnonzero(np.isin(owner, mine))
        place = np.full(trace.num_rows + 1, -1)  # -1 stays -1
        place[kept] = np.arange(len(kept))
        start, end = int(trace.positions[mine[0]]), int(trace.positions[mine[-1]])
        yield replace(
            trace,
            tokens=trace.tokens[start - trace.start : end + 2 - trace.start],
            start=start,
            states=trace.states[kept],
            positions=trace.positions[kept],
            row_tokens=trace.row_tokens[kept],
            parents=place[parents[kept]].astype(parents.dtype),
            kinds=kinds[kept],
        )


@dataclass(slots=True)
class _Held:
    trace: Trace
    uses: int = 0


class Pieces:
    """Traces to learn from, at most ``num_bytes`` and ``num_rows`` of them and each at most `USES` times; and those
    held back.

    All pieces of a sequence are on one side, so that nothing is judged by what it was trained on. The oldest go first
    where there are too many. ``num_rows`` keeps what is learned recent: a server writes traces faster than a trainer
    uses them up, and draws from a long past would hold little of traffic that has just changed.
    """

    def __init__(self, num_bytes: int, held_rows: int, seed: int = 0, num_rows: int = 1 << 62) -> None:
        self.held_back: deque[Trace] = deque()
        self._train: deque[_Held] = deque()
        self._bytes, self._held_count, self._most, self._held_rows = 0, 0, num_bytes, held_rows
        self._rows, self._most_rows = 0, num_rows
        self._random = random.Random(seed)

    def add(self, trace: Trace) -> bool:
        """Take a trace. Returns whether it is learned from; else it is held back."""
        if zlib.crc32(trace.request.encode()) % HELD_BACK == 0:
            self.held_back.append(trace)
            self._held_count += trace.num_rows
            while self._held_count - self.held_back[0].num_rows >= self._held_rows:
                self._held_count -= self.held_back.popleft().num_rows
            return False
        self._train.append(_Held(trace))
        self._count(trace, 1)
        while (self._bytes > self._most or self._rows > self._most_rows) and len(self._train) > 1:
            self._count(self._train.popleft().trace, -1)
        return True

    def draw(self, num_rows: int) -> list[Trace]:
        """Random traces of about ``num_rows`` rows together, one at least; [] where there are none."""
        found: list[Trace] = []
        chosen = self._random.sample(range(len(self._train)), min(len(self._train), num_rows))
        rows, spent = 0, set()
        for i in chosen:
            held = self._train[i]
            if found and rows + held.trace.num_rows > num_rows:
                break
            found.append(held.trace)
            rows += held.trace.num_rows
            held.uses += 1
            if held.uses >= USES:
                spent.add(i)
        if spent:
            for i in spent:
                self._count(self._train[i].trace, -1)
            self._train = deque(held for i, held in enumerate(self._train) if i not in spent)
        return found

    def __len__(self) -> int:
        return len(self._train)

    def clear(self) -> None:
        """Forget all of them."""
        self.held_back.clear()
        self._train.clear()
        self._bytes = self._rows = self._held_count = 0

    def _count(self, trace: Trace, sign: int) -> None:
        self._bytes += sign * trace.states.nbytes
        self._rows += sign * trace.num_rows
