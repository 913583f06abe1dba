"""Random work over three levels: copies land late and out of order, tiers fail, sequences come, go and give way.

Every row that a step reads is compared with what it must be, every invariant is checked after every step, and at the
end nothing is held or lost. A page that is read before its copy has landed, freed before its copy has left, or stored
before it was full must be noticed.
"""

from __future__ import annotations

import random

import pytest

from kvasir.types import Status
from tests.engine.fake import FULL, STATE, VOCAB, manager, scheduler, sequence, window_group
from tests.engine.late_links import LateLink, TieredDriver

GROUPS = {
    "full": (FULL,),
    "window": (FULL, window_group(9)),
    "windows": (window_group(6),),
    "state": (FULL, STATE),
}
OPERATIONS = 2500  # of each of the four sets of groups


def driver(kind: str, seed: int, slots=(30, 60), **faults) -> TieredDriver:
    groups = GROUPS[kind]
    interval = 8 if STATE in groups else 0
    pages = manager([24] * len(groups), 4, groups, state_interval=interval)
    counts = [[n] * len(groups) for n in slots]
    return TieredDriver(scheduler(pages, max_rows=16, max_num_seqs=4), counts, random.Random(seed), **faults)


def prompts(rng: random.Random) -> list[int]:
    """One of some conversations, cut somewhere: most prompts begin like others."""
    talk = random.Random(rng.randrange(6))
    shared = [[random.Random(7).randrange(VOCAB) for _ in range(12)], []][talk.random() < 0.2]
    return [*shared, *(talk.randrange(VOCAB) for _ in range(40))][: rng.randrange(1, 48)]


def work(d: TieredDriver, operations: int) -> None:
    rng, count = d.rng, 0
    while count < operations:
        count += 1
        d.now += 0.05
        kind, alive = rng.random(), [seq for seq in d.sequences if seq.status is not Status.FINISHED]
        if kind < 0.25 and len(alive) < 12:
            params = {"lease": 1.0} if rng.random() < 0.1 else {}
            d.add(sequence(prompts(rng), name=f"r{count}", arrival=d.now, max_tokens=rng.randrange(1, 9), **params))
        elif kind < 0.30 and alive:
            seq = rng.choice(alive)
            d.scheduler.finish(seq, "cancelled")
            d.tiers.ended(seq, "cancelled")
        elif kind < 0.36 and alive:
            seq = rng.choice(alive)
            d.scheduler.block(seq)
            d.scheduler.unblock(seq)
        elif kind < 0.363:
            d.scheduler.pages.forget_prefixes()
        else:
            d.step(late=rng.random() < 0.5)
        d.sequences = [seq for seq in d.sequences if seq.status is not Status.FINISHED or check_output(d, seq)]
    d.drain()
    d.assert_outputs()


def check_output(d: TieredDriver, seq) -> bool:
    before, d.sequences = d.sequences, [seq]
    d.assert_outputs()
    d.sequences = before
    return False


@pytest.mark.parametrize("kind", GROUPS)
def test_random_operations_leak_nothing(kind):
    d = driver(kind, 1)
    work(d, OPERATIONS)
    counts = d.tiers._counts
    assert counts[0].read_bytes and counts[1].read_bytes and counts[0].written_bytes, "nothing came back"
    d.scheduler.pages.check([])
    d.tiers.weights_changed(None)
    d.scheduler.pages.check([])
    for shelf in (shelf for shelves in d.tiers.shelves for shelf in shelves):
        assert len(shelf.free) == shelf.num_slots and not shelf.holds


@pytest.mark.parametrize("kind", ["full", pytest.param("window", marks=pytest.mark.slow)])
def test_tiers_that_fail_cost_nobody_a_token(kind):
    d = driver(kind, 2, fails=0.2)
    work(d, 600)
    assert d.tiers._counts[0].failed and d.tiers._counts[0].broken


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 11))
@pytest.mark.parametrize("slots", [(30, 60), (5, 8), (200,), (3,)], ids=str)
@pytest.mark.parametrize("kind", GROUPS)
def test_random_operations_with_other_sizes(kind, slots, seed):
    work(driver(kind, seed, slots, fails=0.05), OPERATIONS)


def noticed(d: TieredDriver) -> None:
    with pytest.raises(AssertionError, match="reads a wrong|wrong tokens"):
        work(d, OPERATIONS)


def test_a_copy_into_a_page_that_a_page_copy_still_reads_runs_behind_it():
    """The only free page is one that a fork has just given back, and whose copy runs with the plan."""
    d = driver("full", 1, slots=(30,))
    pages, (pool,) = d.scheduler.pages, d.scheduler.pages.pools
    d.add(asked := sequence(range(100, 108), name="a", max_tokens=1))
    d.drain()
    d.tiers.before_plan(None)
    d.settle()
    while pages.num_cached:  # the tier alone holds the prefix
        pool.drop(pool.take(pool.num_available), None)
    parent, child = sequence(range(8), name="p"), sequence(range(8), name="c")
    pages.admit(parent, 0)
    assert pages.grow(parent, 8, [])
    parent.num_computed = 8
    pages.commit(parent)
    pages.fork(parent, child, 6)
    pages.release(parent)
    pool.hold(shared := child.tables[0][1])
    rest = pool.take(pool.num_available - 1)
    copies: list = []
    pages.begin(1)
    child.tokens = [*range(9)]
    assert pages.grow(child, 8, copies) and copies[0].source == shared
    pool.let_go([shared], None)
    again = sequence([*asked.request.prompt_ids, 1, 2], name="b")
    pool.drop(rest[:1], None)
    assert d.tiers.fetch(again, 0, None)
    (job,) = [*d.tiers._queued, *d.tiers._flying]
    taken = {move.row for moves in job.moves.values() for move in moves}
    assert shared in taken and d.tiers._queued == [job], "it waits for the plan to be launched"
    d.tiers.launched(None)
    assert d.tiers._flying == [job]


def test_a_page_that_is_read_before_its_copy_has_landed_is_noticed():
    """Negative control: futures are done before the bytes are there. The pages hold poison until then."""
    d = driver("full", 1)
    d.tiers.links = [(down, LateLink(d.rng, early=True)) for down, _ in d.tiers.links]
    noticed(d)


def test_a_page_that_is_freed_before_its_copy_has_left_is_noticed():
    """Negative control: copies down count as landed before they run, so their pages are let go, and written."""
    d = driver("full", 1)
    d.tiers.links = [(LateLink(d.rng, early=True), up) for _, up in d.tiers.links]
    noticed(d)


def test_a_page_that_is_stored_before_it_was_full_is_noticed():
    """Negative control: the stored copy lacks the last token."""
    noticed(driver("full", 1, stale=True))
