"""Leases: a paused sequence finds its pages again whatever ran in between, until others need them or time is over."""

from __future__ import annotations

import time

import pytest

from tests.engine import fake
from tests.engine.driver import Driver
from tests.engine.scheduling import driver, unique

PAGE = 16
PROMPT = [3 + i % 50 for i in range(3 * PAGE)]


def others(d: Driver, count: int, length: int = 5 * PAGE) -> list:
    return [
        d.request(f"other{count}-{i}", [60 + i] * length, max_tokens=4, seed=i, ignore_eos=True) for i in range(count)
    ]


def paused(d: Driver, lease: float):
    """Run a request, traffic that takes every page that may be taken, and a request that goes on from the first."""
    run(d, "piece", PROMPT, lease)
    for wave in range(3, 7):
        for request in others(d, wave):
            d.submit(request)
        drain(d)
    begun = PROMPT + d.outputs["piece", 0].tokens
    run(d, "next", begun, 0.0)
    return d.outputs["next", 0].num_cached, begun


def run(d: Driver, name: str, prompt: list[int], lease: float) -> None:
    d.submit(d.request(name, prompt, max_tokens=PAGE + 4, seed=1, ignore_eos=True, lease=lease))
    drain(d)


def drain(d: Driver) -> None:
    while d.engine.has_work():
        d.step()
        d.engine.scheduler.room.check()


@pytest.mark.parametrize(("lease", "hit"), [(0.0, 0), (500.0, 4 * PAGE + 3)])
def test_pages_outlive_the_traffic_under_a_lease_only(lease, hit):
    d = Driver(num_pages=20, max_model_len=256)
    try:
        found, begun = paused(d, lease)
        assert found == hit
        whole = Driver()
        whole.run([whole.request("whole", PROMPT, max_tokens=2 * (PAGE + 4), seed=1, ignore_eos=True)])
        assert begun[len(PROMPT) :] + d.outputs["next", 0].tokens == whole.outputs["whole", 0].tokens, (
            "the pieces add up to the whole"
        )
        whole.close()
    finally:
        d.close()


@pytest.mark.parametrize(("cut", "overlap"), [(0, True), (1, False), (PAGE // 2, True)])
def test_a_paused_sequence_goes_on_as_a_decode(cut, overlap):
    """A request that goes on from a lease computes one row a branch, and the pieces add up to the tokens of one
    request.

    ``cut``: number of tokens that are cut off the end of the first piece.
    """
    d = Driver(overlap=overlap)
    try:
        run(d, "piece", PROMPT, 500.0)
        begun = PROMPT + d.outputs["piece", 0].tokens
        begun = begun[: len(begun) - cut]
        before = len(begun) - len(PROMPT)
        requests = [d.request(f"next{i}", begun, n=3, max_tokens=PAGE, seed=i, ignore_eos=True) for i in (1, 2)]
        for request in requests:
            d.submit(request)
        d.step()
        assert d.engine.scheduler.num_running == 6 and all(
            s.num_computed + s.num_ahead >= len(begun) - 1 for s in d.engine.scheduler.running
        )
        plan = d.engine._stats.step_rows if not overlap else d.engine._plans[0][0].num_rows
        assert plan == 6, "each branch computes one row"
        drain(d)
        whole = Driver()
        whole.run(
            [whole.request("whole", PROMPT, max_tokens=before + PAGE, seed=1, ignore_eos=True)]
            + [whole.request(f"fresh{i}", begun, n=3, max_tokens=PAGE, seed=i, ignore_eos=True) for i in (1, 2)]
        )
        assert d.outputs["next1", 0].tokens == whole.outputs["whole", 0].tokens[before:]
        for i in (1, 2):
            for branch in range(3):
                assert d.outputs[f"next{i}", branch].tokens == whole.outputs[f"fresh{i}", branch].tokens
        assert d.outputs["next1", 0].num_cached == d.outputs["next2", 0].num_cached == len(begun) - 1
        assert d.engine.pages.cached_tokens == 2 * (len(begun) - 1), "a hit counts once a request, not once a branch"
        whole.close()
    finally:
        d.close()


def test_a_lease_is_of_its_tenant_and_of_its_weights():
    d = Driver()
    try:
        for name, prompt in (("short", PROMPT[:4]), ("long", PROMPT)):
            d.submit(d.request(name, prompt, max_tokens=4, seed=1, ignore_eos=True, lease=500.0))
            drain(d)
            begun = prompt + d.outputs[name, 0].tokens
            stranger = d.request(f"{name} of another", begun, max_tokens=2)
            stranger.tenant = "another"
            d.submit(stranger)
            drain(d)
            assert d.outputs[stranger.id, 0].num_cached == 0
            run(d, f"{name} next", begun, 0.0)
            assert d.outputs[f"{name} next", 0].num_cached == len(begun) - 1
        d.engine.weights_changed()
        for name, prompt in (("short", PROMPT[:4]), ("long", PROMPT)):
            run(d, f"{name} later", prompt + d.outputs[name, 0].tokens, 0.0)
            assert d.outputs[f"{name} later", 0].num_cached == 0
        d.engine.scheduler.room.begin(time.monotonic() + 1000)
        assert not list(d.engine.scheduler.room.leased()) and not d.engine.scheduler.room._by_place
    finally:
        d.close()


def test_going_on_takes_its_own_lease_where_nothing_else_is_left():
    """Of three pages two are leased, but a fork needs two more. The request starts from the full page in the index
    instead."""
    d = Driver(num_pages=4, max_model_len=48)
    try:
        run(d, "piece", PROMPT[:10], 500.0)
        begun = PROMPT[:10] + d.outputs["piece", 0].tokens
        d.submit(d.request("next", begun, max_tokens=PAGE, seed=1, ignore_eos=True))
        drain(d)
        whole = Driver()
        whole.run([whole.request("whole", PROMPT[:10], max_tokens=2 * PAGE + 4, seed=1, ignore_eos=True)])
        assert d.outputs["piece", 0].tokens + d.outputs["next", 0].tokens == whole.outputs["whole", 0].tokens
        assert d.outputs["next", 0].num_cached == PAGE and d.engine.scheduler.room.revoked == 1
        whole.close()
    finally:
        d.close()


def test_a_large_request_takes_the_pages_of_the_oldest_leases():
    """A request that needs nearly every page gets them, and the oldest leases go."""
    d = Driver(num_pages=26, max_model_len=400)
    try:
        for i in range(3):
            run(d, f"piece{i}", [5 + i] * 2 * PAGE, 500.0)
        room = d.engine.scheduler.room
        assert len(list(room.leased())) == 3 and d.engine.pages.num_free < d.engine.pages.num_total
        run(d, "large", [9] * 18 * PAGE, 0.0)
        assert d.outputs["large", 0].finish_reason == "length" and room.revoked == 2 and len(list(room.leased())) == 1
    finally:
        d.close()


def test_a_running_sequence_takes_leased_pages_before_anyone_gives_way():
    d = Driver(num_pages=12, max_model_len=160)
    try:
        run(d, "piece", [5] * 4 * PAGE, 500.0)
        d.submit(d.request("long", [9] * 4 * PAGE, max_tokens=5 * PAGE, ignore_eos=True))
        drain(d)
        assert d.engine.scheduler.preemptions == 0 and d.engine.scheduler.room.revoked == 1
    finally:
        d.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_time_ends_a_lease(overlap):
    d = Driver(overlap=overlap)
    try:
        run(d, "piece", PROMPT, 1e-9)  # over as soon as the clock has moved, however busy the machine is
        time.sleep(0.001)
        run(d, "other", [4, 5, 6], 0.0)
        assert not list(d.engine.scheduler.room.leased())
        d.assert_clean()
    finally:
        d.close()


# ---------------------------------------------------------------------------------------- leases without a model


def leased(count: int, num_pages: int = 40, **options) -> fake.Driver:
    """``count`` ended sequences of nine tokens (three pages), each with a lease of ten seconds."""
    d = driver(num_pages=num_pages, page_slots=4, max_num_seqs=8, **options)
    for i in range(count):
        d.add(unique(8, f"l{i}", arrival=float(i), max_tokens=2, lease=10.0))
    d.drain_without_ending_leases()
    return d


def test_leases_are_counted_down_when_their_time_is_over():
    """Mutation: ``Room._release`` does not subtract a lease's pages, so leases seem to keep more and more of them."""
    d = leased(3)
    room = d.scheduler.room
    room.check()
    assert len(list(room.leased())) == 3 and len(room._leased_pages) == 9
    room.begin(d.now + 11)
    room.check()
    assert not list(room.leased()) and not room._leased_pages and not room._by_place
    assert d.scheduler.pages.num_free == d.scheduler.pages.num_total


def test_leases_keep_half_of_the_pages_however_many_come_and_go():
    """Mutations: the share is not bounded; pages of ended leases still count, so later leases are revoked at once."""
    d = leased(12, num_pages=24)
    room = d.scheduler.room
    room.check()
    assert len(list(room.leased())) == 4, "twelve pages of 24, three each"
    assert room.revoked == 8
    assert [holder.request.id for holder in room.leased()] == ["l8", "l9", "l10", "l11"], "the oldest went"
    for round_ in range(3):
        d.now += 20
        for i in range(4):
            d.add(unique(8, f"r{round_}-{i}", arrival=d.now, max_tokens=2, lease=10.0))
        d.drain_without_ending_leases()
        assert len(list(room.leased())) == 4 and room.revoked == 8


def a_page_too_many(room):
    room._leased_pages[max(room._leased_pages) + 1] = 1


def a_page_twice(room):
    room._leased_pages[min(room._leased_pages)] += 1


def a_page_without_a_lease(room):
    room._leased_pages[max(room._leased_pages) + 1] = 0


def a_place_of_nobody(room):
    room._by_place[b"nowhere"] = []


def a_place_forgotten(room):
    room._by_place.popitem()


def a_lease_forgotten(room):
    room._leases.pop()


@pytest.mark.parametrize(
    "damage",
    [a_page_too_many, a_page_twice, a_page_without_a_lease, a_place_of_nobody, a_place_forgotten, a_lease_forgotten],
)
def test_check_sees(damage):
    d = leased(2)
    d.scheduler.room.check()
    damage(d.scheduler.room)
    with pytest.raises(AssertionError):
        d.scheduler.room.check()


def test_a_lease_needs_the_prefix_cache():
    d = Driver(enable_prefix_caching=False)
    try:
        d.submit(d.request("r", PROMPT, max_tokens=4, lease=5.0))
        assert d.errors["r"].status == 400 and "prefix cache" in d.errors["r"].message
    finally:
        d.close()
