"""The scheduler's rules, one by one."""

from __future__ import annotations

import random

import pytest

from kvasir.config import SchedulerConfig
from kvasir.engine.queue import Queue
from kvasir.engine.room import CAUTION_STEPS, MAX_PREEMPTIONS
from kvasir.engine.scheduler import LOOK_AHEAD
from kvasir.engine.schedulers.fcfs import Fcfs
from kvasir.engine.schedulers.priority import Priority
from kvasir.types import Sequence, Status
from tests.engine.fake import FULL, Driver, expected_output, manager, request, scheduler, sequence, window_group


def driver(num_pages=40, page_slots=4, groups=(FULL,), prefix_root=b"root", policy=None, **options) -> Driver:
    return Driver(scheduler(manager(num_pages, page_slots, groups, prefix_root), policy, **options))


def unique(length: int, name: str, **options) -> Sequence:
    """A prompt that shares nothing with any other."""
    first = random.Random(name).randrange(10**6, 10**9)
    return sequence(range(first, first + length), name=name, **options)


def rows(plan) -> dict[str, int]:
    return {span.seq.request.id: span.length for span in plan.spans}


# ------------------------------------------------------------------------------------------------------------ spans


def test_a_prompt_is_computed_in_chunks_that_end_at_pages_and_then_decodes():
    d = driver(max_rows=10)
    seq = d.add(unique(23, "a", max_tokens=3))
    spans = [d.step().spans[0] for _ in range(5)]
    assert [(s.start, s.length) for s in spans] == [(0, 8), (8, 8), (16, 7), (23, 1), (24, 1)]
    assert [dict(s.want) for s in spans] == [{}, {}, {"sample": range(6, 7)}, {"sample": range(1)}, {"sample": range(1)}]
    assert seq.finish_reason == "length" and seq.output == expected_output(seq) and not d.scheduler.has_work(0)


def test_a_budget_below_a_page_still_gets_on():
    d = driver(max_rows=3, page_slots=8)
    d.add(unique(20, "a", max_tokens=2))
    assert [d.step().num_rows for _ in range(4)] == [3, 3, 2, 3]
    d.drain()
    d.assert_outputs()


def test_long_prompts_are_bounded_a_step():
    d = driver(max_rows=32, long_prefill_token_threshold=8)
    d.add(unique(20, "a"))
    d.add(unique(20, "b"))
    assert rows(d.step()) == {"a": 8, "b": 8}


def test_a_draft_is_verified_in_one_span():
    d = driver()
    seq = d.add(unique(5, "a", max_tokens=20))
    d.step()
    right = expected_output(seq)
    seq.draft = [*right[1:3], (right[3] + 1) % 7, 0, 0, 0, 0, 0]
    span = d.step().spans[0]
    assert (span.start, span.length, span.commit, dict(span.want)) == (5, 9, "walk", {"sample": range(9)})
    assert seq.output == right[:4] and seq.num_computed == seq.num_tokens - 1 and seq.draft == []
    assert len(seq.tables[0]) == 3, "nine tokens; the look-ahead page of a rejected draft went back"
    d.drain()
    d.assert_outputs()


@pytest.mark.parametrize(("emitted", "computed"), [([1], 6), ([1, 2], 7), ([1, 2, 3, 4], 9), ([], 5)])
def test_advance_keeps_what_was_accepted(emitted, computed):
    d = driver()
    seq = d.add(unique(5, "a", max_tokens=20))
    d.step()
    assert seq.num_computed == 5
    seq.draft = [1, 2, 3]
    plan = d.scheduler.plan(0.0)
    d.scheduler.advance(plan.spans[0], emitted)
    assert seq.num_computed == computed and seq.num_output == 1 + len(emitted)
    d.scheduler.complete(plan)
    d.scheduler.check()


def test_advance_refuses_more_tokens_than_rows():
    d = driver()
    d.add(unique(5, "a"))
    plan = d.scheduler.plan(0.0)
    with pytest.raises(AssertionError):
        d.scheduler.advance(plan.spans[0], [1, 2])


def test_advance_of_what_ended_meanwhile_keeps_nothing():
    d = driver()
    seq = d.add(unique(5, "a"))
    plan = d.scheduler.plan(0.0)
    d.scheduler.finish(seq, "cancelled")
    d.scheduler.advance(plan.spans[0], [3])
    assert seq.num_output == 0 and seq.finish_reason == "cancelled"
    d.scheduler.complete(plan)
    d.scheduler.check()


def test_a_draft_never_goes_beyond_the_end():
    d = driver(max_model_len=12)
    a, b = d.add(unique(5, "a", max_tokens=4)), d.add(unique(8, "b", max_tokens=100))
    d.step()
    a.draft, b.draft = [1, 1], [1, 1]
    plan = d.scheduler.plan(0.0)
    assert rows(plan) == {"a": 3, "b": 3}
    d.scheduler.complete(plan)
    a.draft, b.draft = [1, 1, 1], [1, 1, 1]
    assert rows(d.scheduler.plan(0.0)) == {"a": 1, "b": 1}


def test_prompt_rows_are_scored_once():
    d = driver(max_rows=8)
    seq = d.add(unique(19, "a", prompt_logprobs=0, max_tokens=2))
    wants = [dict(d.step().spans[0].want) for _ in range(4)]
    assert wants == [{"score": range(8)}, {"score": range(8)}, {"score": range(2), "sample": range(2, 3)}, {"sample": range(1)}]
    assert seq.state["num_scored"] == 18


def test_scoring_takes_no_hit_but_what_was_scored_before_a_preemption():
    d = driver(max_rows=8)
    d.add(sequence(19, name="first", max_tokens=1))
    d.drain()
    seq = d.add(sequence(19, name="scored", prompt_logprobs=0))
    assert d.step().spans[0].start == 0 and seq.num_cached == 0
    d.step()
    d.scheduler.block(seq, "test")  # loses its pages, as in a preemption
    d.scheduler.unblock(seq)
    span = d.step().spans[0]
    assert (span.start, dict(span.want)) == (16, {"score": range(2), "sample": range(2, 3)})


def test_a_replayed_sequence_computes_its_output_as_a_prompt():
    d = driver()
    fresh = sequence(5, max_tokens=9)
    replay = request(5, max_tokens=9)
    replay.emitted = [expected_output(fresh)[:4]]
    seq = d.add(Sequence(replay))
    assert dict(d.step().spans[0].want) == {"sample": range(8, 9)}
    d.drain()
    assert seq.output == expected_output(fresh)


# ----------------------------------------------------------------------------------------------------------- budget


def running(d: Driver, n: int, length: int = 5, **options) -> list[Sequence]:
    """``n`` decodes."""
    seqs = [d.add(unique(length, f"d{i}", arrival=d.now, max_tokens=50, **options)) for i in range(n)]
    while any(s.num_output == 0 for s in seqs):
        d.step()
    return seqs


def test_drafts_yield_before_a_decode_stalls():
    d = driver(max_rows=6)
    seqs = running(d, 4)
    for seq in seqs:
        seq.draft = [0, 0]
    assert sorted(rows(d.step()).values()) == [1, 1, 1, 3]


def test_max_rows_of_one_step():
    d = driver(max_rows=20)
    running(d, 4)
    d.add(unique(30, "p"))
    assert rows(d.step(max_rows=8)) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1, "p": 4}
    assert d.step().num_rows == 20
    assert d.step(max_rows=2).num_rows == 2


def test_decodes_without_a_row_come_first_next_time():
    d = driver()
    running(d, 5)
    served = [set(rows(d.step(max_rows=2))) for _ in range(30)]
    assert served[:3] == [{"d0", "d1"}, {"d2", "d3"}, {"d4", "d0"}]
    assert all(set().union(*served[i:i + 4]) == set(served[0] | served[1] | {"d4"}) for i in range(26)), "nobody waits four steps"


def test_the_oldest_prompt_has_a_claim_once_it_has_waited():
    d = driver(num_pages=80, max_rows=40, max_num_seqs=8)
    seqs = running(d, 4)

    def fill() -> None:
        for seq in seqs:
            seq.draft = [0] * 9  # decodes and drafts alone fill the budget

    d.add(unique(30, "old", arrival=0.0))
    fill()
    assert "old" not in rows(d.step())
    d.now = 0.9
    fill()
    assert "old" not in rows(d.step())
    d.now = 1.1
    fill()
    plan = rows(d.step())
    assert plan["old"] >= 4 and len(plan) == 5, "a page of rows, and no decode stalls"


def test_the_claim_is_a_tenth_and_never_more_than_half():
    d = driver(num_pages=200, page_slots=2, max_rows=40, max_num_seqs=32)
    running(d, 30)
    d.now = 5.0
    d.add(unique(60, "old", arrival=0.0))
    d.step()
    seqs = [s for s in d.scheduler.running if s.request.id != "old"]
    for seq in seqs:
        seq.draft = [0]
    assert rows(d.step())["old"] >= 4
    assert rows(d.step(max_rows=10)).get("old", 0) >= 1
    assert rows(d.step(max_rows=1)).keys() != {"old"}, "with one row there is no claim"
    assert 0 < rows(d.step(max_rows=4))["old"] <= 2


def test_rows_kept_for_a_prompt_that_cannot_start_go_to_decodes():
    d = driver(num_pages=16, max_rows=4)
    running(d, 4)
    d.now = 5.0
    d.add(unique(40, "big", arrival=0.0))
    assert rows(d.step()) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}


def test_a_low_ranked_prompt_gets_its_claim_and_no_more():
    d = driver(num_pages=400, max_rows=40, policy=Priority(), long_prefill_token_threshold=32)
    d.add(unique(600, "low", priority=5, arrival=0.0))
    d.step()
    d.now = 3.0
    d.add(unique(600, "high", priority=0, arrival=2.9))
    d.step()
    assert rows(d.step()) == {"low": 8, "high": 32}
    d.scheduler.config = SchedulerConfig(max_num_seqs=8)
    assert rows(d.step()) == {"low": 4, "high": 36}, "a page (or a tenth, here the same) is kept for the oldest"


def test_mixed_steps_are_rounded_down_to_a_tile():
    def plan_with(budget: int, prompt: int, num_decodes: int = 3):
        d = driver(num_pages=400, max_rows=budget)
        if num_decodes:
            running(d, num_decodes)
        d.add(unique(prompt, "p"))
        return rows(d.step())

    assert plan_with(256, 1000)["p"] == 124, "3 + 252 rows would touch a second tile for 127 of them"
    assert plan_with(256, 200)["p"] == 200, "a prompt that can end in this step does"
    assert plan_with(250, 1000)["p"] == 244, "a budget that is no multiple of the tile says what it wants"
    assert plan_with(256, 1000, 0)["p"] == 256
    assert plan_with(128, 1000)["p"] == 124, "never rounded down to nothing"


def test_rounding_leaves_the_oldest_prompt_its_claim():
    d = driver(num_pages=400, max_rows=256, max_num_seqs=120, long_prefill_token_threshold=40)
    running(d, 110, length=2)
    d.add(unique(500, "p", arrival=0.0))
    assert rows(d.step())["p"] == 16, "110 + 40 rows are 22 beyond a tile"
    d.now = 3.0
    assert rows(d.step())["p"] == 40


# -------------------------------------------------------------------------------------------------------- admission


def test_admission_needs_room_for_the_prompt_and_a_page():
    for num_pages, admitted in ((9, {"a": 16, "c": 3}), (10, {"a": 16, "b": 16})):
        d = driver(num_pages=num_pages, page_slots=4)
        d.add(unique(16, "a", max_tokens=9))  # four pages
        d.add(unique(16, "b", max_tokens=9))  # four pages and one to go on with
        d.add(unique(3, "c", max_tokens=3))
        assert rows(d.step()).items() >= admitted.items()
        assert ("b" in admitted) == any(s.request.id == "b" for s in d.scheduler.running)
        d.drain()
    d.assert_outputs()


def test_a_request_that_fits_only_alone_is_admitted():
    d = driver(num_pages=10, page_slots=4)
    seq = d.add(unique(30, "a", max_tokens=7))  # positions 0..35: all nine pages
    assert d.scheduler.pages.fits(36, 64) and not d.scheduler.pages.fits(37, 64)
    d.drain()
    assert seq.output == expected_output(seq)


def test_prompts_in_progress_are_promised_their_pages():
    d = driver(num_pages=14, page_slots=4, max_rows=16, long_prefill_token_threshold=8)
    a = d.add(unique(36, "a", max_tokens=2))  # nine pages and one to go on with, of thirteen
    d.step()
    b = d.add(unique(20, "b", max_tokens=2))
    for _ in range(2):
        assert rows(d.step()) == {"a": 8} and b.status is Status.WAITING
    d.drain()
    assert a.num_preempted == 0 and d.scheduler.preemptions == 0
    d.assert_outputs()


def test_look_ahead_past_what_does_not_fit():
    d = driver(num_pages=12, max_num_seqs=30)
    running(d, 2, length=9)
    for i in range(LOOK_AHEAD):
        d.add(unique(30, f"big{i}", arrival=1.0 + i))
    d.add(unique(2, "small", arrival=50.0, max_tokens=1))
    d.add(unique(2, "small2", arrival=51.0, max_tokens=1))
    plan = rows(d.step())
    assert "small" in plan and "small2" in plan and not any(name.startswith("big") for name in plan)
    d.add(unique(30, "big8", arrival=20.0))
    d.add(unique(2, "small3", arrival=52.0, max_tokens=1))
    assert "small3" not in rows(d.step()), "one more that does not fit, and the look-ahead ends"


@pytest.mark.parametrize("policy", [Fcfs(), Priority()])
def test_the_oldest_is_passed_in_at_most_64_steps(policy):
    """A big old request against an endless stream of small (and more urgent) ones, which always fit."""
    d = driver(num_pages=12, policy=policy, max_num_seqs=4)
    low = 5 if isinstance(policy, Priority) else 0
    for i in range(3):
        d.add(unique(5, f"warm{i}", max_tokens=8, arrival=0.0))
    d.step()
    old = d.add(unique(36, "old", priority=low, arrival=0.1, max_tokens=4))
    passed = admitted_after_overdue = 0
    for i in range(400):
        d.now += 0.001
        if d.scheduler.num_waiting < 4:
            d.add(unique(5, f"s{i}", arrival=1.0 + i, max_tokens=random.Random(i).randint(2, 9)))
        before = set(d.scheduler.running)
        overdue = old.num_skipped >= 64
        d.step()
        if old.status is not Status.WAITING:
            break
        newer = set(d.scheduler.running) - before
        passed += bool(newer)
        admitted_after_overdue += len(newer) if overdue else 0
    assert old.first_scheduled is not None and passed <= 64 and not admitted_after_overdue
    assert passed > 10 or low == 0
    d.scheduler.finish(old, "cancelled")


def test_the_overdue_is_admitted_once_and_others_with_it():
    d = driver(num_pages=40, prefix_root=None)
    seqs = [d.add(unique(5, f"s{i}", arrival=float(i))) for i in range(4)]
    seqs[2].num_skipped = 64
    d.scheduler._overdue[seqs[2]] = None
    assert list(rows(d.step())) == ["s2", "s0", "s1", "s3"]
    d.drain()
    d.assert_outputs()


def test_a_second_old_request_is_bounded_too():
    d = driver(num_pages=12, policy=Priority(), max_num_seqs=4)
    old = [d.add(unique(36, f"old{i}", priority=5, arrival=0.1 + i / 100, max_tokens=4)) for i in range(2)]
    d.add(unique(5, "warm", max_tokens=8, arrival=0.0))
    steps = 0
    while any(s.status is not Status.FINISHED for s in old):
        d.now += 0.001
        steps += 1
        if d.scheduler.num_waiting < 5:
            d.add(unique(5, f"s{steps}", arrival=1.0 + steps, max_tokens=6))
        d.step()
        assert steps < 1000


def test_branches_wait_for_the_prompt_and_compute_one_row():
    d = driver(max_rows=8, page_slots=4)
    shared = request(10, n=3, max_tokens=5)
    parent = d.add(Sequence(shared, 0))
    children = [Sequence(shared, b) for b in (1, 2)]
    for child in children:
        child.parent = parent
        d.add(child)
    d.add(unique(3, "other", arrival=1.0))
    assert [(s.seq.branch, s.length) for s in d.step().spans] == [(0, 8)]
    assert {(s.seq.request.id, s.seq.branch): s.length for s in d.step().spans} == {("r", 0): 2, ("other", 0): 3}
    plan = d.step()
    assert [(s.seq.branch, s.start, s.length) for s in plan.spans if s.seq.branch] == [(1, 9, 1), (2, 9, 1)]
    assert len(plan.copies) == 2 and children[0].tables[0][:2] == parent.tables[0][:2]
    d.drain()
    d.assert_outputs()
    assert len({tuple(s.output) for s in [parent, *children]}) > 1, "branches have streams of their own"


def test_an_overdue_branch_no_longer_waits():
    d = driver(policy=Priority(), max_num_seqs=1)
    shared = request(10, n=2, max_tokens=3, priority=9)
    parent, child = Sequence(shared, 0), Sequence(shared, 1)
    child.parent = parent
    d.add(child)
    d.add(parent)
    d.scheduler.block(parent, "test")
    d.scheduler.unblock(parent)  # behind its child in the queue now
    for i in range(100):
        d.add(unique(3, f"urgent{i}", arrival=1.0, max_tokens=1))
    d.drain()
    assert child.first_scheduled is not None and child.num_cached == 0, "it did not wait for the parent's pages"
    d.assert_outputs()


@pytest.mark.parametrize("fate", ["finished", "blocked", "cancelled at once"])
def test_branches_go_on_without_their_parent(fate):
    d = driver()
    shared = request(10, n=2, max_tokens=1 if fate == "finished" else 5)
    parent, child = Sequence(shared, 0), Sequence(shared, 1)
    child.parent = parent
    d.add(parent)
    if fate == "finished":
        d.step()
        d.add(child)
    else:
        d.add(child)
        d.scheduler.block(parent, "test") if fate == "blocked" else d.scheduler.finish(parent, "cancelled")
    assert [s.seq for s in d.step().spans] == [child]
    d.drain()
    assert child.output == expected_output(child)


def test_a_branch_whose_parents_window_moved_on_computes_for_itself():
    d = driver(groups=(FULL, window_group(4)), max_num_seqs=2)
    shared = request(10, n=2, max_tokens=12)
    parent, child = Sequence(shared, 0), Sequence(shared, 1)
    child.parent = parent
    d.add(parent)
    d.add(unique(3, "hold", max_tokens=9))
    d.add(child)
    d.drain()
    d.assert_outputs()


def test_equal_prompts_wait_for_the_first_and_others_do_not():
    d = driver(max_rows=64)
    first, second = d.add(sequence(20, name="first", max_tokens=2)), d.add(sequence(20, name="second", arrival=1.0))
    d.add(unique(6, "other", arrival=2.0))
    assert rows(d.step()) == {"first": 20, "other": 6}
    assert rows(d.step()) == {"first": 1, "other": 1, "second": 4}
    assert second.num_cached == 16 and second.num_skipped == 0 and first.num_cached == 0


def test_a_prefix_in_chunks_is_followed_chunk_by_chunk():
    d = driver(max_rows=8, num_pages=60)
    d.add(sequence(40, name="first"))
    second = d.add(sequence([*range(32), 9, 9, 9], name="second", arrival=1.0))
    while second.status is Status.WAITING:
        d.step()
    assert second.num_cached == 32


def test_without_prefix_caching_nobody_waits():
    d = driver(max_rows=64, prefix_root=None)
    d.add(sequence(20, name="first"))
    d.add(sequence(20, name="second"))
    assert rows(d.step()) == {"first": 20, "second": 20}


# ------------------------------------------------------------------------------------------------------- preemption


def crowd(policy=None, n=3, num_pages=10, **options) -> tuple[Driver, list[Sequence]]:
    """``n`` decodes of two pages each, and a pool with room for one or two more."""
    d = driver(num_pages=num_pages, policy=policy, max_num_seqs=8, **options)
    seqs = [d.add(unique(6, f"s{i}", arrival=float(i), max_tokens=20)) for i in range(n)]
    d.step()
    return d, seqs


def until_preemption(d: Driver):
    for _ in range(60):
        plan = d.step()
        if plan.preempted:
            return plan
    raise AssertionError("nothing was preempted")


def test_the_latest_arrival_gives_way_and_nothing_is_admitted_then():
    d, (a, b, c) = crowd()
    late = d.add(unique(2, "late", arrival=9.0, max_tokens=2))
    d.scheduler.block(late, "test")
    while not d.scheduler.preemptions:
        if d.scheduler.pages.num_free == 0:
            d.scheduler.unblock(late)  # fits nowhere before the preemption, and in the victim's pages after it
        plan = d.step()
    assert plan.preempted == [c] and c.status is Status.WAITING and c.num_computed == 0 and c.row == -1
    assert late.status is Status.WAITING and d.scheduler.pages.num_free > 0
    assert {span.seq for span in plan.spans} == {a, b}
    d.drain()
    d.assert_outputs()


def test_the_lowest_priority_gives_way():
    d = driver(num_pages=10, policy=Priority(), max_num_seqs=8)
    seqs = [d.add(unique(6, f"s{i}", arrival=float(i), priority=p, max_tokens=20)) for i, p in enumerate([5, 9, 0])]
    d.step()
    assert until_preemption(d).preempted == [seqs[1]]


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
    assert until_preemption(d).preempted == [c], "nothing else is left"


# ------------------------------------------------------------------------------------------------------------ states


def test_finish_in_every_state():
    d = driver(max_num_seqs=1)
    states = {"running": d.add(unique(5, "a")), "waiting": d.add(unique(5, "b", arrival=1.0)), "blocked": d.add(unique(5, "c", arrival=2.0)),
              "new": unique(5, "d")}
    d.scheduler.block(states["blocked"], "test")
    d.step()
    for seq in states.values():
        d.scheduler.finish(seq, "cancelled")
        d.scheduler.finish(seq, "error")
        assert seq.status is Status.FINISHED and seq.finish_reason == "cancelled" and not seq.tables and seq.row == -1
        d.scheduler.check()
    assert not d.scheduler.has_work(0.0) and d.scheduler.queued_tokens == 0
    assert d.scheduler.pages.num_free == d.scheduler.pages.num_total


@pytest.mark.parametrize("after_step", [None, 7])
def test_pages_and_rows_of_a_launched_step_return_when_it_ends(after_step):
    d = driver(max_num_seqs=1)
    s = d.scheduler
    seq = d.add(unique(9, "a"))
    plan = s.plan(0.0)
    s.finish(seq, "cancelled", after_step)
    s.check()
    assert s.pages.num_limbo == 3
    other = d.add(unique(5, "b"))
    empty = s.plan(0.0)
    assert not empty.spans, "the only row may still be in use"
    s.complete(plan)
    if after_step:
        assert s.pages.num_limbo == 3
        plan.step = after_step
        s.complete(plan)
    assert s.pages.num_limbo == 0
    s.check()
    assert d.step().spans[0].seq is other


def test_preemption_with_a_step_in_flight_waits_for_its_pages():
    d, seqs = crowd(num_pages=7)  # 6 pages, all in use
    s = d.scheduler
    for _ in range(2):
        d.step()
    held = s.plan(0.0)  # launched, and not yet ended
    for span in held.spans:
        s.advance(span, [1])
    while not (plan := s.plan(0.0)).preempted:
        for span in plan.spans:
            s.advance(span, [1])
        s.complete(held)
        held = plan
    assert len(plan.preempted) == 1 and s.pages.num_limbo > 0, "one victim is enough: its pages are on their way"
    s.check()
    s.complete(held)
    s.complete(plan)
    s.check()


def test_blocked_sequences_are_never_in_the_way():
    d = driver(max_num_seqs=1)
    blocked = d.add(unique(5, "a"))
    d.scheduler.block(blocked, "grammar", until=10.0)
    assert not d.scheduler.has_work(9.0) and d.scheduler.has_work(10.0)
    assert d.scheduler.expired(9.0) == [] and d.scheduler.expired(10.0) == [blocked]
    other = d.add(unique(5, "b", arrival=3.0, max_tokens=1))
    assert d.scheduler.num_blocked == 1 and d.scheduler.queued_tokens == 10
    assert [s.seq for s in d.step().spans] == [other] and not d.step().spans
    d.scheduler.block(blocked, "session", until=20.0)
    assert blocked.blocked_on == "session" and d.scheduler.queued_tokens == 5
    d.scheduler.unblock(blocked)
    d.scheduler.unblock(blocked)
    assert blocked.blocked_on == "" and [s.seq for s in d.step().spans] == [blocked]


def test_blocking_a_running_sequence_gives_up_its_pages():
    d = driver()
    seq = d.add(unique(9, "a", max_tokens=5))
    d.step()
    d.scheduler.block(seq, "session")
    d.scheduler.check()
    assert d.scheduler.num_running == 0 and d.scheduler.pages.num_free == d.scheduler.pages.num_total and seq.num_preempted == 0
    d.scheduler.unblock(seq)
    d.drain()
    assert seq.output == expected_output(seq)


def test_blocking_what_has_ended_does_nothing():
    d = driver()
    seq = d.add(unique(9, "a"))
    d.scheduler.finish(seq, "stop")
    d.scheduler.block(seq, "session")
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


# -------------------------------------------------------------------------------------------------------------- queue


@pytest.mark.parametrize("policy", [Fcfs(), Priority()])
def test_the_queue_is_always_in_policy_order(policy):
    rng = random.Random(4)
    queue, members = Queue(policy.order_waiting, True), []
    for i in range(2000):
        if members and rng.random() < 0.45:
            queue.discard(members.pop(rng.choice([0, -1, rng.randrange(len(members))])))
        else:
            seq = sequence(1, arrival=float(rng.choice([i, rng.randrange(i + 1), i // 100])), priority=rng.randrange(3), name=str(i))
            members.append(seq)
            queue.add(seq, 0.0)
        if members and rng.random() < 0.1:
            again = rng.choice([members[0], members[-1], *queue.ordered(0.0)[-3:]])
            members.remove(again)
            members.append(again)
            queue.discard(again)
            queue.add(again, 0.0)
        if rng.random() < 0.6:
            assert queue.ordered(0.0) == policy.order_waiting(members, 0.0)
    assert len(queue) == len(members) and set(queue) == set(members)


def test_who_returns_to_the_queue_is_in_it_once():
    queue = Queue(Fcfs().order_waiting, True)
    a, b, c = (sequence(1, arrival=1.0, name=name) for name in "abc")
    for seq in (a, b, c):
        queue.add(seq, 0.0)
    assert queue.ordered(0.0) == [a, b, c]
    queue.discard(a)
    queue.add(a, 0.0)
    assert queue.ordered(0.0) == [b, c, a]


def test_a_policy_whose_order_changes_is_asked_every_time():
    class Turning(Fcfs):
        static = False

        def order_waiting(self, seqs, now):
            return sorted(seqs, key=lambda seq: seq.request.arrival, reverse=now > 1)

    queue = Queue(Turning().order_waiting, False)
    seqs = [sequence(1, arrival=float(i)) for i in range(3)]
    for seq in seqs:
        queue.add(seq, 0.0)
    assert queue.ordered(0.0) == seqs and queue.ordered(2.0) == seqs[::-1]


def test_nothing_is_sorted_again_while_nothing_changes():
    class Counting(Fcfs):
        calls = 0

        def order_waiting(self, seqs, now):
            Counting.calls += 1
            return super().order_waiting(seqs, now)

    d = driver(policy=Counting())
    running(d, 4)
    Counting.calls = 0
    for _ in range(10):
        d.step()
    assert Counting.calls == 0


# ----------------------------------------------------------------------------------------------- the checks can fail


def lose_a_row(s, seq):
    s._free_rows.pop()


def wrong_status(s, seq):
    seq.status = Status.WAITING


def forget(s, seq):
    s.running.discard(seq)


def miscount(s, seq):
    s.queued_tokens += 1


def compute_too_much(s, seq):
    seq.num_computed = seq.num_tokens


def free_its_pages(s, seq):
    s.pages.release(seq)


@pytest.mark.parametrize("damage", [lose_a_row, wrong_status, forget, miscount, compute_too_much, free_its_pages])
def test_check_sees(damage):
    d = driver()
    seq = d.add(unique(9, "a"))
    d.step()
    damage(d.scheduler, seq)
    with pytest.raises(AssertionError):
        d.scheduler.check()
