"""Starvation is bounded under every policy: several keys, drawn prompts and output lengths, and displaced sequences."""

from __future__ import annotations

import random
from collections import Counter, abc

import pytest

from kvasir import technique
from kvasir.engine.schedule.pace import MixedRows
from kvasir.engine.schedule.policy import MAX_SKIPS, SchedulerPolicy
from kvasir.types import Sequence, Status
from tests.engine.fake import Driver, manager, scheduler
from tests.engine.scheduling import unique

PACKAGE = "kvasir.engine.schedule.schedulers"
SEEDS = 5
OLD = 4  # sequences that wait while others keep coming
QUEUE = 7  # sequences in the queue, those that keep coming included
KEYS = ("a", "b", "c", "d")
STEPS = (OLD + 1) ** 2 * MAX_SKIPS  # a world that takes longer has starved somebody


class Newest(SchedulerPolicy):
    """The latest arrival goes first."""

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (-seq.request.arrival, seq.branch))


class Short(SchedulerPolicy):
    """The fewest tokens go first, prompt and output together."""

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.num_prompt + seq.request.max_tokens, seq.request.arrival))


# All registered policies, and two that displace early, so that sequences come back into the queue.
POLICIES = {
    name: (lambda name=name: technique.load(PACKAGE, name, SchedulerPolicy))
    for name in (*technique.names(PACKAGE), "fair:displace=4", "priority:threshold=1")
}
GREEDY = {"newest": Newest, "short": Short}


class Crowded:
    """An engine with a few old sequences in its queue, and a stream of short ones that every policy would rather start:
    urgent, of keys without much service, and of a problem that came before all.

    ``passed``: steps that started a later arrival while this one waited for its first start. ``older``: how many
    sequences it found in the queue.
    """

    def __init__(self, policy: SchedulerPolicy, seed: int, mixed: bool) -> None:
        self.rng = rng = random.Random(seed)
        pages, seats = rng.choice([12, 16, 24]), rng.choice([2, 3, 4])
        self.driver = Driver(scheduler(manager(pages, 4), policy, max_rows=16, max_num_seqs=seats))
        if mixed:
            self.driver.scheduler.pace.mixed = MixedRows(6, 3)
        self.passed: Counter[Sequence] = Counter()
        self.older: Counter[Sequence] = Counter()
        for _ in range(seats):  # all seats are taken, by keys that have had much service
            self.add("seat", 4, rng.randint(6, 12), priority=50, tenant=rng.choice(KEYS[:2]), affinity="p")
        self.step()
        self.old = [
            self.add("old", rng.randint(10, 30), rng.randint(1, 10), priority=100, tenant=rng.choice(KEYS[:2]))
            for _ in range(OLD)
        ]

    def add(self, name: str, prompt: int, output: int, *, affinity: str = "", **options) -> Sequence:
        d = self.driver
        d.now += 0.01
        seq = unique(prompt, f"{name}{len(d.sequences)}", arrival=d.now, max_tokens=output, **options)
        seq.request.affinity = affinity
        self.older[seq] = sum(s.status is Status.WAITING for s in d.sequences)
        return d.add(seq)

    def step(self) -> None:
        """Take a step, and count whom it passed over."""
        d = self.driver
        d.now += 1.0
        before = [seq for seq in d.sequences if seq.status is Status.WAITING]
        d.step()
        started = [seq for seq in before if seq.status is not Status.WAITING]
        latest = max((seq.request.arrival for seq in started), default=0.0)
        for seq in before:
            if seq.first_scheduled is None:
                self.passed[seq] += seq.request.arrival < latest

    def live(self) -> None:
        """Go on until the old ones have started, or somebody was passed too often."""
        rng, steps = self.rng, 0
        while any(seq.first_scheduled is None for seq in self.old) and not self.starved() and steps < STEPS:
            while self.driver.scheduler.num_waiting < QUEUE:
                tenant = rng.choice([*KEYS, f"new{rng.randrange(99)}"])
                self.add("late", rng.randint(1, 8), rng.randint(1, 8), tenant=tenant, affinity=rng.choice(["", "p"]))
            self.step()
            steps += 1
        assert steps < STEPS

    def starved(self) -> list[Sequence]:
        return [seq for seq, steps in self.passed.items() if steps > (self.older[seq] + 1) * MAX_SKIPS]


@pytest.mark.parametrize("mixed", [False, True], ids=["fixed", "mixed"])
@pytest.mark.parametrize("name", [*POLICIES, *GREEDY])
def test_starvation_bound(name, mixed):
    """A sequence that found k older ones in the queue is passed in at most (k + 1) * MAX_SKIPS steps, however urgent,
    short and numerous the later ones are.

    With a fixed row budget (FastGen's, see `test_fill.py`) and with one that steps with decodes do not use up. Policies
    that always prefer new or short requests are bounded as well, since the bound is the scheduler's.
    """
    passed = preempted = 0
    for seed in range(SEEDS):
        world = Crowded((POLICIES | GREEDY)[name](), seed, mixed)
        world.live()
        assert not world.starved()
        passed += max(world.passed[seq] for seq in world.old)
        preempted += world.driver.scheduler.preemptions
    assert passed >= (SEEDS * MAX_SKIPS if name in GREEDY or name.startswith("priority") else 1), "nobody was passed"
    assert preempted or "displace=" not in name and "threshold=" not in name


@pytest.mark.parametrize("mixed", [False, True], ids=["fixed", "mixed"])
@pytest.mark.parametrize("name", [*GREEDY, "priority"])
def test_without_ageing_a_policy_that_prefers_the_others_starves_the_old(name, mixed, monkeypatch):
    monkeypatch.setattr("kvasir.engine.schedule.backlog.MAX_SKIPS", 10**9)
    for seed in range(SEEDS):
        world = Crowded((POLICIES | GREEDY)[name](), seed, mixed)
        world.live()
        assert world.starved()
