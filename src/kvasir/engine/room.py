"""Making room when pages run out: who gives way, and how many may run for a while.

Leases go first, the oldest of them; then drafts; then the lowest in rank gives up its pages, to be computed again later
(it keeps its place by arrival in the queue, and its full pages stay in the prefix index as long as nobody takes them).
Nobody gives way to a lower rank, so the highest always gets on; and alone it always fits (admission control sees to it:
``PageManager.fits``).

A *lease* keeps the pages of a sequence that has ended, for one that goes on from it: a paused sequence is a request
that ended and another whose prompt is what it had come to, cut or not. That one starts as a fork of the lease
(`resumed`): its last token is the only row it computes, as if it had never paused, and the page in part, which no
prefix hit could give it, is copied. Leases hold a half of the pages at most; who runs takes them before anyone gives
way; who waits takes them only when nothing runs, for else memory will come back anyway.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from kvasir.engine.pages import PageManager
from kvasir.engine.policy import SchedulerPolicy
from kvasir.engine.queue import Queue
from kvasir.engine.spans import Step
from kvasir.types import Sequence, Status

CAUTION_STEPS = 32  # number of steps with fewer sequences after pages ran out
LEASED_SHARE = 0.5  # the largest share of the pages that leases may keep
MAX_PREEMPTIONS = 4  # preemptions of a sequence after which others are preferred as victims


@dataclass(frozen=True, slots=True)
class Lease:
    """``holder`` keeps pages ``until`` then (monotonic seconds). ``places``: the prefix keys of the full pages before
    those positions at which one that goes on from it may start: in its last page or, where the end was told late, in
    the one before."""

    until: float
    holder: Sequence
    places: frozenset[bytes]


class Room:
    """``give_up(seq)``: take everything from a running sequence and queue it again. ``in_flight()``: the last launched
    step, if it has not ended. ``preemptions`` and ``revoked`` (leases that had to go before their time) count since the
    start."""

    def __init__(
        self,
        pages: PageManager,
        policy: SchedulerPolicy,
        running: Queue,
        max_num_seqs: int,
        *,
        give_up: Callable[[Sequence], None],
        in_flight: Callable[[], int | None],
    ) -> None:
        self.pages, self.policy, self.running, self.max_num_seqs = pages, policy, running, max_num_seqs
        self.preemptions = 0
        self.revoked = 0
        self._give_up, self._in_flight = give_up, in_flight
        self._limit = float(max_num_seqs)
        self._steps_to_care = 0
        self._leases: deque[Lease] = deque()  # the oldest first
        self._leased_pages: Counter[int] = Counter()  # leased pages of the first group
        self._by_place: dict[bytes, list[Sequence]] = {}  # holders by the places of their leases

    @property
    def max_running(self) -> int:
        """Number of sequences that may run."""
        return int(self._limit)

    def begin(self, now: float) -> None:
        """Begin a step: let caution wear off and end leases whose time is over."""
        if self._steps_to_care:
            self._steps_to_care -= 1
        elif self._limit < self.max_num_seqs:
            self._limit = min(float(self.max_num_seqs), self._limit + max(1, self.max_num_seqs // 100))
        if any(lease.until <= now for lease in self._leases):
            over = [lease for lease in self._leases if lease.until <= now]
            self._leases = deque(lease for lease in self._leases if lease.until > now)
            self._release(over)

    # ---------------------------------------------------------------------------------------------------- preemption

    def make(self, step: Step, seq: Sequence, end: int) -> bool:
        """Grow ``seq`` to ``end`` positions at the cost of leases, then drafts, then lower ranks, then itself
        (False)."""
        seq.drop_draft()
        lower: list[Sequence] | None = None
        while not self.pages.grow(seq, end, step.copies):
            if self.pages.awaits(seq, end):
                return False  # what it lacks is on its way back: sit this step out
            if self._revoke() or self._drop_planned_draft(step):
                continue
            if lower is None:
                ranks = self.running.ordered(step.now)
                lower = [s for s in ranks[ranks.index(seq) + 1 :] if s.status is Status.RUNNING]
            fresh = [s for s in lower if s.num_preempted < MAX_PREEMPTIONS]
            victim = self.policy.victim(fresh or lower, seq) or seq
            self._preempt(step, victim)
            self._be_careful()
            if victim is seq:
                return False
            lower.remove(victim)
        return True

    def displace(self, step: Step, incoming: Sequence, lacking: list[int], seats: int) -> bool:
        """Preempt running sequences for a waiting one where the policy says so and it helps. It starts next step.
        ``seats``: how many more may run."""
        lower = [s for s in self.running.ordered(step.now) if s.num_preempted < MAX_PREEMPTIONS]
        victims: list[Sequence] = []
        while victim := self.policy.victim(lower, incoming):
            lower.remove(victim)
            victims.append(victim)
            freed = self.pages.freed_by(victims)
            if len(victims) + seats > 0 and all(a >= b for a, b in zip(freed, lacking)):
                for victim in victims:
                    self._preempt(step, victim)
                return True
        return False

    def _drop_planned_draft(self, step: Step) -> bool:
        """Take back the draft and the guests of a planned span whose look-ahead holds a page."""
        for seq in list(reversed(step.spans)):
            if not (seq.draft or seq.guests):
                continue
            before = self.pages.num_free + self.pages.num_limbo
            seq.drop_draft()
            step.remove(seq)
            step.add(seq, 1)
            self.pages.truncate(seq, seq.num_tokens, self._in_flight())
            if self.pages.num_free + self.pages.num_limbo > before:
                return True
        return False

    def _preempt(self, step: Step, seq: Sequence) -> None:
        """Take everything from a running sequence; it goes back to its place in the queue and computes it again."""
        assert not step.copies, "forks are admitted last, so no copy is planned yet whose page could go"
        step.remove(seq)
        step.preempted.append(seq)
        self._give_up(seq)
        seq.num_preempted += 1
        self.preemptions += 1

    def _be_careful(self) -> None:
        """Pages ran out: run a tenth fewer sequences than just now, for a while."""
        self._limit = max(1.0, min(self._limit, (len(self.running) + 1) * 0.9))
        self._steps_to_care = CAUTION_STEPS

    # --------------------------------------------------------------------------------------------------------- leases

    def lease(self, seq: Sequence, now: float) -> None:
        """Lease the computed pages of ``seq``, which is about to end, where its request asks for it."""
        seconds, end = seq.request.params.lease, seq.num_computed
        if not seconds or not end or self.pages.index is None or not self.pages.can_fork(seq, end):
            return
        holder = Sequence(seq.request, seq.branch)
        holder.tokens = seq.tokens[: end + 1]  # one more: a sequence has always something left to compute
        holder.page_keys = list(seq.page_keys)
        self.pages.fork(seq, holder, end)
        places = frozenset(self.pages.place_key(holder, at) for at in (end, max(0, end - self.pages.page_slots)))
        self._leases.append(Lease(now + seconds, holder, places))
        self._leased_pages.update(holder.tables[0])
        for place in places:
            self._by_place.setdefault(place, []).append(holder)
        while len(self._leased_pages) > LEASED_SHARE * self.pages.pools[0].num_pages and self._revoke():
            pass

    def resumed(self, seq: Sequence) -> Sequence | None:
        """Return the holder of a lease on all known tokens of waiting ``seq`` but the last, or None."""
        if not self._by_place:
            return None
        known = seq.num_tokens - 1
        return next(
            (
                holder
                for holder in self._by_place.get(self.pages.place_key(seq, known), ())
                if holder.tokens[:known] == seq.tokens[:known] and self.pages.can_fork(holder, known)
            ),
            None,
        )

    def leased(self) -> Iterable[Sequence]:
        """Return the holders of leased pages, for checks of invariants."""
        return [lease.holder for lease in self._leases]

    @property
    def num_leased_pages(self) -> int:
        """Number of pages of the first group that leases keep."""
        return len(self._leased_pages)

    def check(self) -> None:
        """Assert that pages and places of leases are counted right."""
        pages = Counter(page for lease in self._leases for page in lease.holder.tables[0])
        assert self._leased_pages == pages, "leased pages are miscounted"
        places = [(place, lease.holder) for lease in self._leases for place in lease.places]
        listed = [(place, holder) for place, holders in self._by_place.items() for holder in holders]
        assert sorted(places, key=_by_place) == sorted(listed, key=_by_place), "the places of leases are listed wrong"

    def lacking(
        self,
        seq: Sequence,
        num_hit: int,
        num_tokens: int,
        *,
        max_span: int,
        promised: Many[int],
        parent: Sequence | None,
    ) -> list[int]:
        """Return ``PageManager.lacking``. Where nothing runs, leases are ended until nothing is lacking."""
        while True:
            short = self.pages.lacking(seq, num_hit, num_tokens, max_span=max_span, promised=promised, parent=parent)
            if not any(short) or len(self.running) or self.pages.num_limbo or not self._revoke():
                return short
            if parent is not None and not parent.tables:
                return short  # the lease that it was to start from is gone

    def _revoke(self) -> bool:
        """End the oldest lease before its time; False: there is none."""
        if not self._leases:
            return False
        self.revoked += 1
        self._release([self._leases.popleft()])
        return True

    def _release(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._leased_pages.subtract(lease.holder.tables[0])
            for place in lease.places:
                self._by_place[place].remove(lease.holder)
                if not self._by_place[place]:
                    del self._by_place[place]
            self.pages.release(lease.holder, self._in_flight())
        self._leased_pages = +self._leased_pages


def _by_place(entry: tuple[bytes, Sequence]) -> tuple[bytes, int]:
    return entry[0], id(entry[1])
