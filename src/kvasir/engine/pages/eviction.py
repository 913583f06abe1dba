"""The eviction seam: which idle page of the prefix cache is taken next.

A page is *idle* when no sequence uses it and the prefix index knows its content. The pool takes one when it has no free
page left. A prefix is found only as a whole, so pages that attention reads from the start of the sequence are evicted
children first: the pool passes over a page while a child of its node has one (``PagePool.take``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from kvasir.engine.pages.returns import Kind, Returns
from kvasir.technique import Technique

EVICTIONS = "kvasir.engine.pages.evictions"


class IdlePages(ABC):
    """The idle pages of one cache group, in the order in which they are taken.

    Times are those of ``Returns.now``, in monotonic seconds.
    """

    @abstractmethod
    def add(self, page: int, kind: Kind, number: int) -> None:
        """A page becomes idle now. ``kind``: of the prefix that it belongs to; ``number``: its number in there, from
        1."""

    @abstractmethod
    def remove(self, page: int) -> None:
        """A page is used again, or has been evicted."""

    @abstractmethod
    def first(self) -> int:
        """The page to take next; there is one."""

    @abstractmethod
    def pass_over(self, page: int) -> None:
        """The page stays, as if it became idle now: others need it."""

    def ask(self, page: int) -> object | None:
        """A request that waits will use an idle page, and with it what became idle together with it: keep them. Return
        what ``withdraw`` takes; None: this order does not care."""
        return None

    def withdraw(self, asked: object) -> None:  # noqa: B027  # nothing was noted
        """The request no longer waits, or not for these pages."""

    @abstractmethod
    def losses(self) -> Iterator[tuple[int, float]]:
        """Runs of pages in the order in which they would be taken: how many, and for each the share of a page that is
        expected to be computed again if it is taken, which is the chance that it is asked for. The pages must not
        change meanwhile."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, page: object) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The pages in about the order in which they would be taken now. They must not change meanwhile."""


class Eviction(Technique):
    """Makes the order of the idle pages of each cache group."""

    exact = True
    affects_kv = False

    @abstractmethod
    def idle_pages(self, returns: Returns) -> IdlePages:
        """The idle pages of a group, none at first. ``returns``: tells the time and the chance of a return."""
        raise NotImplementedError


class IdleByRecency(IdlePages):
    """Idle pages by the time of their last use. It expects no returns, so no request waits for the sake of the
    cache."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def add(self, page: int, kind: Kind, number: int) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> None:
        del self._pages[page]

    def first(self) -> int:
        return next(iter(self._pages))

    def pass_over(self, page: int) -> None:
        self._pages.move_to_end(page)

    def losses(self) -> Iterator[tuple[int, float]]:
        return iter([(len(self._pages), 0.0)])

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)


class ByRecency(Eviction):
    """The least recently used page goes first."""

    def idle_pages(self, returns: Returns) -> IdlePages:
        return IdleByRecency()
