"""The scheduler policies: their order, their victims, and the rules that hold for every policy."""

from __future__ import annotations

import random

import pytest

from kvasir import technique
from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.schedulers.priority import Config, Priority
from kvasir.errors import ConfigError
from kvasir.types import Status
from tests.engine.driver import Driver as EngineDriver
from tests.engine.fake import Driver, expected_output, manager, scheduler, sequence
from tests.engine.scheduling import rows, unique

PACKAGE = "kvasir.engine.schedule.schedulers"
POLICIES = technique.names(PACKAGE)


def test_the_policies_are_found_by_name():
    assert {"fcfs", "priority"} <= set(POLICIES)
    assert technique.load(PACKAGE, "priority:threshold=3", SchedulerPolicy).config == Config(3)
    with pytest.raises(ConfigError, match="fcfs"):
        technique.load(PACKAGE, "fcsf", SchedulerPolicy)
    with pytest.raises(ConfigError, match="threshold"):
        technique.load(PACKAGE, "priority:treshold=3", SchedulerPolicy)
    with pytest.raises(ConfigError, match="at least 1"):
        technique.load(PACKAGE, "priority:threshold=0", SchedulerPolicy)
    with pytest.raises(ConfigError, match="no options"):
        technique.load(PACKAGE, "fcfs:threshold=1", SchedulerPolicy)


def test_affinity_keeps_a_problem_together():
    """Calls stand where the first call of their problem came, tenants have problems of their own, and ranks never
    change."""
    policy = technique.load(PACKAGE, "affinity", SchedulerPolicy)

    def call(arrival, affinity="", tenant=""):
        seq = sequence(1, arrival=arrival, name=f"{affinity}{tenant}{arrival}")
        seq.request.affinity, seq.request.tenant = affinity, tenant
        return seq

    first, second, plain = call(0, "p"), call(1, "q"), call(2)
    assert policy.order_waiting([plain, second, first], 0.0) == [first, second, plain]
    later = [call(5, "q"), call(6, "p"), call(7), call(8, "p", "another")]
    assert policy.order_waiting([*later, plain, second], 9.0) == [later[1], second, later[0], plain, later[2], later[3]]
    assert policy.order_waiting(later[::-1], 9.0) == [later[1], later[0], later[2], later[3]]


def test_short_prompts_go_first_as_far_as_there_is_a_queue():
    policy = technique.load(PACKAGE, "shortest", SchedulerPolicy)

    def call(length, arrival, waited=0.0, branch=0):
        seq = sequence(length, branch=branch, arrival=arrival, name=f"{length} {arrival}")
        seq.first_scheduled = None if waited is None else arrival + waited
        return seq

    one, two, three = call(1000, 0.0), call(10, 0.1), call(1000, 0.2)
    assert policy.order_waiting([three, two, one], 0.3) == [one, two, three], "nobody waits: by arrival"
    for i in range(40):  # waits of one second, 100 tokens in the mean
        policy.order_waiting([call(100, 1.0 + i, waited=1.0)], 50.0)
    long, short, late = call(500, 60.0), call(10, 69.0), call(10, 71.0)
    assert policy.order_waiting([long, late, short], 72.0) == [short, long, late], (
        "five times the mean length: ten seconds behind"
    )
    assert policy.order_waiting([late, short, long], 99.0) == [short, long, late], "ranks never change"
    branches = [call(300, 80.0)]
    branches += [call(300, 80.0, branch=b) for b in (1, 2)]
    for seq in branches[1:]:
        seq.parent = branches[0]
    between = call(10, 80.0)
    assert policy.order_waiting([branches[2], between, branches[0], branches[1]], 90.0) == [between, *branches], (
        "branches stand together"
    )
    queue = technique.load(PACKAGE, "shortest", SchedulerPolicy)
    waiting = [call(100, float(i), waited=None) for i in range(4)]
    assert queue.order_waiting(waiting, 4.0) == waiting
    tail = [call(300, 10.0, waited=None), call(30, 11.0, waited=None)]
    assert queue.order_waiting(tail, 11.0) == tail[::-1], "those that wait still count as long as they have"


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    def test_declares_that_it_changes_no_kv(self, name):
        policy = technique.load(PACKAGE, name, SchedulerPolicy)
        assert policy.affects_kv is False and policy.exact

    def test_orders_are_stable_permutations(self, name):
        policy, rng = technique.load(PACKAGE, name, SchedulerPolicy), random.Random(1)
        seqs = [sequence(1, arrival=rng.randrange(4), priority=rng.randrange(3), name=str(i)) for i in range(60)]
        for order in (policy.order_waiting, policy.order_running):
            once = order(seqs, 1.0)
            assert sorted(map(id, once)) == sorted(map(id, seqs)) and order(once, 1.0) == once
            ties = [s for s in once if (s.request.arrival, s.request.priority) == (1, 1)]
            assert ties == [s for s in seqs if (s.request.arrival, s.request.priority) == (1, 1)]

    def test_a_running_sequence_takes_from_the_last_in_rank(self, name):
        policy = technique.load(PACKAGE, name, SchedulerPolicy)
        seqs = policy.order_running([sequence(1, arrival=i, priority=i % 2) for i in range(4)], 0.0)
        incoming = sequence(1)
        incoming.status = Status.RUNNING
        assert policy.victim(seqs, incoming) is seqs[-1] and policy.victim([], incoming) is None

    def test_everything_ends_with_the_tokens_it_has_alone(self, name):
        rng = random.Random(2)
        d = Driver(
            scheduler(manager(14, 4), technique.load(PACKAGE, name, SchedulerPolicy), max_rows=16, max_num_seqs=4)
        )
        seqs = [
            d.add(
                sequence(
                    [rng.randrange(3) for _ in range(rng.randint(1, 25))],
                    arrival=i,
                    priority=rng.choice([0, 4, 30]),
                    name=str(i),
                    max_tokens=rng.randint(1, 20),
                )
            )
            for i in range(40)
        ]
        d.drain()
        assert all(s.finish_reason == "length" and s.output == expected_output(s) for s in seqs)


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_front_ends_learn_how_requests_wait(name):
    d = EngineDriver(scheduling_policy=name, max_queued_requests=9)
    assert (d.engine.info.max_queued_requests, d.engine.info.max_queued_tokens) == (9, 1 << 20)
    assert d.engine.info.priorities == (name == "priority")
    d.close()


def test_fcfs_goes_by_arrival_and_never_displaces():
    a, b, c = sequence(1, arrival=2.0), sequence(1, arrival=1.0, priority=9), sequence(1, arrival=2.0, branch=1)
    assert Fcfs().order_waiting([c, a, b], 0.0) == [b, a, c]
    assert Fcfs().victim([a, b], sequence(1, priority=-99)) is None


def test_priority_goes_lower_first_then_by_arrival():
    a, b, c = (
        sequence(1, arrival=1.0, priority=5),
        sequence(1, arrival=3.0, priority=-1),
        sequence(1, arrival=2.0, priority=5),
    )
    assert Priority(Config()).order_waiting([c, a, b], 0.0) == [b, a, c]


@pytest.mark.parametrize(("difference", "displaces"), [(9, False), (10, True), (50, True), (-20, False)])
def test_priority_displaces_only_from_the_threshold_on(difference, displaces):
    d = Driver(scheduler(manager(40, 4), Priority(Config()), max_num_seqs=2))
    low = [d.add(unique(6, f"low{i}", priority=difference, arrival=float(i), max_tokens=30)) for i in range(2)]
    d.step()
    urgent = d.add(unique(6, "urgent", priority=0, arrival=5.0, max_tokens=3))
    plan = d.step()
    assert plan.preempted == ([low[1]] if displaces else [])
    assert urgent.status is Status.WAITING, "a step with preemptions admits nothing"
    d.step()
    assert (urgent.status is Status.RUNNING) == displaces
    d.drain()
    d.assert_outputs()


@pytest.mark.parametrize("victim", [lambda running, incoming: 1 / 0, lambda running, incoming: incoming])
def test_a_policy_that_names_no_victim_is_off(victim, caplog):
    """When pages run out, the last by arrival gives way."""

    class Strange(Priority):
        ours = False

    policy = Strange(Config())
    policy.victim = victim
    d = Driver(scheduler(manager(14, 4), policy, max_num_seqs=8))
    for i in range(8):
        d.add(unique(6, f"{i}", arrival=float(i), max_tokens=30))
    d.drain()
    d.assert_outputs()
    assert d.scheduler.preemptions and "is off until a restart" in caplog.text


def test_displacing_frees_enough_pages_and_not_more():
    d = Driver(scheduler(manager(14, 4), Priority(Config()), max_num_seqs=8))
    low = [d.add(unique(6, f"low{i}", priority=50, arrival=float(i), max_tokens=3)) for i in range(4)]
    d.step()
    d.add(unique(20, "urgent", priority=0, arrival=9.0, max_tokens=2))  # six pages; five are free
    assert d.step().preempted == [low[3]]
    assert rows(d.step())["urgent"] == 20


def test_nobody_is_displaced_in_vain():
    d = Driver(scheduler(manager(14, 4), Priority(Config()), max_num_seqs=8))
    d.add(unique(26, "near", priority=5, arrival=0.0, max_tokens=6))  # seven pages, too near in priority
    d.add(unique(6, "low", priority=50, arrival=1.0, max_tokens=9))
    d.step()
    d.add(unique(44, "urgent", priority=0, arrival=2.0, max_tokens=2))  # eleven pages: not even with those of 'low'
    assert not d.step().preempted
    d.drain()
    d.assert_outputs()


def test_only_the_head_of_the_queue_displaces():
    d = Driver(scheduler(manager(14, 4), Priority(Config()), max_num_seqs=8))
    d.add(unique(30, "near", priority=5, arrival=0.0, max_tokens=9))
    d.add(unique(6, "low", priority=50, arrival=1.0, max_tokens=9))
    d.step()
    d.add(unique(44, "urgent", priority=0, arrival=2.0, max_tokens=2))
    d.add(unique(16, "less", priority=1, arrival=3.0, max_tokens=2))
    assert not d.step().preempted
    d.drain()
    d.assert_outputs()


def test_displacement_does_not_lower_the_number_that_may_run():
    d = Driver(scheduler(manager(60, 4), Priority(Config()), max_num_seqs=3))
    for i in range(3):
        d.add(unique(6, f"low{i}", priority=50, arrival=float(i), max_tokens=30))
    d.step()
    for i in range(2):
        d.add(unique(6, f"urgent{i}", priority=0, arrival=9.0 + i, max_tokens=20))
    for _ in range(6):
        d.step()
    assert d.scheduler.num_running == 3 and d.scheduler.preemptions == 2


def test_who_was_displaced_often_is_left_alone():
    d = Driver(scheduler(manager(40, 4), Priority(Config()), max_num_seqs=1))
    low = d.add(unique(6, "low", priority=50, arrival=0.0, max_tokens=40))
    displaced = 0
    for i in range(12):
        d.step()
        if low.status is Status.RUNNING:
            d.add(unique(3, f"urgent{i}", priority=0, arrival=1.0 + i, max_tokens=1))
        displaced += len(d.step().preempted)
        d.step()
    assert displaced == 4
    d.drain()
    d.assert_outputs()


# --------------------------------------------------------------------------------------------------- fair: API keys


def fair_driver(policy, **options):
    return Driver(scheduler(manager(200, 4), policy, max_rows=64, max_num_seqs=4), **options)


def served(policy, honest: int, attackers: int, *, steps: int = 600) -> float:
    """Share of the emitted tokens that honest keys get while attackers ask for answers 40 times as long, all they
    can."""
    d, count = fair_driver(policy), 0
    for step in range(steps):
        for key in range(honest + attackers):
            tenant, verbose = f"key{key}", key >= honest
            mine = [s for s in d.sequences if s.request.tenant == tenant and s.status is not Status.FINISHED]
            while len(mine) < (8 if verbose else 1):
                count += 1
                mine.append(
                    d.add(
                        unique(
                            4, f"{tenant} {count}", tenant=tenant, arrival=float(step), max_tokens=160 if verbose else 4
                        )
                    )
                )
        d.step()
        d.now += 1.0
    tokens = {True: 0, False: 0}
    for seq in d.sequences:
        tokens[int(seq.request.tenant[3:]) < honest] += seq.num_output
    return tokens[True] / sum(tokens.values())


def test_fair_gives_every_key_its_share():
    """One honest key of two gets what it asks for beside a key that floods the server; by arrival it does not."""
    fair = technique.load(PACKAGE, "fair:displace=64", SchedulerPolicy)
    assert served(fair, 1, 1) > 2 * served(Fcfs(), 1, 1)
    assert served(technique.load(PACKAGE, "fair:displace=64", SchedulerPolicy), 1, 10) > 4 * served(Fcfs(), 1, 10)


def test_two_busy_keys_differ_by_a_bounded_amount():
    """However long both have work, their counters differ by what the seats can hold, not by more with time."""
    policy = technique.load(PACKAGE, "fair:displace=0", SchedulerPolicy)
    served(policy, 0, 2, steps=900)
    seats, longest = 4, 4 + 2 * 160
    assert abs(policy.work["key0"] - policy.work["key1"]) <= seats * longest


def test_a_pause_earns_no_credit():
    policy = technique.load(PACKAGE, "fair", SchedulerPolicy)
    d = fair_driver(policy)
    d.add(unique(4, "a", tenant="a", max_tokens=2))
    d.drain()
    for i in range(6):
        d.add(unique(4, f"b{i}", tenant="b", arrival=1.0 + i, max_tokens=40))
    for _ in range(60):
        d.step()
    assert policy.work["b"] > 10 * policy.work["a"]
    late = d.add(unique(4, "a again", tenant="a", arrival=9.0))
    policy.order_waiting([late], 9.0)
    assert policy.work["a"] == policy.work["b"], "the idle key starts where the busy one stands"


def test_work_is_charged_once():
    """Rows that are computed again after a preemption cost their key nothing, nor do cached ones."""
    policy = technique.load(PACKAGE, "fair", SchedulerPolicy)
    d = fair_driver(policy)
    seq = d.add(unique(30, "a", tenant="a", max_tokens=6))
    d.step()
    d.scheduler.block(seq)
    d.scheduler.unblock(seq)
    d.drain()
    assert policy.work["a"] == 30 + 2 * 6
    with pytest.raises(ConfigError, match="displace"):
        technique.load(PACKAGE, "fair:displace=-1", SchedulerPolicy)


def test_a_cache_salt_makes_no_new_caller():
    policy = technique.load(PACKAGE, "fair", SchedulerPolicy)
    d = fair_driver(policy)
    for salt in "xyz":
        d.add(unique(4, salt, tenant=f"a:{salt}", max_tokens=2))
    d.drain()
    assert list(policy.work) == ["a"]
