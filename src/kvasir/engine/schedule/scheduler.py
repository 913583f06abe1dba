"""The scheduler: which sequences get how many rows in the next step.

There are no phases. A running sequence needs ``rows_left`` rows and those of its draft. Below, a *decode* is a sequence
that needs a single row in addition to its draft; one that needs more has a *prompt* to compute (also after a
preemption); so has every sequence that pools. Within the row budget a plan takes decodes with their drafts, then
running prompts, then admissions from the queue.

Where nobody reads a token before its sequence ends (``prompts_first``), decodes sit out while prompts fill whole steps.
All of them then run together in captured steps, instead of ending one after the other.

A plan may be made while the previous step is in flight. It counts on that step's rows (``num_ahead``) and on one token
for each sampled row (``num_drawn``). A sequence sits out that is certain to end with the token in flight, or whose
draft is being verified. Everything else, the prefix index above all, knows committed rows only.

Who waits is in ``backlog.py``; when pages run out somebody gives way: see ``room.py``.
"""

from __future__ import annotations

import math
from itertools import islice

from kvasir.config import SchedulerConfig
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.backlog import Backlog
from kvasir.engine.schedule.checks import check_scheduler
from kvasir.engine.schedule.holds import Holds
from kvasir.engine.schedule.pace import Pace
from kvasir.engine.schedule.pages_ahead import PagesAhead
from kvasir.engine.schedule.policy import Guarded, SchedulerPolicy
from kvasir.engine.schedule.queue import Queue
from kvasir.engine.schedule.residents import Residents
from kvasir.engine.schedule.room import Room
from kvasir.engine.schedule.spans import (
    NO_TAIL,
    ONE_SAMPLE,
    ROW_TILE,
    Step,
    Tail,
    chunk,
    computed_from,
    least_rows,
    must_forget,
    room_to_start,
    round_down,
    rows_left,
    trim_draft,
)
from kvasir.engine.schedule.start_point import start_point
from kvasir.types import FinishReason, Plan, Sequence, Span, Status

LOOK_AHEAD = 8  # requests that do not fit and are looked past, a step
MAX_VISITS = 128  # requests in the queue that are looked at, a step
PROMPT_PATIENCE = 1.0  # seconds after which the oldest prompt has a claim to rows


class Scheduler:
    """The queue, the running sequences and their seats. ``max_rows``: the row budget of a step.

    Plan, launch, ``advance`` every valid span once its result is read, then ``complete`` the plan, also one that
    failed, but never one without spans. The next plan may be launched in between.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageManager,
        policy: SchedulerPolicy,
        *,
        max_rows: int,
        max_model_len: int,
        pace: Pace | None = None,
        residents: Residents | None = None,
    ) -> None:
        assert max_rows > 0 and config.max_num_seqs > 0
        self.config = config
        self.pages = pages
        self.holds = Holds(pages, not policy.urgent)
        self.policy = policy = Guarded(policy)
        self.pace = pace or Pace(None, None)
        self.residents = residents or Residents()
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.backlog = Backlog(policy)
        self.running = Queue(policy.order_running, policy.static)
        self.prompts_first = False
        self._tail = NO_TAIL  # what prompts of the next plan end with
        self._prompts_filled = True  # the last step that decodes sat out, at least half
        self._now = 0.0
        self._step = 0  # number of the last plan; the last with spans; the last that ended
        self._launched = 0
        self._completed = 0
        self.free_seats = list(range(config.max_num_seqs - 1, -1, -1))
        self.limbo_seats: list[tuple[int, int]] = []  # (step that may still use it, seat)
        # A state keeps the inputs of so many rows until they are accepted: the last known token's, and drafts'.
        self._most_drafts = max_rows if pages.states is None else pages.states.rows - 1
        self._deferred: list[Sequence] = []  # decodes for which no row was left; they come first next time
        self._stale: list[Sequence] = []  # must start again, because their states have moved on
        self.room = Room(
            pages, policy, self.running, config.max_num_seqs, give_up=self._give_up, in_flight=self.in_flight
        )

    # --------------------------------------------------------------------------------------------------------- states

    num_waiting = property(lambda self: len(self.backlog.waiting))
    num_blocked = property(lambda self: len(self.backlog.blocked))
    num_running = property(lambda self: len(self.running))
    preemptions = property(lambda self: self.room.preemptions)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        assert seq.status is Status.WAITING and not seq.tables and seq not in self.backlog.waiting, seq
        self.pages.visits.came(seq, seq.request.arrival)
        self._enqueue(seq)

    def block(self, seq: Sequence, until: float = math.inf) -> None:
        """Set a sequence aside until ``unblock``; a running one gives up its pages. Who blocks watches the deadline
        ``until``."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self._stop(seq)
        self.backlog.block(seq, until)

    def unblock(self, seq: Sequence) -> None:
        """Return a blocked sequence to the queue. Does nothing for others."""
        if seq.status is Status.BLOCKED:
            self.backlog.remove(seq)
            self._enqueue(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state; pages and row return when the last launched step has ended. Idempotent: the
        first reason stays."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self.pages.visits.left(seq, self._now)
            if reason != "error":
                self.room.lease(seq, self._now)
            self._stop(seq)
        elif seq.status is Status.BLOCKED or seq in self.backlog.waiting:
            self.backlog.remove(seq)
            self.pages.visits.withdraw(seq)
        seq.status, seq.finish_reason, seq.parent = Status.FINISHED, reason, None
        seq.drop_draft()

    def has_work(self, now: float) -> bool:
        """Whether a plan made now could have spans, or a blocked sequence's deadline has come."""
        return bool(len(self.backlog.waiting) or len(self.running)) or any(
            seq.blocked_until <= now for seq in self.backlog.blocked
        )

    # ------------------------------------------------------------------------------------------------------ one step

    def plan(self, now: float, max_rows: int | None = None, tail: Tail | None = None) -> Plan:
        """The next step. ``now``: monotonic seconds; ``max_rows``: a smaller budget, for this step; ``tail``: guests
        that prompts may end with."""
        self._now = now
        self.pages.returns.pass_time(now)
        self._tail = NO_TAIL if tail is None or self.pages.states is not None else tail  # guests may not fold a state
        self._step += 1
        stale, self._stale = [seq for seq in self._stale if seq.status is Status.RUNNING], []
        for seq in stale:
            self.room.restart(seq)
        snapshots = self.pages.begin(self._step)
        self.room.begin(now)
        step = Step(now, left=min(self.max_rows, max_rows or self.max_rows))
        self._fill(step)
        self.pages.place(step.spans.values(), step.copies)
        if step.spans:
            self._launched = self._step
        else:  # nothing is launched, copies neither
            self.pages.lost(snapshots)
        for seq, span in step.spans.items():
            seq.num_ahead += span.length
            if span.ends_draw:
                seq.num_drawn += 1
        return Plan(self._step, list(step.spans.values()), snapshots + step.copies, stale + step.preempted)

    def _fill(self, step: Step) -> None:
        """Distribute the row budget: to decodes, less the claim of the oldest prompt; to running prompts; to the queue,
        unless somebody was just preempted; and the rest to decodes that found no row."""
        decodes, prompts = self._split(step.now)
        if not prompts and not len(self.backlog.waiting):  # most steps: nobody else wants rows
            self._prompts_filled, self._deferred = True, self._plan_decodes(step, decodes)
            return
        if not self.prompts_first:
            held = sum(self.backlog.waiting.rows_of(seq) for seq in self.holds.held if seq in self.backlog.waiting)
            ahead = self.backlog.waiting.rows - held + sum(rows_left(seq) for seq in prompts)
            step.left = self.pace.most(len(decodes), sum(1 + seq.num_look_ahead for seq in decodes), step.left, ahead)
        budget = step.left
        claimant, claim = self._claim(prompts, step.now, budget)
        sit_out = self.prompts_first and self._prompts_filled and bool(decodes) and self._prompts_fill(prompts, budget)

        step.left -= claim
        deferred = [] if sit_out else self._plan_decodes(step, decodes)
        step.left += claim
        self._plan_prompts(step, prompts, claimant, claim)
        self.holds.begin()
        if not step.preempted:
            self._admit(step, claimant, claim)
        self.holds.end(step, budget)
        # False: prompts found no pages, so decodes take part next time.
        self._prompts_filled = not sit_out or step.left <= budget // 2
        if sit_out and not step.spans:
            deferred = self._plan_decodes(step, decodes)
        self._deferred = self._use_leftover(step, deferred)
        if not claim and self.pace.target is None:  # a pace counts in whole tiles itself
            round_down(step, budget, self.pages.page_slots)

    def advance(self, span: Span, emitted: list[int]) -> None:
        """Commit one valid span: ``emitted`` are the tokens sampled along the accepted draft."""
        seq, start, num_known = span.seq, span.start, len(span.seq.tokens)
        assert span.seat == seq.seat and start == seq.num_computed, (span, "is not the next one")
        self._land(span)
        seq.tokens += emitted
        if self.policy.charges:
            self.policy.charge(span, len(emitted))
        end, last = start + span.length, len(seq.tokens) - 1
        if span.guests:
            end -= len(span.guests)  # what guests wrote is nobody's
        assert end >= last or not emitted, (span, "has no rows for what it emits")
        # Rejected draft rows lie beyond the last known token, and that one still has to predict the next.
        seq.num_computed = end if end < last else last
        if seq.draft or seq.guests:
            seq.drop_draft()
        if self.pages.commits_between(start, seq.num_computed):
            self.pages.commit(seq, self.in_flight())
        self.pages.advance(span, self.in_flight())
        if span.length > 1 and (end > num_known or span.guests):
            self.pages.truncate(seq, len(seq.tokens), self.in_flight())

    def _land(self, span: Span) -> None:
        span.landed = True
        span.seq.num_ahead -= span.length
        span.seq.num_drawn -= span.ends_draw

    def complete(self, plan: Plan) -> None:
        """A plan has ended; nothing launched up to it uses a page or row any more. What was not advanced is planned
        again."""
        for span in plan.spans:
            if not span.landed and span.valid:
                self._land(span)
                self.pages.undo(span, self.in_flight())
                if span.stale:
                    self._stale.append(span.seq)
        self.pages.lost(plan.lost)
        self._completed = max(self._completed, plan.step)
        self.pages.retire(plan.step)
        if self.limbo_seats:
            self.free_seats += [seat for step, seat in self.limbo_seats if step <= plan.step]
            self.limbo_seats = [entry for entry in self.limbo_seats if entry[0] > plan.step]

    # -------------------------------------------------------------------------------------------------------- running

    def _split(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences that may have rows, by rank: decodes (deferred ones first) and prompts."""
        decodes, prompts = [seq for seq in self._deferred if seq.status is Status.RUNNING and not must_forget(seq)], []
        waited, longest = set(decodes), self.max_model_len
        for seq in self.running.ordered(now):
            if must_forget(seq):
                continue
            num_tokens = len(seq.tokens) + seq.num_drawn
            if num_tokens - seq.num_computed - seq.num_ahead > 1 or seq.pools and not seq.num_drawn:
                seq.drop_draft()
                prompts.append(seq)
                continue
            # A token is being drawn: is it the last one, or does a draft that is being verified decide what follows?
            if seq.num_drawn and (
                num_tokens >= seq.num_prompt + seq.max_output or num_tokens >= longest or seq.draft or seq.guests
            ):
                continue
            if not (waited and seq in waited):
                decodes.append(seq)
        return decodes, prompts

    def _prompts_fill(self, prompts: list[Sequence], budget: int) -> bool:
        """Whether running prompts, and queued ones that find a seat, have a whole step's rows to compute. The cache is
        looked up for the first LOOK_AHEAD of the queue."""
        rows = sum(rows_left(seq) for seq in prompts)
        for i, seq in enumerate(islice(self.backlog.waiting, max(0, self._seats()))):
            if rows >= budget:
                break
            if not self.backlog.waits_for_parent(seq):
                rows += (
                    seq.num_tokens - self._start_point(seq)[1] if i < LOOK_AHEAD else self.backlog.waiting.rows_of(seq)
                )
        return rows >= budget and self.pace.target is None

    def _claim(self, prompts: list[Sequence], now: float, budget: int) -> tuple[Sequence | None, int]:
        """The oldest unfinished prompt and the rows kept for it: none before it has waited for PROMPT_PATIENCE, then a
        page (with a pace: a tile) or a tenth of the budget, whichever is more, but never more than half."""
        oldest = list(prompts)
        if len(self.backlog.waiting) and self._seats() > 0:
            oldest += islice((seq for seq in self.backlog.candidates(now) if seq not in self.holds.held), 1)
        seq = min(oldest, key=lambda s: s.request.arrival, default=None)
        if seq is None or now - seq.request.arrival <= PROMPT_PATIENCE:
            return None, 0
        least = self.pages.page_slots if self.pace.target is None else ROW_TILE
        return seq, min(max(least, budget // 10), rows_left(seq), budget // 2)

    def _plan_decodes(self, step: Step, decodes: list[Sequence]) -> list[Sequence]:
        """Plan decodes and return those for which no row was left."""
        spare = step.left - len(decodes)  # rows for drafts: every decode gets its one row first
        grow, spans, copies = self.pages.grow, step.spans, step.copies
        for i, seq in enumerate(decodes):
            if seq.status is not Status.RUNNING:
                continue
            if step.left <= 0:
                return decodes[i:]
            num_tokens = len(seq.tokens) + seq.num_drawn
            if seq.draft or seq.guests:
                trim_draft(seq, min(spare, self._most_drafts), self.max_model_len)
                spare -= seq.num_look_ahead
                if grow(seq, num_tokens + seq.num_look_ahead, copies) or self.room.make(step, seq, num_tokens):
                    step.add(seq, 1 + len(seq.draft))
            elif grow(seq, num_tokens, copies) or self.room.make(step, seq, num_tokens):
                spans[seq] = Span(seq, num_tokens - 1, 1, ONE_SAMPLE, seat=seq.seat)
                step.left -= 1
        return []

    def _plan_prompts(self, step: Step, prompts: list[Sequence], claimant: Sequence | None, claim: int) -> None:
        kept = claim if claimant in prompts else 0
        for seq in prompts:
            if seq.status is not Status.RUNNING:
                continue
            if seq is claimant:
                kept = 0
            start = seq.num_computed + seq.num_ahead
            rows = self._rows_for(step, seq, start, claim if seq is claimant else 0, kept)
            length = chunk(seq, rows, self.config.long_prefill_token_threshold, self.pages)
            if not length:
                continue
            end = start + length
            if self.pages.grow(seq, end, step.copies) or self.room.make(step, seq, end):
                self._add_prompt(step, seq, length)

    def _add_prompt(self, step: Step, seq: Sequence, length: int) -> None:
        """Plan rows of a prompt; the last ones with the drafter's tail, where that costs nobody a row or a page."""
        tail, end = self._tail, len(seq.tokens) + len(self._tail.guests)
        if tail.fits(seq, length, step.left, self.max_model_len) and self.pages.grow(seq, end, step.copies):
            seq.guests, seq.guest_variant = {-1: (tail.guests,)}, tail.variant
        step.add(seq, length)

    def _rows_for(self, step: Step, seq: Sequence, start: int, claim: int, kept: int = 0) -> int:
        """Row budget for a chunk from position ``start``, less the rows ``kept`` for another prompt.

        A chunk that follows another prompt and would not fill a page is postponed, unless it holds the claim: a few
        rows more cost a step another launch in every layer."""
        rows, size = self.pace.room(step, start, claim) - kept, self.pages.page_slots
        few = self.max_rows >= size and rows < size - start % size and seq.num_tokens - start > rows
        last = next(reversed(step.spans), None)  # decodes come first
        behind = last is not None and step.spans[last].length > 1 + last.num_look_ahead
        return 0 if few and behind and not claim else rows

    def _use_leftover(self, step: Step, deferred: list[Sequence]) -> list[Sequence]:
        """Rows kept for a prompt that did not need them go to deferred decodes, where that costs nobody a page."""
        still = []
        for seq in deferred:
            if seq.status is not Status.RUNNING:
                continue
            if step.left > 0 and self.pages.grow(seq, seq.num_tokens + seq.num_drawn, step.copies):
                seq.drop_draft()
                step.add(seq, 1)
            else:
                still.append(seq)
        return still

    # ------------------------------------------------------------------------------------------------------ admission

    def _seats(self) -> int:
        """Number of further sequences that may run."""
        return min(self.room.max_running - len(self.running), len(self.free_seats))

    def _admit(self, step: Step, claimant: Sequence | None, claim: int) -> None:
        """Fill the step from the queue. Requests that do not fit are looked past, LOOK_AHEAD of them."""
        if not len(self.backlog.waiting) or step.left <= 0:
            return
        passed: list[Sequence] = []  # did not fit
        admitted: list[Sequence] = []
        skipped: list[Sequence] = []  # did not fit, and a later one was admitted
        computing = PagesAhead(self.pages, self.running, step)
        promised = self._promised()
        self.residents.begin()
        for seq in islice(self.backlog.candidates(step.now), MAX_VISITS):
            if step.left <= 0:
                break
            if (seq.request.variant or seq.request.hook) and not self.residents.may_start(seq):
                continue
            source, hit = self._start_point(seq)
            if source is None and computing.hold_next_of(seq, hit):
                continue
            num_tokens = room_to_start(seq, self.pages.page_slots)
            may_hold = source is None and len(self.running) and seq not in self.backlog.overdue
            if may_hold and self.holds.hold(seq, hit, num_tokens, promised):
                self.pages.visits.withdraw(seq)
                continue
            self.pages.visits.ask(seq)
            lacking = self.room.lacking(
                seq,
                hit,
                num_tokens,
                max_span=self.max_rows,
                promised=promised,
                parent=source,
            )
            if source is not None and not source.tables:
                continue  # it revoked the lease it would start from; next step it finds those pages in the index
            if self._seats() <= 0 or any(lacking):
                if not passed and not admitted and self.room.displace(step, seq, lacking, self._seats()):
                    break
                passed.append(seq)
                if self._seats() <= 0 or len(passed) > LOOK_AHEAD or seq in self.backlog.overdue:
                    break
                continue
            if (rows := self._rows_for(step, seq, hit, claim if seq is claimant else 0)) < least_rows(seq, hit):
                break
            if source is None and self.pages.fetch(seq, hit, computed_from(seq)):
                continue
            skipped = passed[:]
            self._start(step, seq, hit, source, promised, rows)
            admitted.append(seq)
            self.holds.started()
            computing.add(seq, step.spans[seq].length)
        self.backlog.age(skipped, admitted, self.holds.held)

    def _promised(self) -> list[int]:
        """Per group, the pages that prompts being computed will still take."""
        total = [0] * len(self.pages.groups)
        for seq in self.running:
            if rows_left(seq) > 1:
                total = [a + b for a, b in zip(total, self.pages.missing(seq, seq.num_tokens, self.max_rows))]
        return total

    def _start_point(self, seq: Sequence) -> tuple[Sequence | None, int]:
        return start_point(seq, self.pages, self.room)

    def _start(
        self, step: Step, seq: Sequence, hit: int, source: Sequence | None, promised: list[int], rows: int
    ) -> None:
        if source is None:
            self.pages.admit(seq, hit)
        elif source is seq.parent:
            self.pages.fork(source, seq, hit)
        else:
            self.pages.resume(source, seq, hit)
        length = chunk(seq, rows, self.config.long_prefill_token_threshold, self.pages)
        grown = self.pages.grow(seq, seq.num_computed + length, step.copies)
        assert grown, f"{seq} was admitted without room for its first span"
        for g, pages in enumerate(self.pages.missing(seq, seq.num_tokens, self.max_rows)):
            promised[g] += pages
        self.backlog.remove(seq)
        self.pages.visits.withdraw(seq)
        self.residents.enter(seq)
        seq.status, seq.seat, seq.num_skipped = Status.RUNNING, self.free_seats.pop(), 0
        if seq.first_scheduled is None:
            seq.first_scheduled = step.now
        self.running.add(seq, step.now)
        self._add_prompt(step, seq, length)

    # --------------------------------------------------------------------------------------------------------- private

    def in_flight(self) -> int | None:
        """The last launched step, if it has not ended."""
        return self._launched if self._launched > self._completed else None

    def _stop(self, seq: Sequence) -> None:
        """Stop a running sequence. Its pages and seat become free as soon as no launched step uses them."""
        after_step = self.in_flight()
        self.running.discard(seq)
        self.residents.leave(seq)
        self.pages.release(seq, after_step)
        if after_step is None:
            self.free_seats.append(seq.seat)
        else:
            self.limbo_seats.append((after_step, seq.seat))
        seq.seat, seq.num_computed, seq.num_ahead, seq.num_drawn = -1, 0, 0, 0
        seq.drop_draft()

    def _give_up(self, seq: Sequence) -> None:
        """A running sequence loses everything and goes back to its place in the queue."""
        self._stop(seq)
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        # A branch starts from its parent's prompt.
        known = self._start_point(seq)[1] if seq.parent is None else seq.num_prompt - 1
        self.pages.visits.ask(seq)
        self.backlog.add(seq, self._now, seq.num_tokens - known)

    def check(self) -> None:
        """Assert every invariant, those of the pages included. Slow: for tests and debugging."""
        check_scheduler(self)
