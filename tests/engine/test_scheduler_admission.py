"""Admission: which sequences are admitted, which wait for others, and in which order."""

from __future__ import annotations

import random

import pytest

from kvasir.engine.schedule.queue import Queue
from kvasir.engine.schedule.scheduler import LOOK_AHEAD, MAX_VISITS
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.schedulers.priority import Config, Priority
from kvasir.types import Sequence, Status
from tests.engine.fake import FULL, expected_output, request, sequence, window_group
from tests.engine.scheduling import driver, rows, running, unique

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


def test_a_prompt_admitted_in_the_same_step_is_promised_its_pages():
    """Mutation: ``Scheduler._start`` does not add the pages that an admitted prompt still needs to ``promised``."""
    d = driver(num_pages=14, page_slots=4, max_rows=16, long_prefill_token_threshold=8)
    a = d.add(
        unique(36, "a", max_tokens=2)
    )  # nine pages and one to go on with, of thirteen; takes two in the first step
    b = d.add(unique(20, "b", arrival=1.0, max_tokens=2))  # five and one
    assert rows(d.step()) == {"a": 8}
    assert b.status is Status.WAITING
    d.drain()
    assert a.num_preempted == b.num_preempted == 0
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
    assert "small3" not in rows(d.step()), "the look-ahead ends with one more request that does not fit"


@pytest.mark.parametrize("policy", [Fcfs(), Priority(Config())])
def test_the_oldest_is_passed_in_at_most_64_steps(policy):
    """A large old request competes with an endless stream of small (and more urgent) ones, which always fit."""
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
    d.scheduler.backlog.overdue[seqs[2]] = None
    assert list(rows(d.step())) == ["s2", "s0", "s1", "s3"]
    d.drain()
    d.assert_outputs()


def test_a_second_old_request_is_bounded_too():
    d = driver(num_pages=12, policy=Priority(Config()), max_num_seqs=4)
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


def test_however_many_branches_wait_they_hide_nobody():
    d = driver(max_rows=8, page_slots=4)
    shared = request(10, n=MAX_VISITS + 2, max_tokens=1)
    for seq in (branches := [Sequence(shared, b) for b in range(MAX_VISITS + 2)]):
        seq.parent = branches[0] if seq.branch else None
        d.add(seq)
    d.add(unique(3, "other", arrival=1.0))
    d.step()
    assert rows(d.step()) == {"r": 2, "other": 3}


def test_an_overdue_branch_no_longer_waits():
    d = driver(policy=Priority(Config()), max_num_seqs=1)
    shared = request(10, n=2, max_tokens=3, priority=9)
    parent, child = Sequence(shared, 0), Sequence(shared, 1)
    child.parent = parent
    d.add(child)
    d.add(parent)
    d.scheduler.block(parent)
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
        d.scheduler.block(parent) if fate == "blocked" else d.scheduler.finish(parent, "cancelled")
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


# -------------------------------------------------------------------------------------------------------------- queue


@pytest.mark.parametrize("policy", [Fcfs(), Priority(Config())])
def test_the_queue_is_always_in_policy_order(policy):
    rng = random.Random(4)
    queue, members = Queue(policy.order_waiting, True), []
    for i in range(2000):
        if members and rng.random() < 0.45:
            queue.discard(members.pop(rng.choice([0, -1, rng.randrange(len(members))])))
        else:
            seq = sequence(
                1,
                arrival=float(rng.choice([i, rng.randrange(i + 1), i // 100])),
                priority=rng.randrange(3),
                name=str(i),
            )
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
