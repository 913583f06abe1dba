"""Learn from the requests so far how likely it is that a prefix is asked for again.

An agent's session, or a chat, sends its prompt again with something added. So the end of every prompt is noted when its
request ends; a later request whose prompt goes through a noted end is a *return*, and the seconds in between are the
time that the prefix had lain idle. Prefixes are told apart by their ``Kind``: by tenant, and by how often the
conversation has come back before. One that came back three times mostly comes back a fourth time, and a prompt that is
sent once by a batch job never does.

The chance that a prefix of some idle age comes back is the Kaplan-Meier estimate (Kaplan and Meier, "Nonparametric
estimation from incomplete observations", 1958) over intervals of age: of the prefixes that reached an interval, some
share returned in it. It needs no guess about the prefixes that may still come back. What is known of a tenant is
weighed with what is known of all, and counts fade, so that the estimate follows a load that changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_ENDS = 16384  # ends of prompts that are remembered
MAX_TENANTS = 64  # tenants with an estimate of their own; later ones share one
FIRST_AGE = 0.125  # seconds at which the second interval of age begins
INTERVALS = 30  # of age: each ends at the square root of two times the age at which it began
DEPTHS = (0, 1, 2, 4, 8)  # the least number of earlier returns of each class
PRIOR = 2.0  # weight, in prefixes, of the belief that none of a kind returns
SHARED = 8.0  # weight, in prefixes, of what is known of all tenants
FADING = 0.999  # factor on the counts of a kind with each prefix of it


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of prefixes. ``tenant``: "" for all that have no estimate of their own. ``depth``: index in DEPTHS."""

    tenant: str
    depth: int


UNKNOWN = Kind("", 0)


@dataclass(slots=True)
class _End:
    """The noted end of a prompt. ``time``: when its request ended, in monotonic seconds. ``depth``: number of returns
    before. ``interval``: the interval of age that it is in, or INTERVALS when it has returned or is too old."""

    time: float
    kind: Kind
    depth: int
    interval: int = 0


@dataclass(slots=True)
class _Counts:
    """Prefixes by interval of age: how many came to its end or returned in it, and how many returned."""

    reached: list[float] = field(default_factory=lambda: [0.0] * INTERVALS)
    returned: list[float] = field(default_factory=lambda: [0.0] * INTERVALS)


# Ages in seconds at which the intervals begin, and one that no prefix reaches.
BEGINS = (0.0, *(FIRST_AGE * math.sqrt(2) ** i for i in range(INTERVALS - 1)), math.inf)


def interval_of(age: float) -> int:
    """The interval of an age in seconds."""
    if age < FIRST_AGE:
        return 0
    return min(INTERVALS - 1, 1 + int(2 * math.log2(age / FIRST_AGE)))


class Returns:
    """Counts returns and says how likely the next one is. ``now``: monotonic seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: OrderedDict[bytes, _End] = OrderedDict()  # by the prefix key of the prompt's last full page
        self._ageing: list[deque[_End]] = [deque() for _ in range(INTERVALS)]  # by interval, the oldest first
        self._counts: dict[Kind, _Counts] = {}
        self._chances: dict[Kind, list[float]] = {}  # what ``chance`` has computed since the counts changed
        self._tenants: set[str] = set()

    def came(self, keys: Iterable[bytes]) -> int:
        """Note a new request and return how often its conversation has come back, this time included.

        ``keys``: the prefix keys of the full pages of its prompt, the last page first.
        """
        for key in keys:
            if (end := self._ends.get(key)) is not None:
                if end.interval < INTERVALS:
                    self.pass_time(self.now)
                    self._count(end.kind, end.interval, returned=True)
                    end.interval = INTERVALS
                return end.depth + 1
        return 0

    def left(self, tenant: str, key: bytes, depth: int) -> None:
        """Note that a request has ended, and that its prefix lies idle from now on. ``depth``: what ``came`` said."""
        self.pass_time(self.now)
        old = self._ends.pop(key, None)
        if old is not None:
            old.interval = INTERVALS
        end = self._ends[key] = _End(self.now, self.kind(tenant, depth), depth)
        self._ageing[0].append(end)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)[1].interval = INTERVALS

    def kind(self, tenant: str, depth: int) -> Kind:
        """The kind of prefixes of a tenant that came back ``depth`` times."""
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                tenant = ""
            else:
                self._tenants.add(tenant)
        return Kind(tenant, max(i for i, least in enumerate(DEPTHS) if depth >= least))

    def chance(self, kind: Kind, age: float) -> float:
        """The chance that a prefix of ``kind`` that has lain idle for ``age`` seconds is asked for again."""
        if (chances := self._chances.get(kind)) is None:
            chances = self._chances[kind] = self._estimate(kind)
        return chances[interval_of(age)]

    def pass_time(self, now: float) -> None:
        """Set the time, which never goes back, and let the noted ends grow older."""
        self.now = now = max(now, self.now)
        for i, ends in enumerate(self._ageing):
            while ends and (ends[0].interval != i or now - ends[0].time >= BEGINS[i + 1]):
                end = ends.popleft()
                if end.interval == i:
                    self._count(end.kind, i, returned=False)
                    end.interval = i + 1
                    self._ageing[i + 1].append(end)

    # -------------------------------------------------------------------------------------------------------- private

    def _count(self, kind: Kind, interval: int, *, returned: bool) -> None:
        for one in (kind, Kind("*", kind.depth)):
            counts = self._counts.setdefault(one, _Counts())
            counts.reached[interval] = counts.reached[interval] * FADING + 1.0
            counts.returned[interval] = counts.returned[interval] * FADING + returned
        self._chances.clear()

    def _estimate(self, kind: Kind) -> list[float]:
        own, everyone = self._counts.get(kind, _Counts()), self._counts.get(Kind("*", kind.depth), _Counts())
        stay, chances = 1.0, [0.0] * INTERVALS
        for i in range(INTERVALS - 1, -1, -1):
            common = everyone.returned[i] / (everyone.reached[i] + PRIOR)
            stay *= 1.0 - (own.returned[i] + SHARED * common) / (own.reached[i] + SHARED)
            chances[i] = 1.0 - stay
        return chances
