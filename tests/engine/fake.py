"""A model without tensors: what scheduler, pages and prefix index do to KV, position by position.

A slot's content is the hash of all tokens up to its position. A slot that was overwritten, freed early, copied wrongly
or hit by the wrong prefix thus shows as soon as a row reads it. The "sampled" token is a function of (stream, prefix),
as in the real engine, so a sequence's output does not depend on how it was scheduled.
"""

from __future__ import annotations

import random
from itertools import count

from kvasir.config import SchedulerConfig
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.spans import ROW_TILE
from kvasir.types import CacheGroup, CacheRow, Plan, Request, SamplingParams, Sequence, Status

VOCAB = 7
FULL = CacheGroup("full", (0,), (CacheRow(1, 8, 8),))
STATE = CacheGroup("state", (2,), kind="state", states=((),))


def window_group(window: int) -> CacheGroup:
    return CacheGroup(f"window{window}", (1,), (CacheRow(1, 8, 8),), window=window)


def request(prompt, *, max_tokens=8, arrival=0.0, priority=0, tenant="", name="r", seed=0, **params) -> Request:
    prompt = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(
        id=name,
        prompt_ids=prompt,
        params=SamplingParams(**params),
        seed=seed,
        max_tokens=max_tokens,
        arrival=arrival,
        priority=priority,
        tenant=tenant,
    )


def sequence(prompt, branch=0, **options) -> Sequence:
    return Sequence(request(prompt, **options), branch)


def manager(
    num_pages=20, page_slots=4, groups=(FULL,), prefix_root=b"root", on_free=None, state_interval=0, eviction=None
) -> PageManager:
    pages = [num_pages] * len(groups) if isinstance(num_pages, int) else num_pages
    return PageManager(
        groups, pages, page_slots, prefix_root, on_free=on_free, state_interval=state_interval, eviction=eviction
    )


def scheduler(pages: PageManager | None = None, policy=None, *, max_rows=64, max_model_len=1000, **config) -> Scheduler:
    config.setdefault("max_num_seqs", 8)
    return Scheduler(
        SchedulerConfig(**config), pages or manager(), policy or Fcfs(), max_rows=max_rows, max_model_len=max_model_len
    )


def extend(state: int, token: int) -> int:
    return hash((state, token))


def sample(stream: int, state: int) -> int:
    return hash((stream, state, 0)) % VOCAB


def expected_output(seq: Sequence) -> list[int]:
    """The output of a sequence that runs alone, to the end."""
    state, output = 0, []
    for token in seq.request.prompt_ids:
        state = extend(state, token)
    while len(output) < seq.request.max_tokens:
        output.append(sample(seq.stream, state))
        state = extend(state, output[-1])
    return output


class FakeModel:
    """The pages' contents, and a forward that reads all it may see and writes its rows."""

    def __init__(self, pages: PageManager) -> None:
        self.pages = pages
        self.content = [[[None] * pages.page_slots for _ in range(pool.num_pages)] for pool in pages.all_pools]
        self._states: dict[Sequence, list[int]] = {}
        self.drawn: dict[int, int] = {}  # seat -> the token drawn last, as the device keeps it

    def poison(self, group: int, pages: list[int]) -> None:
        for page in pages:
            assert page > 0
            self.content[group][page] = [None] * self.pages.page_slots

    def pack(self, plan: Plan) -> list:
        """Spans with their tokens and a copy of their tables, which the scheduler may change while the step runs."""
        self._copy(plan)
        return [
            (span, span.tokens(), [list(table) for _, table in zip(self.pages.pools, span.seq.tables)])
            for span in plan.spans
        ]

    def _copy(self, plan: Plan) -> None:
        targets = [(c.group, c.target) for c in plan.copies]
        assert len(set(targets)) == len(targets), "a page is copied to twice"
        found = [list(self.content[copy.group][copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, found):
            self.content[copy.group][copy.target] = content

    def run(self, packed: list) -> list[list[int]]:
        """Run one forward and return the emitted tokens of every span (the walk along its draft)."""
        packed = [(span, tokens or [self.drawn[span.seat]], tables) for span, tokens, tables in packed]
        rows = [self._states_of(span, tokens) for span, tokens, _ in packed]
        for (span, _, tables), states in zip(packed, rows):
            self._write(span.start, states[span.start :], tables)
        if self.pages.states is not None:
            for (span, tokens, _), states in zip(packed, rows):
                self._recur(span, tokens, states)
        results = [self._read(span, tokens, states, tables) for (span, tokens, tables), states in zip(packed, rows)]
        self.drawn |= {span.seat: emitted[-1] for (span, *_), emitted in zip(packed, results) if emitted}
        return results

    def _states_of(self, span, tokens: list[int]) -> list[int]:
        """The prefix hash of every position up to the span's end, from the tokens alone."""
        known = self._states.setdefault(span.seq, [])
        for token in span.seq.tokens[len(known) : span.start]:
            known.append(extend(known[-1] if known else 0, token))
        states = known[: span.start]
        for token in tokens:
            states.append(extend(states[-1] if states else 0, token))
        return states

    def _write(self, start: int, states: list[int], tables: list[list[int]]) -> None:
        size = self.pages.page_slots
        for content, table in zip(self.content, tables):
            for position, state in enumerate(states, start):
                assert table[position // size] > 0, "a row is written to the dummy page"
                content[table[position // size]][position % size] = state

    def _recur(self, span, tokens: list[int], states: list[int]) -> None:
        """Do what recurrent layers do: a page is a base, the prefix hash there, and the tokens put behind it."""
        pool, rows = self.content[self.pages.states.group], self.pages.states.rows
        (read, write), start, base, value = span.states, span.start, 0, 0
        if start:
            base, value, *ahead = pool[read]
            assert 0 <= start - base <= min(rows, len(ahead)), f"a state at {base} cannot reach {start}"
            for token in ahead[: start - base]:
                value = extend(value, token)
            assert value == states[start - 1], f"{span.seq} reads a wrong state"
        if span.length <= rows:
            assert read == write > 0
            pool[read] = [start, value, *tokens]
        else:
            assert read != write > 0
            pool[write] = [start + span.length, states[-1]]

    def _read(self, span, tokens, states: list[int], tables: list[list[int]]) -> list[int]:
        size = self.pages.page_slots
        for pool, content, table in zip(self.pages.pools, self.content, tables):
            first = 0 if pool.window is None else max(0, span.start - pool.window + 1)
            seen = [content[table[p // size]][p % size] for p in range(first, len(states))]
            assert seen == states[first:], f"{span.seq} reads a wrong slot of group {pool.group}"
        emitted: list[int] = []
        for i in span.want.get("sample", ()):
            emitted.append(sample(span.seq.stream, states[span.start + i]))
            if i + 1 < span.length and tokens[i + 1] != emitted[-1]:
                break
        return emitted


class Driver:
    """Steps a scheduler with the fake model, as the engine does, and checks everything after every step."""

    def __init__(self, scheduler: Scheduler, model: FakeModel | None = None, rng: random.Random | None = None) -> None:
        self.scheduler = scheduler
        self.model = model or FakeModel(scheduler.pages)
        self.rng = rng or random.Random(0)
        self.now = 0.0
        self.sequences: list[Sequence] = []
        self.in_flight: list[Plan] = []
        self.unread: list[tuple[Plan, list[list[int]]]] = []  # launched, not resolved
        self.plans: list[Plan] = []
        self.steps = count()
        self.draft_length = 0  # at most
        self.draft_quality = 0.5

    def add(self, seq: Sequence) -> Sequence:
        self.sequences.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(
        self, *, max_rows: int | None = None, between=lambda: None, delay: bool = False, late: bool = False
    ) -> Plan:
        """Plan, run and commit one step.

        ``between`` runs while it is in flight. ``delay``: it ends only after the next was planned. ``late``: it is read
        only after the next was launched.
        """
        scheduler = self.scheduler
        plan = scheduler.plan(self.now, max_rows)
        assert plan.num_rows <= min(max_rows or scheduler.max_rows, scheduler.max_rows), "more rows than the budget"
        assert all(seq.status is Status.WAITING for seq in plan.preempted)
        packed = self.model.pack(plan)
        between()
        self.unread.append((plan, self.model.run(packed)))
        while len(self.unread) > (late and bool(plan.spans)):
            read, results = self.unread.pop(0)
            for span, emitted in zip(read.spans, results):
                self.commit(span, emitted)
            if read.spans:
                self.in_flight.append(read)
        while self.in_flight and not (delay and self.in_flight[0] is plan):
            scheduler.complete(self.in_flight.pop(0))
        scheduler.check()
        scheduler.room.check()
        self.assert_no_spare_pages()
        next(self.steps)
        return plan

    def assert_no_spare_pages(self) -> None:
        """Assert that no running sequence has a page beyond its last row, or one that its window has left.

        Mutations: the scheduler grows a sequence further than its span (by a page, or for the whole prompt at once), or
        does not truncate it after a rejected draft.
        """
        pages = self.scheduler.pages
        # A span that is rounded down to a whole tile keeps the pages of its longer self. A draft that the driver
        # proposed may keep its pages when it is dropped after they were taken.
        slack = self.draft_length + (0 if self.scheduler.max_rows % ROW_TILE else ROW_TILE)
        for seq in self.scheduler.running:
            end = seq.num_computed + max(1, seq.num_ahead) + slack
            for pool, table in zip(pages.pools, seq.tables):
                assert len(table) <= -(-end // pages.page_slots), f"{seq} has pages beyond its last row"
                first = 0 if pool.window is None else max(0, seq.num_computed - pool.window + 1) // pages.page_slots
                assert not any(table[:first]), f"{seq} has pages that its window has left"

    def commit(self, span, emitted: list[int]) -> None:
        seq = span.seq
        if not span.valid:
            return
        left = seq.request.max_tokens - seq.num_output
        before = seq.num_tokens
        if scored := span.want.get("score"):
            assert span.start + scored.start == seq.state.get("num_scored", 0)
            seq.state["num_scored"] = span.start + scored.stop
        self.scheduler.advance(span, emitted[:left])
        assert seq.num_tokens == before + len(emitted[:left])
        if seq.num_output >= seq.request.max_tokens:
            self.scheduler.finish(seq, "length")
        elif emitted and self.draft_length:
            self.propose(seq)

    def propose(self, seq: Sequence) -> None:
        """A draft of random length that is right with probability ``draft_quality`` a token."""
        state = 0
        for token in seq.tokens:
            state = extend(state, token)
        seq.draft = []
        for _ in range(self.rng.randint(0, self.draft_length)):
            token = sample(seq.stream, state) if self.rng.random() < self.draft_quality else self.rng.randrange(VOCAB)
            seq.draft.append(token)
            state = extend(state, token)

    def drain(self, limit: int = 5000) -> None:
        """Run until nothing is left to do, and end all leases."""
        self.drain_without_ending_leases(limit)
        self.scheduler.room.begin(self.now + 1000)
        pages = self.scheduler.pages
        assert pages.num_free == pages.num_total or self.scheduler.num_running, "pages are lost"

    def drain_without_ending_leases(self, limit: int = 5000) -> None:
        """Run until nothing is left to do. Leases go on, except those whose time is over."""
        idle = 0
        while len(self.scheduler.backlog.waiting) or len(self.scheduler.running) or self.unread:
            self.now += 0.1
            plan = self.step()
            idle = 0 if plan.spans else idle + 1
            assert idle < 3, "there is work but no step does any"
            assert (limit := limit - 1), "the work does not end"
        for plan in self.in_flight:
            self.scheduler.complete(plan)
        self.in_flight.clear()
        self.scheduler.check()

    def assert_outputs(self) -> None:
        """Assert that finished sequences gave what they give alone, and unfinished ones the first part of it."""
        for seq in self.sequences:
            whole = expected_output(seq)
            assert seq.output == whole[: seq.num_output], f"{seq}: wrong tokens"
            if seq.status is Status.FINISHED and seq.finish_reason == "length":
                assert seq.output == whole
