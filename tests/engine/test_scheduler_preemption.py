"""Preemption, and sequences that end, are blocked or return in every state."""

from __future__ import annotations

from itertools import chain

import pytest

from kvasir.engine.schedule.room import CAUTION_STEPS, MAX_PREEMPTIONS
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.schedulers.priority import Config, Priority
from kvasir.types import Status
from tests.engine.fake import FULL, expected_output, window_group
from tests.engine.scheduling import crowd, driver, rows, unique, until_preemption

# ------------------------------------------------------------------------------------------------------- preemption


def test_the_latest_arrival_gives_way_and_nothing_is_admitted_then():
    d, (a, b, c) = crowd()
    late = d.add(unique(2, "late", arrival=9.0, max_tokens=2))
    d.scheduler.block(late)
    while not d.scheduler.preemptions:
        if d.scheduler.pages.num_free == 0:
            d.scheduler.unblock(late)  # fits nowhere before the preemption, and in the victim's pages after it
        plan = d.step()
    assert plan.preempted == [c] and c.status is Status.WAITING and c.num_computed == 0 and c.seat == -1
    assert late.status is Status.WAITING and d.scheduler.pages.num_free > 0
    assert {span.seq for span in plan.spans} == {a, b}
    d.drain()
    d.assert_outputs()


def test_the_lowest_priority_gives_way():
    d = driver(num_pages=10, policy=Priority(Config()), max_num_seqs=8)
    seqs = [d.add(unique(6, f"s{i}", arrival=float(i), priority=p, max_tokens=20)) for i, p in enumerate([5, 9, 0])]
    d.step()
    assert until_preemption(d).preempted == [seqs[1]]


@pytest.mark.parametrize("policy", [Fcfs(), Priority(Config())])
def test_nobody_takes_pages_of_a_higher_rank(policy):
    """Mutation: ``Room.make`` chooses the victim among all running sequences instead of those of lower rank.

    The lowest needs a page two steps before the others do, when all pages are in use.
    """
    d = driver(num_pages=10, page_slots=4, policy=policy, max_num_seqs=8)
    a, b = (d.add(unique(6, name, arrival=float(i), max_tokens=20)) for i, name in enumerate("ab"))
    lowest = d.add(unique(8, "lowest", arrival=2.0, priority=5, max_tokens=20))
    plan = until_preemption(d)
    assert plan.preempted == [lowest]
    assert {span.seq for span in plan.spans} == {a, b} and lowest.status is Status.WAITING
    assert a.num_tokens % 4 == b.num_tokens % 4 != 1, "no other sequence has just grown by a page"
    d.drain()
    d.assert_outputs()


@pytest.mark.parametrize("policy", [Fcfs(), Priority(Config())])
def test_a_preempted_sequence_never_outranks_one_that_keeps_its_pages(policy):
    """Mutations: as above, under changing load; ``victim`` takes the first of the lower ranks."""
    d = driver(num_pages=24, page_slots=2, policy=policy, max_num_seqs=8)
    for i in range(24):
        d.add(unique(3 + i % 5, f"s{i}", arrival=float(i), priority=i * 7 % 3, max_tokens=6 + i % 7))
    while d.scheduler.has_work(d.now):
        before = list(d.scheduler.running)
        plan = d.step()
        ranks = policy.order_running(before, d.now)
        for seq in plan.preempted:
            kept = [other for other in ranks if other not in plan.preempted]
            assert all(ranks.index(other) < ranks.index(seq) for other in kept), f"{seq} gave way to a lower rank"
    assert d.scheduler.preemptions > 3
    d.assert_outputs()


def test_the_lowest_in_rank_gives_way_itself_when_only_it_lacks_room():
    d = driver(num_pages=6, page_slots=4, max_num_seqs=4)
    a = d.add(unique(9, "a", arrival=0.0, max_tokens=2))
    b = d.add(unique(3, "b", arrival=1.0, max_tokens=9))
    d.step()
    while b.status is Status.RUNNING and a.status is not Status.FINISHED:
        d.step()
    assert a.num_preempted == 0
    d.drain()
    d.assert_outputs()


def test_drafts_go_before_anyone_is_preempted():
    d, seqs = crowd(num_pages=9)  # 8 pages, 6 in use
    for seq in seqs:
        seq.tokens += [1] * 0
        seq.draft = [0] * 7  # would take two more pages each
    plan = d.step()
    assert not plan.preempted and len(plan.spans) == 3


def test_a_planned_draft_is_taken_back_for_another_decode():
    d = driver(num_pages=5, page_slots=4, max_num_seqs=4)
    a = d.add(unique(5, "a", arrival=0.0, max_tokens=20))
    b = d.add(unique(4, "b", arrival=1.0, max_tokens=20))
    d.step()
    a.draft = [0] * 5  # the third page of a is the last one, which b needs for its next token
    plan = d.step()
    assert rows(plan) == {"a": 1, "b": 1} and not plan.preempted
    assert len(a.tables[0]) == 2 and b.num_tokens == 6


def test_a_preempted_sequence_returns_to_its_cached_pages():
    d, seqs = crowd()
    plan = until_preemption(d)
    victim = plan.preempted[0]
    for seq in seqs[:2]:
        d.scheduler.finish(seq, "cancelled")
    span = d.step().spans[0]
    assert span.seq is victim and span.start > 0
    d.drain()
    assert victim.output == expected_output(victim)


def test_fewer_run_after_pages_ran_out_and_then_more_again():
    d, _ = crowd()
    until_preemption(d)
    s = d.scheduler
    low = s.room._limit
    assert low == pytest.approx(3 * 0.9)
    for _ in range(CAUTION_STEPS):
        s.complete(s.plan(0.0))
    assert s.room._limit <= low
    s.complete(s.plan(0.0))
    assert low < s.room._limit <= low + 1
    for _ in range(10):
        s.complete(s.plan(0.0))
    assert s.room._limit == 8


def test_who_was_preempted_often_is_spared_while_there_is_another():
    d, (a, b, c) = crowd()
    c.num_preempted = MAX_PREEMPTIONS
    assert until_preemption(d).preempted == [b]
    d, (a, b, c) = crowd()
    b.num_preempted = c.num_preempted = MAX_PREEMPTIONS
    assert until_preemption(d).preempted == [c], "every candidate was preempted often"


# ------------------------------------------------------------------------------------------------------------ states


def test_finish_in_every_state():
    d = driver(max_num_seqs=1)
    states = {
        "running": d.add(unique(5, "a")),
        "waiting": d.add(unique(5, "b", arrival=1.0)),
        "blocked": d.add(unique(5, "c", arrival=2.0)),
        "new": unique(5, "d"),
    }
    d.scheduler.block(states["blocked"])
    d.step()
    for seq in states.values():
        d.scheduler.finish(seq, "cancelled")
        d.scheduler.finish(seq, "error")
        assert seq.status is Status.FINISHED and seq.finish_reason == "cancelled" and not seq.tables and seq.seat == -1
        d.scheduler.check()
    assert not d.scheduler.has_work(0.0) and d.scheduler.backlog.prompt_tokens == 0
    assert d.scheduler.pages.num_free == d.scheduler.pages.num_total


def test_pages_and_seats_of_a_launched_step_return_when_it_ends():
    d = driver(max_num_seqs=1)
    s = d.scheduler
    seq = d.add(unique(9, "a"))
    plan = s.plan(0.0)
    s.finish(seq, "cancelled")
    s.check()
    assert s.pages.num_limbo == 3
    other = d.add(unique(5, "b"))
    empty = s.plan(0.0)
    assert not empty.spans, "the only seat may still be in use"
    s.complete(plan)
    assert s.pages.num_limbo == 0
    s.check()
    assert d.step().spans[0].seq is other


def test_preemption_with_a_step_in_flight_waits_for_its_pages():
    d, seqs = crowd(num_pages=7)  # 6 pages, all in use
    s = d.scheduler
    for _ in range(2):
        d.step()
    launched = s.plan(0.0)  # not yet ended
    for span in launched.spans:
        s.advance(span, [1])
    while not (plan := s.plan(0.0)).preempted:
        for span in plan.spans:
            s.advance(span, [1])
        s.complete(launched)
        launched = plan
    assert len(plan.preempted) == 1 and s.pages.num_limbo > 0, "one victim is enough: its pages are on their way"
    s.check()
    s.complete(launched)
    s.complete(plan)
    s.check()


def test_nobody_waits_for_pages_of_another_group():
    """A sequence waits only for pages of the group in which it lacks one.

    The windows give back a page every other step, which is in limbo while the next step is planned. It is of no use to
    a sequence that lacks a page of the other group, so the first by rank must not sit out a step for it.
    """
    d = driver([21, 60], 2, (FULL, window_group(2)), max_num_seqs=6)
    s = d.scheduler
    for i in range(8):
        d.add(unique(3 + i % 2, f"s{i}", arrival=float(i), max_tokens=14))
    while s.has_work(0.0) or d.unread:
        first = next(iter(s.running.ordered(0.0)), None)
        waits = first is None or first not in chain(*s._split(0.0))
        coming = bool(s.pages.pools[0].limbo)
        plan = d.step(late=True)
        assert waits or coming or plan.preempted or first in [span.seq for span in plan.spans]
    assert s.preemptions > 1
    d.assert_outputs()


def test_blocked_sequences_are_never_in_the_way():
    d = driver(max_num_seqs=1)
    blocked = d.add(unique(5, "a"))
    d.scheduler.block(blocked, until=10.0)
    assert not d.scheduler.has_work(9.0) and d.scheduler.has_work(10.0)
    other = d.add(unique(5, "b", arrival=3.0, max_tokens=1))
    assert d.scheduler.num_blocked == 1 and d.scheduler.backlog.prompt_tokens == 10
    assert [s.seq for s in d.step().spans] == [other] and not d.step().spans
    d.scheduler.block(blocked, until=20.0)
    assert d.scheduler.backlog.prompt_tokens == 5
    d.scheduler.unblock(blocked)
    d.scheduler.unblock(blocked)
    assert [s.seq for s in d.step().spans] == [blocked]


def test_blocking_a_running_sequence_gives_up_its_pages():
    d = driver()
    seq = d.add(unique(9, "a", max_tokens=5))
    d.step()
    d.scheduler.block(seq)
    d.scheduler.check()
    assert (
        d.scheduler.num_running == 0
        and d.scheduler.pages.num_free == d.scheduler.pages.num_total
        and seq.num_preempted == 0
    )
    d.scheduler.unblock(seq)
    d.drain()
    assert seq.output == expected_output(seq)


def test_blocking_what_has_ended_does_nothing():
    d = driver()
    seq = d.add(unique(9, "a"))
    d.scheduler.finish(seq, "stop")
    d.scheduler.block(seq)
    d.scheduler.unblock(seq)
    assert seq.status is Status.FINISHED and d.scheduler.num_blocked == 0


def test_a_failed_step_changes_nothing_and_is_planned_again():
    d = driver(max_rows=16)
    seq = d.add(unique(20, "a", max_tokens=3))
    plan = d.scheduler.plan(0.0)
    d.scheduler.complete(plan)  # it raised: no span is advanced
    again = d.scheduler.plan(0.0)
    assert [(s.start, s.length) for s in plan.spans] == [(s.start, s.length) for s in again.spans]
    d.scheduler.complete(again)
    d.drain()
    assert seq.output == expected_output(seq)


def test_a_sequence_is_added_once():
    d = driver()
    seq = d.add(unique(5, "a"))
    with pytest.raises(AssertionError):
        d.scheduler.add(seq)
