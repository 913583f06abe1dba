"""The chance that a prefix is asked for again: Kaplan and Meier's estimate, by kind."""

from __future__ import annotations

import random

import pytest

from kvasir.engine.pages import returns
from kvasir.engine.pages.returns import BEGINS, INTERVALS, Kind, Returns, interval_of


@pytest.fixture
def plain(monkeypatch):
    """Without a prior, fading or what other tenants do."""
    for name, value in (("PRIOR", 1e-12), ("SHARED", 1e-9), ("FADING", 1.0)):
        monkeypatch.setattr(returns, name, value)


def test_intervals_of_age():
    for i in range(INTERVALS):
        assert interval_of(BEGINS[i] * 1.0001) == i and interval_of(min(BEGINS[i + 1] * 0.9999, 1e9)) == i
    assert interval_of(1e9) == INTERVALS - 1 and interval_of(0.0) == 0


def test_what_never_comes_back_has_no_chance():
    r = Returns()
    for i in range(50):
        r.pass_time(float(i))
        assert r.came([b"%d" % i, b"shared"]) == 0
        r.left("", b"%d" % i, 0)
    assert r.chance(Kind("", 0), 0.0) == r.chance(Kind("", 0), 10.0) == 0.0
    assert Returns().chance(Kind("", 3), 1.0) == 0.0, "and what nobody knows anything of"


def test_the_estimate_equals_the_formula(plain):
    """Against a count over all prefixes, with some whose end nobody has seen yet."""
    rng, r = random.Random(3), Returns()
    events = []  # (time, what, key)
    for i in range(300):
        begun = rng.uniform(0, 60)
        events.append((begun, "left", b"%d" % i))
        if rng.random() < 0.7:
            events.append((begun + rng.expovariate(0.3), "came", b"%d" % i))
    events.sort()
    idle, closed = {}, []  # key -> since; (age, returned)
    for now, what, key in events:
        if now > 40:
            break
        r.pass_time(now)
        if what == "left":
            r.left("", key, 0)
            idle[key] = now
        else:
            assert r.came([b"unknown", key]) == 1
            closed.append((now - idle.pop(key), True))
    r.pass_time(40.0)
    known = closed + [(40.0 - since, False) for since in idle.values()]
    stay = 1.0
    chances = []
    for i in range(INTERVALS - 1, -1, -1):
        gone = sum(came and interval_of(age) == i for age, came in known)
        through = sum(interval_of(age) > i for age, _ in known)
        stay *= 1 - gone / (gone + through) if gone else 1.0
        chances.append(1 - stay)
    assert [r.chance(Kind("", 0), BEGINS[i]) for i in range(INTERVALS)] == pytest.approx(chances[::-1], abs=1e-6)
    assert 0.4 < chances[-1] < 0.9


def test_kinds_by_depth_and_tenant(plain):
    r = Returns()
    for i in range(20):
        r.pass_time(10.0 * i)
        r.left("batch", b"b%d" % i, 0)
        depth = r.came([b"session"])
        r.left("chat", b"session", depth)
    assert depth == 19
    assert r.kind("chat", 19) == Kind("chat", 4) and r.kind("chat", 1) == Kind("chat", 1)
    assert r.chance(Kind("chat", 4), 1.0) > 0.9 > 0.1 > r.chance(Kind("batch", 0), 1.0)
    assert r.chance(Kind("chat", 4), 30.0) == 0.0, "it never lay idle for so long and came back"


def test_a_new_tenant_is_taken_for_one_like_the_others():
    r = Returns()
    for i in range(60):
        r.pass_time(float(i))
        r.left("a", b"%d" % i, 1)
        r.came([b"%d" % i])
    assert r.chance(Kind("b", 1), 0.0) > 0.5


def test_agents_that_share_a_history_count_as_one_return(plain):
    """Sub-agents begin with the history of their session; the session itself comes after them."""
    r = Returns()
    r.left("", b"end", 2)
    r.pass_time(1.2)
    assert [r.came([b"other", b"end"]) for _ in range(3)] == [3, 3, 3]
    assert r.chance(Kind("", 2), 0.0) == pytest.approx(1.0)
    reached = r._counts[Kind("", 2)].reached
    assert reached[interval_of(1.2)] == 1.0 and max(reached) == 1.0, "one prefix was counted more than once"


def test_ends_and_tenants_are_bounded(monkeypatch):
    monkeypatch.setattr(returns, "MAX_ENDS", 10)
    monkeypatch.setattr(returns, "MAX_TENANTS", 3)
    r = Returns()
    for i in range(1000):
        r.pass_time(float(i))
        r.left(f"t{i}", b"%d" % (i % 500), 0)
    assert len(r._ends) == 10 and r.kind("t999", 0) == Kind("", 0) and r.kind("t1", 0) == Kind("t1", 0)
    assert sum(map(len, r._ageing)) <= 40 and len(r._counts) <= 3 * 5 + 10
    assert r.came([b"0"]) == 0, "forgotten"


def test_time_never_goes_back():
    r = Returns()
    r.pass_time(5.0)
    r.pass_time(3.0)
    assert r.now == 5.0
