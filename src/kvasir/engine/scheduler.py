"""The scheduler: which sequences get how many rows in the next step.

There are no phases. A running sequence needs ``rows_left`` rows and those of its draft; one that needs a single row beside
its draft is called a *decode* below, one that needs more has a *prompt* to compute (also after a preemption). A plan takes,
within the row budget: decodes with their drafts, then prompts that hold pages, then admissions from the queue.

Where nobody reads a token before its sequence ends (``prompts_first``), decodes sit out while prompts fill whole steps: all of them
then run together in captured steps, instead of ending one after the other.

A plan may be made while the one before it is in flight. It counts on that one's rows (``num_ahead``) and a token a sampled
row (``num_drawn``). A sequence that is certain to end with the token in flight, or whose draft is being verified, sits out.
Everything else, the prefix index above all, knows committed rows only.

Who waits is in ``backlog.py``; when pages run out somebody gives way: see ``room.py``.
"""

from __future__ import annotations

import math
from itertools import chain, islice

from kvasir.config import SchedulerConfig
from kvasir.engine.backlog import Backlog
from kvasir.engine.pace import Pace
from kvasir.engine.pages import PageManager
from kvasir.engine.pages_ahead import PagesAhead
from kvasir.engine.policy import Guarded, SchedulerPolicy
from kvasir.engine.queue import Queue
from kvasir.engine.room import Room
from kvasir.engine.spans import (
    ONE_SAMPLE,
    ROW_TILE,
    Step,
    next_span,
    page_aligned,
    room_to_start,
    round_down,
    rows_left,
    trim_draft,
    unscored_from,
)
from kvasir.types import FinishReason, Plan, Sequence, Span, Status

LOOK_AHEAD = 8  # requests that do not fit and are looked past, a step
MAX_VISITS = 128  # requests in the queue that are looked at, a step
PROMPT_PATIENCE = 1.0  # seconds after which the oldest prompt has a claim to rows


class Scheduler:
    """Queue, running sequences and their rows of sampler state. ``max_rows``: rows a step.

    Plan, launch, ``advance`` every span once its result is read, then ``complete`` the plan (also one that failed, never one
    without spans): what was given up meanwhile may be used again. The next may be launched in between.
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
    ) -> None:
        assert max_rows > 0 and config.max_num_seqs > 0
        self.config = config
        self.pages = pages
        self.policy = policy = Guarded(policy)
        self.pace = pace or Pace(None, None)
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.backlog = Backlog(policy)
        self.running = Queue(policy.order_running, policy.static)
        self.prompts_first = False
        self._prompts_filled = True  # the last step that decodes sat out, at least half
        self._now = 0.0
        self._step = 0  # number of the last plan; the last with spans; the last that ended
        self._launched = 0
        self._completed = 0
        self._free_seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._limbo_seats: list[tuple[int, int]] = []  # (step that may still use it, row)
        self._deferred: list[Sequence] = []  # decodes for which no row was left; they come first next time
        self.room = Room(
            pages, policy, self.running, config.max_num_seqs, give_up=self._give_up, in_flight=self._in_flight
        )

    # --------------------------------------------------------------------------------------------------------- states

    num_waiting = property(lambda self: len(self.backlog.waiting))
    num_blocked = property(lambda self: len(self.backlog.blocked))
    num_running = property(lambda self: len(self.running))
    preemptions = property(lambda self: self.room.preemptions)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        assert seq.status is Status.WAITING and not seq.tables and seq not in self.backlog.waiting, seq
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
        """Back to the queue. Of a sequence that is not blocked (any more), nothing."""
        if seq.status is Status.BLOCKED:
            self.backlog.remove(seq)
            self._enqueue(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state; pages and row return when the last launched step has ended. Idempotent: the first
        reason stays."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            if reason != "error":
                self.room.lease(seq, self._now)
            self._stop(seq)
        elif seq.status is Status.BLOCKED or seq in self.backlog.waiting:
            self.backlog.remove(seq)
        seq.status, seq.finish_reason, seq.parent = Status.FINISHED, reason, None
        seq.drop_draft()

    def has_work(self, now: float) -> bool:
        """Whether a plan made now could have spans, or a blocked sequence's deadline has come."""
        return bool(len(self.backlog.waiting) or len(self.running)) or any(
            seq.blocked_until <= now for seq in self.backlog.blocked
        )

    # ------------------------------------------------------------------------------------------------------ one step

    def plan(self, now: float, max_rows: int | None = None) -> Plan:
        """The next step. ``now``: monotonic seconds; ``max_rows``: a smaller budget, for this step."""
        self._now = now
        self._step += 1
        self.room.begin(now)
        step = Step(now, left=min(self.max_rows, max_rows or self.max_rows))
        if not len(self.backlog.waiting) and not self._deferred and (spans := self._only_decodes(step)):
            self._launched = self._step
            return Plan(self._step, spans, step.copies)
        self._fill(step)
        if step.spans:
            self._launched = self._step
        for seq, span in step.spans.items():
            seq.num_ahead += span.length
            if "sample" in span.want:
                seq.num_drawn += 1
        return Plan(step=self._step, spans=list(step.spans.values()), copies=step.copies, preempted=step.preempted)

    def _fill(self, step: Step) -> None:
        """Give the rows away: to decodes, but for what is kept for the oldest prompt; to prompts that hold pages; to the queue, unless somebody
        just gave way; what is left, to decodes that found none."""
        decodes, prompts = self._split(step.now)
        if not self.prompts_first:
            ahead = self.backlog.waiting.rows + sum(rows_left(seq) for seq in prompts)
            step.left = self.pace.most(len(decodes), sum(1 + seq.num_look_ahead for seq in decodes), step.left, ahead)
        budget = step.left
        claimant, claim = self._claim(prompts, step.now, budget)
        sit_out = self.prompts_first and self._prompts_filled and bool(decodes) and self._prompts_fill(prompts, budget)

        step.left -= claim
        deferred = [] if sit_out else self._plan_decodes(step, decodes)
        step.left += claim
        self._plan_prompts(step, prompts, claimant, claim)
        if not step.preempted:
            self._admit(step, claimant, claim)
        self._prompts_filled = (
            not sit_out or step.left <= budget // 2
        )  # else there were no pages: decodes take part next time
        if sit_out and not step.spans:
            deferred = self._plan_decodes(step, decodes)
        self._deferred = self._use_leftover(step, deferred)
        if not claim and self.pace.target is None:  # a pace counts in whole tiles itself
            round_down(step, budget, self.pages.page_slots)

    def _only_decodes(self, step: Step) -> list[Span] | None:
        """The plan, the hot path: all that run decode, with a draft or without, and there are rows and pages for it. None: this is another
        kind of step."""
        ordered, spans = self.running.ordered(step.now), []
        spare = step.left - len(ordered)  # rows for drafts
        if spare < 0:
            return None
        for seq in ordered:
            start, num_tokens = seq.num_computed + seq.num_ahead, len(seq.tokens) + seq.num_drawn
            if num_tokens - start != 1 or seq.guests:
                return None
            if seq.num_drawn and self._awaits_result(seq):
                continue
            if seq.draft:
                if len(seq.draft) > spare:
                    return None
                trim_draft(seq, spare, self.max_model_len)
                spare -= len(seq.draft)
            if not self.pages.grow(seq, num_tokens + len(seq.draft), step.copies):
                return None  # the pages that others got meanwhile are found in their tables
            spans.append(
                next_span(seq, 1 + len(seq.draft)) if seq.draft else Span(seq, start, 1, ONE_SAMPLE, seat=seq.seat)
            )
        for span in spans:
            span.seq.num_ahead += span.length
            span.seq.num_drawn += 1
        return spans

    def advance(self, span: Span, emitted: list[int]) -> None:
        """Commit one span: ``emitted`` are the sampled tokens along the accepted draft. Of a void span nothing is kept."""
        seq = span.seq
        if not span.valid:
            return
        self._land(span)
        end = span.start + span.length - len(span.guests)  # what guests wrote is nobody's
        drafted = end - seq.num_tokens
        assert span.start == seq.num_computed, (span, "is not the next one")
        assert len(emitted) <= max(0, drafted + 1), (span, "has no rows for what it emits")
        seq.tokens += emitted
        # Rejected draft rows lie beyond the last known token, and that one still has to predict the next.
        seq.num_computed = min(end, seq.num_tokens - 1)
        seq.drop_draft()
        in_flight = self._in_flight()
        self.pages.commit(seq, in_flight)
        if drafted > 0 or span.guests:
            self.pages.truncate(seq, seq.num_tokens, in_flight)

    def append(self, span: Span, emitted: list[int]) -> None:
        """``advance`` for a valid span of a decode, the hot path."""
        seq = span.seq
        before = seq.num_computed
        span.landed = True
        seq.tokens += emitted
        seq.num_computed = len(seq.tokens) - 1
        seq.num_ahead -= span.length
        seq.num_drawn -= 1
        if self.pages.commits_between(before, seq.num_computed):
            self.pages.commit(seq, self._in_flight())
        if span.length > 1:
            seq.drop_draft()
            self.pages.truncate(seq, len(seq.tokens), self._in_flight())

    def _land(self, span: Span) -> None:
        span.landed = True
        span.seq.num_ahead -= span.length
        span.seq.num_drawn -= "sample" in span.want

    def complete(self, plan: Plan) -> None:
        """A plan has ended; nothing launched up to it uses a page or row any more. What was not advanced is planned again."""
        for span in plan.spans:
            if not span.landed and span.valid:
                self._land(span)
        self._completed = max(self._completed, plan.step)
        self.pages.retire(plan.step)
        if self._limbo_seats:
            self._free_seats += [row for step, row in self._limbo_seats if step <= plan.step]
            self._limbo_seats = [entry for entry in self._limbo_seats if entry[0] > plan.step]

    # -------------------------------------------------------------------------------------------------------- running

    def _split(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences by rank: decodes (those that waited for a row first) and prompts."""
        decodes, prompts = [seq for seq in self._deferred if seq.status is Status.RUNNING], []
        waited = set(decodes)
        for seq in self.running.ordered(now):
            if len(seq.tokens) + seq.num_drawn - seq.num_computed - seq.num_ahead > 1:  # rows_left, the hot path
                seq.drop_draft()
                prompts.append(seq)
            elif not (seq.num_drawn and self._awaits_result(seq)) and seq not in waited:
                decodes.append(seq)
        return decodes, prompts

    def _prompts_fill(self, prompts: list[Sequence], budget: int) -> bool:
        """Whether the prompts that run, and those in the queue that find a seat, have a whole step's rows to compute. What the cache has is looked
        up for the first of those."""
        rows = sum(rows_left(seq) for seq in prompts)
        for i, seq in enumerate(islice(self.backlog.waiting, max(0, self._seats()))):
            if rows >= budget:
                break
            if not self.backlog.waits_for_parent(seq):
                rows += (
                    seq.num_tokens - self._start_point(seq)[1] if i < LOOK_AHEAD else self.backlog.waiting.rows_of(seq)
                )
        return rows >= budget and self.pace.target is None

    def _awaits_result(self, seq: Sequence) -> bool:
        """Whether what comes after the tokens in flight is open (a draft is being verified), or certain to be nothing."""
        return bool(seq.draft or seq.guests) or len(seq.tokens) + seq.num_drawn >= min(
            self.max_model_len, seq.num_prompt + seq.max_output
        )

    def _claim(self, prompts: list[Sequence], now: float, budget: int) -> tuple[Sequence | None, int]:
        """The oldest unfinished prompt and the rows kept for it: none before it has waited for PROMPT_PATIENCE, then a
        page (with a pace: a tile) or a tenth of the budget, whichever is more, but never more than half."""
        oldest = list(prompts)
        if len(self.backlog.waiting) and self._seats() > 0:
            oldest += islice(self.backlog.candidates(now), 1)
        seq = min(oldest, key=lambda s: s.request.arrival, default=None)
        if seq is None or now - seq.request.arrival <= PROMPT_PATIENCE:
            return None, 0
        least = self.pages.page_slots if self.pace.target is None else ROW_TILE
        return seq, min(max(least, budget // 10), rows_left(seq), budget // 2)

    def _plan_decodes(self, step: Step, decodes: list[Sequence]) -> list[Sequence]:
        """Returns those for which no row was left."""
        spare = step.left - len(decodes)  # rows for drafts: every decode gets its one row first
        grow = self.pages.grow
        for i, seq in enumerate(decodes):
            if seq.status is not Status.RUNNING:
                continue
            if step.left <= 0:
                return decodes[i:]
            num_tokens = len(seq.tokens) + seq.num_drawn
            if seq.draft or seq.guests:
                trim_draft(seq, spare, self.max_model_len)
                spare -= seq.num_look_ahead
            if grow(seq, num_tokens + seq.num_look_ahead, step.copies) or self.room.make(step, seq, num_tokens):
                step.add(seq, 1 + len(seq.draft))
        return []

    def _plan_prompts(self, step: Step, prompts: list[Sequence], claimant: Sequence | None, claim: int) -> None:
        kept = claim if claimant in prompts else 0
        for seq in prompts:
            if seq.status is not Status.RUNNING:
                continue
            if seq is claimant:
                kept = 0
            length = self._chunk(
                seq, self._rows_for(step, seq, seq.num_computed + seq.num_ahead, claim if seq is claimant else 0, kept)
            )
            if not length:
                continue
            end = seq.num_computed + seq.num_ahead + length
            if self.pages.grow(seq, end, step.copies) or self.room.make(step, seq, end):
                step.add(seq, length)

    def _rows_for(self, step: Step, seq: Sequence, start: int, claim: int, kept: int = 0) -> int:
        """Rows for a chunk from position ``start``; ``kept``: of them for another. Behind another prompt, what would not end a page of one
        that goes on is left, but for who has a claim: a few rows more cost a step another launch in every layer."""
        rows, size = self.pace.room(step, start, claim) - kept, self.pages.page_slots
        few = self.max_rows >= size and rows < size - start % size and seq.num_tokens - start > rows
        last = next(reversed(step.spans), None)  # decodes come first
        behind = last is not None and step.spans[last].length > 1 + last.num_look_ahead
        return 0 if few and behind and not claim else rows

    def _chunk(self, seq: Sequence, left: int) -> int:
        """How many rows of its prompt a sequence gets; it ends at the end of a page when more follows."""
        needed = rows_left(seq)
        length = min(needed, left, self.config.long_prefill_token_threshold or left)
        if length < needed:
            length = page_aligned(seq.num_computed + seq.num_ahead, length, self.pages.page_slots) or length
        return max(0, length)

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
        """How many more sequences may run."""
        return min(self.room.max_running - len(self.running), len(self._free_seats))

    def _admit(self, step: Step, claimant: Sequence | None, claim: int) -> None:
        """Fill the step from the queue. Requests that do not fit are looked past, LOOK_AHEAD of them."""
        if not len(self.backlog.waiting) or step.left <= 0:
            return
        oldest = next(iter(self.backlog.waiting))
        passed: list[Sequence] = []  # did not fit
        admitted: list[Sequence] = []
        skipped: list[Sequence] = []  # did not fit, and a later one was admitted
        computing = PagesAhead(self.pages, self.running, step)
        promised = self._promised()
        for seq in islice(self.backlog.candidates(step.now), MAX_VISITS):
            if step.left <= 0:
                break
            source, hit = self._start_point(seq)
            if source is None and computing.hold_next_of(seq, hit):
                continue
            lacking = self.room.lacking(
                seq,
                hit,
                room_to_start(seq, self.pages.page_slots),
                max_span=self.max_rows,
                promised=promised,
                parent=source,
            )
            if source is not None and not source.tables:
                continue  # it took the lease of its own beginning for memory; next step it finds those pages in the index
            if self._seats() <= 0 or any(lacking):
                if not passed and not admitted and self.room.displace(step, seq, lacking, self._seats()):
                    break
                passed.append(seq)
                if self._seats() <= 0 or len(passed) > LOOK_AHEAD or seq in self.backlog.overdue:
                    break
                continue
            if (rows := self._rows_for(step, seq, hit, claim if seq is claimant else 0)) <= 0:
                break
            skipped = passed[:]
            self._start(step, seq, hit, source, promised, rows)
            admitted.append(seq)
            computing.add(seq, step.spans[seq].length)
        self.backlog.age(oldest, skipped, admitted)

    def _promised(self) -> list[int]:
        """Per group, the pages that prompts being computed will still take."""
        total = [0] * len(self.pages.groups)
        for seq in self.running:
            if rows_left(seq) > 1:
                total = [a + b for a, b in zip(total, self.pages.missing(seq, seq.num_tokens, self.max_rows))]
        return total

    def _start_point(self, seq: Sequence) -> tuple[Sequence | None, int]:
        """In whose pages a sequence starts (None: in those of the prefix index), and at which position: the latest there is.

        A lease comes first: a branch of a request that goes on from one must not copy the copy its parent has just begun with.
        A sequence whose prompt is to be scored must compute the rows that still have no score.
        """
        unscored = unscored_from(seq)
        if unscored is None and (holder := self.room.resumed(seq)) is not None:
            return holder, seq.num_tokens - 1
        hit = self.pages.match(seq, unscored)
        prompt = seq.num_prompt - 1
        if (
            seq.parent is not None
            and seq.parent.status is Status.RUNNING
            and unscored is None
            and prompt > hit
            and self.pages.can_fork(seq.parent, prompt)
        ):
            return seq.parent, prompt
        return None, hit

    def _start(
        self, step: Step, seq: Sequence, hit: int, source: Sequence | None, promised: list[int], rows: int
    ) -> None:
        if source is None:
            self.pages.admit(seq, hit)
        elif source is seq.parent:
            self.pages.fork(source, seq, hit)
        else:
            self.pages.resume(source, seq, hit)
        length = self._chunk(seq, rows)
        grown = self.pages.grow(seq, seq.num_computed + length, step.copies)
        assert grown, f"{seq} was admitted without room for its first span"
        for g, pages in enumerate(self.pages.missing(seq, seq.num_tokens, self.max_rows)):
            promised[g] += pages
        self.backlog.remove(seq)
        seq.status, seq.seat, seq.num_skipped = Status.RUNNING, self._free_seats.pop(), 0
        if seq.first_scheduled is None:
            seq.first_scheduled = step.now
        self.running.add(seq, step.now)
        step.add(seq, length)

    # --------------------------------------------------------------------------------------------------------- private

    def _in_flight(self) -> int | None:
        """The last launched step, if it has not ended."""
        return self._launched if self._launched > self._completed else None

    def _stop(self, seq: Sequence) -> None:
        """RUNNING -> none: pages and row go back as soon as no launched step uses them."""
        after_step = self._in_flight()
        self.running.discard(seq)
        self.pages.release(seq, after_step)
        if after_step is None:
            self._free_seats.append(seq.seat)
        else:
            self._limbo_seats.append((after_step, seq.seat))
        seq.seat, seq.num_computed, seq.num_ahead, seq.num_drawn = -1, 0, 0, 0
        seq.drop_draft()

    def _give_up(self, seq: Sequence) -> None:
        """A running sequence loses everything and goes back to its place in the queue."""
        self._stop(seq)
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        known = (
            self._start_point(seq)[1] if seq.parent is None else seq.num_prompt - 1
        )  # a branch starts from its parent's prompt
        self.backlog.add(seq, self._now, seq.num_tokens - known)

    def check(self) -> None:
        """Assert every invariant, those of the pages included. Slow: for tests and debugging."""
        for status, seqs in (
            (Status.WAITING, self.backlog.waiting),
            (Status.RUNNING, self.running),
            (Status.BLOCKED, self.backlog.blocked),
        ):
            for seq in seqs:
                assert seq.status is status, f"{seq} is listed as {status}"
                assert (seq.seat >= 0) == bool(seq.tables) == (status is Status.RUNNING), (
                    f"{seq} holds what it should not"
                )
                assert seq.num_computed < seq.num_tokens, f"{seq} has nothing left to compute"
                assert status is Status.RUNNING or not (seq.num_ahead or seq.num_drawn), f"{seq} has rows in flight"
                assert self._in_flight() is not None or not (seq.num_ahead or seq.num_drawn), (
                    f"{seq} counts on a step that has ended"
                )
        rows = [seq.seat for seq in self.running] + self._free_seats + [row for _, row in self._limbo_seats]
        assert sorted(rows) == list(range(self.config.max_num_seqs)), "a row is in no place or in two"
        self.backlog.check()
        self.pages.check(chain(self.running, self.room.leased()))
