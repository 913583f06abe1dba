"""Make room when pages run out: choose which sequence gives way, and bound how many run for a while.

The oldest leases go first, then drafts. Then the sequence of the lowest rank is preempted: it gives up its pages and
computes them again later. It keeps its place by arrival in the queue, and its full pages stay in the prefix index until
they are taken. No sequence gives way to one of lower rank, so the highest always makes progress; alone it always fits,
because admission control checks ``PageManager.fits``.

A *lease* keeps the pages of a sequence that has ended, for a request that goes on from it: one whose prompt is the
ended sequence's tokens, possibly cut at the end. This request starts as a fork of the lease (``resumed``). Its last
token is the only row that it computes, and the last page, which is not full and so not in the prefix index, is copied.
Leases keep at most half of the pages. Running sequences take leased pages before anyone is preempted. Waiting ones take
them only if nothing runs, because pages come back anyway while something runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.engine.schedule.queue import Queue
from kvasir.engine.schedule.spans import Step
from kvasir.types import Sequence, Status

CAUTION_STEPS = 32  # number of steps for which fewer sequences run after pages ran out
LEASED_SHARE = 0.5  # largest share of the first group's pages that leases keep
MAX_PREEMPTIONS = 4  # preemptions of one sequence, after which others are preferred as victims


@dataclass(frozen=True, slots=True)
class Lease:
    """Pages that ``holder`` keeps ``until`` a time in monotonic seconds.

    ``places``: the positions at which another sequence may go on from it, as prefix keys of the full pages before them.
    They are in the last page of ``holder`` or, as tokens may have been cut off its end, in the page before.
    """

    until: float
    holder: Sequence
    places: frozenset[bytes]


class Room:
    """Preemption and leases.

    ``give_up(seq)``: takes everything from a running sequence and queues it again. ``in_flight()``: the last launched
    step, or None if it has ended.
    ``preemptions`` and ``revoked`` (leases ended before their time) count since the start.
    """

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
        self._leased_pages: Counter[int] = Counter()  # pages of the first group, with the number of leases on each
        self._by_place: dict[bytes, list[Sequence]] = {}  # holders of leases by the places of these

    @property
    def max_running(self) -> int:
        """Number of sequences that may run."""
        return int(self._limit)

    def begin(self, now: float) -> None:
        """Begin a step: let more sequences run again, and end the leases whose time is over."""
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
        """Grow ``seq`` to ``end`` positions, at the cost of leases, then drafts, then sequences of lower rank.

        False: ``seq`` sits this step out, or was preempted itself because no other sequence could give way.
        """
        seq.drop_draft()
        lower: list[Sequence] | None = None
        while not self.pages.grow(seq, end, step.copies):
            if self.pages.awaits(seq, end):
                return False  # the pages that it lacks are about to come back: sit this step out
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
        """Preempt running sequences for a waiting one if the policy says so and it helps; return whether it was done.

        ``incoming`` starts in the next step. ``lacking``: pages that it lacks, by group. ``seats``: how many more
        sequences may run.
        """
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
        """Take back the draft and the guests of a planned span if that frees a page; return whether one was found."""
        for seq in list(reversed(step.spans)):
            if not (seq.draft or seq.guests):
                continue
            before = self.pages.num_free + self.pages.num_limbo
            length = step.spans[seq].length - seq.num_look_ahead
            seq.drop_draft()
            step.remove(seq)
            step.add(seq, length)
            self.pages.truncate(seq, seq.num_tokens, self._in_flight())
            if self.pages.num_free + self.pages.num_limbo > before:
                return True
        return False

    def _preempt(self, step: Step, seq: Sequence) -> None:
        """Take everything from a running sequence. It goes back to its place in the queue and computes it again."""
        assert not step.copies, "forks are admitted last, so no copy is planned yet whose page could go"
        step.remove(seq)
        step.preempted.append(seq)
        self.restart(seq)

    def restart(self, seq: Sequence) -> None:
        """Take everything from a running sequence, and queue it."""
        self._give_up(seq)
        seq.num_preempted += 1
        self.preemptions += 1

    def _be_careful(self) -> None:
        """Let a tenth fewer sequences run than just now, for a while, because pages ran out."""
        self._limit = max(1.0, min(self._limit, (len(self.running) + 1) * 0.9))
        self._steps_to_care = CAUTION_STEPS

    # --------------------------------------------------------------------------------------------------------- leases

    def lease(self, seq: Sequence, now: float) -> None:
        """Keep the pages of what ``seq`` has computed, if its request asks for a lease. Called just before ``seq``
        releases its pages."""
        seconds, end = seq.request.params.lease, seq.num_computed
        if not seconds or not end or self.pages.index is None or not self.pages.can_fork(seq, end):
            return
        holder = Sequence(seq.request, seq.branch)
        holder.tokens = seq.tokens[: end + 1]  # one more than computed: a sequence always has something left to compute
        holder.page_keys = list(seq.page_keys)
        self.pages.fork(seq, holder, end)
        places = frozenset(self.pages.place_key(holder, at) for at in (end, max(0, end - self.pages.page_slots)))
        self._leases.append(Lease(now + seconds, holder, places))
        self._leased_pages.update(holder.tables[0])
        for place in places:
            self._by_place.setdefault(place, []).append(holder)
        states = self.pages.states
        while (
            len(self._leased_pages) > LEASED_SHARE * self.pages.pools[0].num_pages
            or (states is not None and len(self._leases) > LEASED_SHARE * states.pool.num_pages)
        ) and self._revoke():
            pass

    def resumed(self, seq: Sequence) -> Sequence | None:
        """The holder of a lease on all tokens of the waiting ``seq`` except its last; None: there is none."""
        if not self._by_place:
            return None
        known = seq.num_tokens - 1
        return next(
            (
                holder
                for holder in self._by_place.get(self.pages.place_key(seq, known), ())
                if holder.tokens[:known] == seq.tokens[:known]
                # The last page is not full, so no key tells which variant computed it.
                and holder.kv_variant(known) == seq.kv_variant(known)
                and self.pages.can_fork(holder, known)
            ),
            None,
        )

    def leased(self) -> Iterable[Sequence]:
        """Holders of leases, for the checks of invariants."""
        return [lease.holder for lease in self._leases]

    def check(self) -> None:
        """Assert the invariants of leases, recounting their pages and places. Slow: for tests and debugging."""
        in_lease = Counter(page for lease in self._leases for page in lease.holder.tables[0])
        assert dict(self._leased_pages) == dict(in_lease), "leased pages are miscounted"  # Counters would ignore zeros
        assert len(in_lease) <= LEASED_SHARE * self.pages.pools[0].num_pages, (
            "leases keep more than their share of pages"
        )
        places = Counter((place, lease.holder) for lease in self._leases for place in lease.places)
        assert Counter((p, h) for p, holders in self._by_place.items() for h in holders) == places, (
            "a place leads to no lease"
        )
        assert all(self._by_place.values()), "a place without leases is kept"

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
        """``PageManager.lacking`` after ending as many leases as it takes, which is allowed only if nothing runs."""
        while True:
            short = self.pages.lacking(seq, num_hit, num_tokens, max_span=max_span, promised=promised, parent=parent)
            if not any(short) or len(self.running) or self.pages.num_limbo or not self._revoke():
                return short
            if parent is not None and not parent.tables:
                return short  # the lease that ``seq`` was to start from is gone

    def _revoke(self) -> bool:
        """End the oldest lease before its time; return whether there was one."""
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
        self._leased_pages = +self._leased_pages  # without the pages that no lease is left on
