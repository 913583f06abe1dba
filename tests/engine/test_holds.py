"""Prompts that wait for the sake of the cache: when, and that nobody waits for ever."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from kvasir.engine.pages.evictions.expected_loss import ExpectedLoss
from kvasir.engine.pages.evictions.lru import Lru
from kvasir.engine.schedule import holds
from kvasir.engine.schedule.schedulers import fair, priority
from kvasir.engine.schedule.schedulers.fair import Fair
from kvasir.engine.schedule.schedulers.priority import Priority
from kvasir.types import Status
from tests.engine.fake import manager, scheduler, sequence

SIZE, LENGTH = 4, 40
NAMES = count()


class Sessions:
    """Sessions that send a prompt of 40 tokens, all but the first few of them the same each time, and pause for a
    second. One step takes a tenth of a second."""

    def __init__(self, eviction, num_pages, policy=None, **options):
        self.scheduler = scheduler(
            manager(num_pages, SIZE, eviction=eviction), policy, max_rows=256, max_model_len=200, **options
        )
        self.now = 0.0

    def arrive(self, session: int, turn: int, **options):
        # A turn adds a token.
        prompt = [(session * 7 + i * i) % 97 + 100 * session for i in range(LENGTH + turn)]
        seq = sequence(prompt, arrival=self.now, max_tokens=2, name=f"{session} {next(NAMES)}", **options)
        self.scheduler.add(seq)
        return seq

    def step(self):
        self.now += 0.1
        plan = self.scheduler.plan(self.now)
        for span in plan.spans:
            seq = span.seq
            self.scheduler.advance(span, [1] if "sample" in span.want else [])
            if seq.num_output == 2:
                self.scheduler.finish(seq, "length")
        self.scheduler.complete(plan)
        self.scheduler.check()
        return plan

    def run(self, *seqs):
        for _ in range(200):
            if all(seq.status is Status.FINISHED for seq in seqs):
                return
            self.step()
        raise AssertionError("they never end")

    def learn(self, sessions, turns):
        """Let sessions come and go until it is known that they come back."""
        for turn in range(turns):
            self.run(*(self.arrive(s, turn) for s in range(sessions)))
            for _ in range(5 + 13 * turn % 40):  # pauses of half a second to four
                self.step()
        return turns


def world(eviction=None, policy=None, **options):
    """Two sessions whose prefixes fill the pool, known to come back."""
    found = Sessions(eviction or ExpectedLoss(), 42, policy, **options)
    found.turn = found.learn(2, 20)
    return found


def test_a_cold_prompt_waits_while_hot_ones_run():
    w = world()
    hot, cold = w.arrive(0, w.turn), w.arrive(7, 0)
    w.scheduler.holds._credit = 0.0
    w.step()
    assert hot.status is Status.RUNNING and cold.status is Status.WAITING and list(w.scheduler.holds.held) == [cold]
    w.run(hot, cold)  # nothing runs when the hot one has ended


@pytest.mark.parametrize("case", ["lru", "priority", "fair", "credit", "nothing runs", "one that has begun", "room"])
def test_who_does_not_wait(case):
    """Negative controls of the test above: each takes away one reason to wait."""
    policies = {"priority": Priority(priority.Config()), "fair": Fair(fair.Config())}
    w = world(Lru() if case == "lru" else None, policies.get(case))
    w.scheduler.holds._credit = 1000.0 if case == "credit" else 0.0
    if case == "room":
        w.scheduler.pages.forget_prefixes()
        w.scheduler.pages.returns.__init__()
        w.scheduler.pages.returns.pass_time(w.now)
    hot = None if case == "nothing runs" else w.arrive(0, w.turn)
    cold = w.arrive(7, 0)
    cold.num_preempted = case == "one that has begun"
    w.step()
    assert cold.status is Status.RUNNING and not w.scheduler.holds.held
    w.run(*[seq for seq in (hot, cold) if seq])


def test_what_is_in_the_cache_goes_on_whoever_came_first():
    w = world()
    w.scheduler.holds._credit = 0.0
    running = w.arrive(0, w.turn)
    w.step()
    cold = w.arrive(7, 0)
    hot = w.arrive(1, w.turn)
    w.step()
    assert hot.status is Status.RUNNING and cold.status is Status.WAITING
    w.run(running, hot, cold)


def test_hot_sessions_go_first_and_cold_ones_start_in_the_end(monkeypatch):
    """Two sessions that never end keep the pool full. A third starts once the credit covers what it evicts."""
    monkeypatch.setattr(holds, "UNUSED", 0.0)
    w = world()
    w.scheduler.holds._credit = 0.0
    live, turn = [w.arrive(0, w.turn)], w.turn
    w.step()
    live.append(w.arrive(1, w.turn))  # one step later, so that one of them always runs
    w.step()
    cold, waited = w.arrive(7, 0), 0
    while cold.status is Status.WAITING:
        waited += 1
        assert waited < 600, "it starves"
        for session, seq in enumerate(live):
            if seq.status is Status.FINISHED:
                turn = (turn + 1) % 30
                live[session] = w.arrive(session, turn)
        w.step()
    assert waited > 20, "it did not wait at all"


def test_without_credit_it_would_starve(monkeypatch):
    """The negative control of the bound above."""
    monkeypatch.setattr(holds, "COMPUTED", 0.0)
    with pytest.raises(AssertionError, match="it starves"):
        test_hot_sessions_go_first_and_cold_ones_start_in_the_end(monkeypatch)


def test_prompts_that_nobody_repeats_are_never_held():
    w = Sessions(ExpectedLoss(), 40)
    for i in range(60):
        seqs = [w.arrive(2 * i, 0), w.arrive(2 * i + 1, 0)]
        w.run(*seqs)
        assert not w.scheduler.holds.held
        assert all(seq.num_skipped == 0 for seq in seqs)


def test_a_held_prompt_is_no_backlog(monkeypatch):
    """Rows of held prompts do not make steps longer, and claim none."""
    w = world()
    w.scheduler.holds._credit = 0.0
    hot, cold = w.arrive(0, w.turn), w.arrive(7, 0)
    w.step()
    asked = []
    most = w.scheduler.pace.most
    monkeypatch.setattr(
        w.scheduler.pace, "most", lambda d, r, rows, ahead: asked.append(ahead) or most(d, r, rows, ahead)
    )
    w.now += 5.0  # more than PROMPT_PATIENCE
    assert w.scheduler._claim([], w.now, 100) == (None, 0)
    w.step()
    assert asked == [0]
    w.run(hot, cold)


def full_but_for(slots):
    """A tier with so many free slots."""
    return SimpleNamespace(shelves=[[SimpleNamespace(free=range(slots))]])


@pytest.mark.parametrize(
    "room, reach, held",
    [
        (None, 0, True),  # no tiers
        (1000, 0, False),  # they keep what is evicted
        (0, 0, True),  # they are full, too
        (0, LENGTH - 1, False),  # they have this prompt
    ],
)
def test_with_tiers_a_prompt_is_held_once_they_are_full(room, reach, held, monkeypatch):
    s = Sessions(ExpectedLoss(), 24)
    s.learn(2, 40)
    if room is not None:
        monkeypatch.setattr(s.scheduler.holds.pages, "tiers", full_but_for(room))
        monkeypatch.setattr(holds, "reachable", lambda pages, seq, limit: reach)
    assert s.scheduler.holds.hold(s.arrive(9, 0), 0, LENGTH, [0]) is held


def test_a_held_prompt_is_not_looked_up_in_every_step(monkeypatch):
    s = Sessions(ExpectedLoss(), 24)
    s.learn(2, 40)
    asked = []
    monkeypatch.setattr(s.scheduler.holds.pages, "tiers", full_but_for(0))
    monkeypatch.setattr(holds, "reachable", lambda pages, seq, limit: asked.append(seq) or 0)
    seq, own = s.arrive(9, 0), s.scheduler.holds
    for _ in range(holds.REACH_STEPS + 1):
        own.begin()
        assert own.hold(seq, 0, LENGTH, [0])
    assert len(asked) == 2
    own.begin()
    own.begin()  # it is no longer held
    assert not own._reach
