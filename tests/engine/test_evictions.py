"""Orders of eviction: the contract of all of them, and what each takes first."""

from __future__ import annotations

import random

import pytest

from kvasir import technique
from kvasir.engine.pages.eviction import EVICTIONS, Eviction
from kvasir.engine.pages.evictions.expected_loss import ExpectedLoss
from kvasir.engine.pages.returns import Kind, Returns
from tests.engine.fake import manager, sequence

ONCE, OFTEN = Kind("", 0), Kind("", 2)


def learnt() -> Returns:
    """Returns in which prefixes of OFTEN come back after 4 s, and those of ONCE never."""
    r = Returns()
    for i in range(40):
        r.left("", b"o%d" % i, 0)
        r.left("", b"s%d" % i, 2)
        r.pass_time(r.now + 4.0)
        r.came([b"s%d" % i])
    return r


@pytest.mark.parametrize("name", technique.own(EVICTIONS))
def test_random_operations(name):
    """Every page is listed once, in some order, until it is removed; sums of losses agree with the pages."""
    rng, r = random.Random(1), learnt()
    idle = technique.load(EVICTIONS, name, Eviction).idle_pages(r)
    known: set[int] = set()
    for _ in range(10_000):
        page = rng.randrange(60)
        if page not in known:
            idle.add(page, rng.choice([ONCE, OFTEN]), rng.randint(1, 3000))
            known.add(page)
        elif rng.random() < 0.5:
            idle.remove(page)
            known.discard(page)
        else:
            idle.pass_over(page)
        if rng.random() < 0.3:
            r.pass_time(r.now + rng.choice([0.001, 1.0]))
        assert len(idle) == len(known) and set(idle) == known and (page in idle) == (page in known)
        assert not known or idle.first() in known
        runs = list(idle.losses())
        assert sum(count for count, _ in runs) == len(known) and all(0.0 <= chance <= 1.0 for _, chance in runs)
    while known:
        page = idle.first()
        idle.remove(page)
        known.remove(page)
    assert not len(idle)


def test_what_will_be_asked_for_stays():
    r = learnt()
    idle = ExpectedLoss().idle_pages(r)
    idle.add(1, OFTEN, 1)
    r.pass_time(r.now + 1.0)
    idle.add(2, ONCE, 1)
    assert idle.first() == 2, "used later, but nobody will ask for it"
    assert [count for count, _ in idle.losses()] == [1, 1] and list(idle.losses())[0][1] < 0.1 < 0.5
    r.pass_time(r.now + 30.0)
    assert idle.first() in (1, 2)
    assert r.chance(OFTEN, 31.0) == 0.0, "idle for too long"


def test_pages_deep_in_a_prompt_cost_more_to_compute():
    r = learnt()
    idle = ExpectedLoss().idle_pages(r)
    idle.add(1, Kind("a", 2), 3000)
    idle.add(2, OFTEN, 1)
    assert r.chance(Kind("a", 2), 0.0) > 0.3
    assert idle.first() == 2


def test_what_a_waiting_request_will_use_goes_last():
    r = learnt()
    idle = ExpectedLoss().idle_pages(r)
    idle.add(1, OFTEN, 9)
    idle.add(2, OFTEN, 8)
    r.pass_time(r.now + 1.0)
    idle.add(3, OFTEN, 9)
    r.pass_time(r.now + 30.0)
    assert idle.first() == 1
    asked = [idle.ask(2), idle.ask(2)]  # by two requests; what became idle with it is kept with it
    assert idle.first() == 3 and list(idle.losses()) == [(1, 0.0), (2, 1.0)]
    last = idle.ask(3)
    assert idle.first() == 3, "all are asked for: the request that came first goes on first"
    idle.withdraw(asked[0])
    idle.withdraw(last)
    assert idle.first() == 3 and list(idle.losses()) == [(1, 0.0), (2, 1.0)]
    idle.withdraw(asked[1])
    r.pass_time(r.now + 0.1)
    assert idle.first() == 1
    asked = idle.ask(1)
    idle.remove(1)
    idle.remove(2)
    idle.withdraw(asked)
    assert list(idle) == [3] == [idle.first()]


@pytest.mark.parametrize("name", technique.own(EVICTIONS))
def test_children_go_first(name):
    """A page stays while a page behind it in its prefix is there, whoever used it last, and however seldom its kind
    comes back.

    Mutation: PagePool takes ``first()`` as it is.
    """
    pages = manager(9, eviction=technique.load(EVICTIONS, name, Eviction))
    long = sequence(range(16))
    pages.admit(long, 0)
    long.num_computed = 0
    assert pages.grow(long, 16, [])
    long.num_computed = 16
    pages.commit(long)
    pages.release(long)
    short = sequence([*range(4), 99])
    pages.admit(short, pages.match(short))  # uses the first page, so that it is the last by recency
    pages.release(short)
    table = [node.pages[0] for node in pages.index.walk(long, 4)]
    pool = pages.pools[0]
    # The first page is idle longest, and of a kind that never comes back.
    for page in table:
        pool.cached.remove(page)
    for number, page in enumerate(table, 1):
        pages.returns.pass_time(pages.returns.now + 1.0)
        pool.cached.add(page, ONCE, number)
    pool.take(len(pool.free))
    taken = [pool.take(1)[0] for _ in table]
    assert taken == table[::-1]


def test_a_pool_of_nothing_but_parents_in_use_gives_a_page_all_the_same():
    """Two sequences computed one prompt at the same time: the second keeps pages of its own, and the first's are idle
    while the second's hang behind them."""
    pages = manager(9)
    first, second = sequence(range(12)), sequence(range(12))
    for seq in (first, second):
        pages.admit(seq, 0)
        assert pages.grow(seq, 12, [])
    first.num_computed = 8
    pages.commit(first)
    second.num_computed = 12
    pages.commit(second)
    pages.release(first)
    pool = pages.pools[0]
    idle = set(pool.cached)
    assert len(idle) == 2
    pool.take(len(pool.free))
    assert {pool.take(1)[0], pool.take(1)[0]} == idle
    again = sequence(range(12))
    assert pages.match(again) == 0, "the third page is of no use without the two before it"
