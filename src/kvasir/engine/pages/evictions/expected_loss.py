"""The page goes first whose loss is expected to cost least: the chance that it is asked for, times the work to compute
it again.

The chance is learnt by tenant, by how often the conversation came back before, and by idle time (``returns.py``). The
work grows with the number of tokens before the page, because attention reads them. All pages of a group have the same
bytes. Among pages of one kind the least recently used goes first. What a waiting request will use goes last.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvasir.engine.pages.eviction import Eviction, IdlePages
from kvasir.engine.pages.returns import Kind, Returns

# Pages before a page that double the work to compute it: 24,000 tokens in pages of 16. On an H200 a row of the Llama-8B
# shape costs 20 us, and a key that it reads 0.85 ns (bench/results/h200/steps-llama-8b.json).
DOUBLES = 1500


@dataclass(slots=True)
class _Run:
    """Pages of one kind that became idle at one time. ``pages``: page -> its number in its prefix. ``asked``: number of
    waiting requests that will use them."""

    kind: Kind
    since: float
    asked: int = 0
    pages: OrderedDict[int, int] = field(default_factory=OrderedDict)


class ByLoss(IdlePages):
    """Idle pages in runs, the runs of each kind by the time of last use."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._kinds: dict[Kind, OrderedDict[float, _Run]] = {}
        self._run_of: dict[int, _Run] = {}
        self._next: tuple[float, _Run] | None = None  # the run to take from, as found at a time

    def add(self, page: int, kind: Kind, number: int) -> None:
        runs, now = self._kinds.setdefault(kind, OrderedDict()), self._returns.now
        if (run := runs.get(now)) is None:
            run = runs[now] = _Run(kind, now)
        run.pages[page] = number
        self._run_of[page] = run

    def remove(self, page: int) -> None:
        run = self._run_of.pop(page)
        del run.pages[page]
        if not run.pages:
            del self._kinds[run.kind][run.since]
            if not self._kinds[run.kind]:
                del self._kinds[run.kind]

    def first(self) -> int:
        if self._next is None or self._next[0] != self._returns.now or not self._next[1].pages or self._next[1].asked:
            oldest = (next((run for run in runs.values() if not run.asked), None) for runs in self._kinds.values())
            run = min((run for run in oldest if run), key=self._loss, default=None)
            if run is None:  # waiting requests want all that is left: the first of them goes on first
                run = max((next(reversed(runs.values())) for runs in self._kinds.values()), key=lambda run: run.since)
            self._next = self._returns.now, run
        return next(iter(self._next[1].pages))

    def ask(self, page: int) -> object | None:
        run = self._run_of[page]
        run.asked += 1
        return run

    def withdraw(self, asked: object) -> None:
        assert isinstance(asked, _Run)
        asked.asked -= 1

    def pass_over(self, page: int) -> None:
        run = self._run_of[page]
        number = run.pages[page]
        self.remove(page)
        self.add(page, run.kind, number)

    def losses(self) -> Iterator[tuple[int, float]]:
        unasked = ([run for run in runs.values() if not run.asked] for runs in self._kinds.values())
        for run in heapq.merge(*unasked, key=self._loss):
            yield len(run.pages), self._chance(run)
        for runs in self._kinds.values():
            yield from ((len(run.pages), 1.0) for run in runs.values() if run.asked)

    def _chance(self, run: _Run) -> float:
        return self._returns.chance(run.kind, self._returns.now - run.since)

    def _loss(self, run: _Run) -> float:
        return self._chance(run) * (1.0 + next(iter(run.pages.values())) / DOUBLES)

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, page: object) -> bool:
        return page in self._run_of

    def __iter__(self) -> Iterator[int]:
        unasked = ([run for run in runs.values() if not run.asked] for runs in self._kinds.values())
        for run in heapq.merge(*unasked, key=self._loss):
            yield from run.pages
        for runs in self._kinds.values():
            for run in runs.values():
                yield from run.pages if run.asked else ()


class ExpectedLoss(Eviction):
    """Least expected loss."""

    def idle_pages(self, returns: Returns) -> IdlePages:
        return ByLoss(returns)
