"""Leases: a paused sequence finds its pages again however much ran in between; who runs needs them more; time ends them."""

from __future__ import annotations

import time

import pytest

from tests.engine.driver import Driver

PAGE = 16
PROMPT = [3 + i % 50 for i in range(3 * PAGE)]


def others(d: Driver, count: int, length: int = 5 * PAGE) -> list:
    return [d.request(f"other{count}-{i}", [60 + i] * length, max_tokens=4, seed=i, ignore_eos=True) for i in range(count)]


def paused(d: Driver, lease: float):
    """A request that ends, traffic that takes every page that may be taken, and the request that goes on from it."""
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


@pytest.mark.parametrize(("lease", "hit"), [(0.0, 0), (500.0, 4 * PAGE)])
def test_pages_outlive_the_traffic_under_a_lease_only(lease, hit):
    d = Driver(num_pages=20, max_model_len=256)
    try:
        found, begun = paused(d, lease)
        assert found == hit
        whole = Driver()
        whole.run([whole.request("whole", PROMPT, max_tokens=2 * (PAGE + 4), seed=1, ignore_eos=True)])
        assert begun[len(PROMPT):] + d.outputs["next", 0].tokens == whole.outputs["whole", 0].tokens, "the pieces are the whole"
        whole.close()
    finally:
        d.close()


def test_who_runs_needs_them_more():
    """A request that needs nearly every page gets them; the oldest leases go."""
    d = Driver(num_pages=20, max_model_len=256)
    try:
        for i in range(3):
            run(d, f"piece{i}", [5 + i] * 2 * PAGE, 500.0)
        room = d.engine.scheduler.room
        assert len(list(room.leased())) == 3 and d.engine.pages.num_free < d.engine.pages.num_total
        run(d, "large", [9] * 14 * PAGE, 0.0)
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
        run(d, "piece", PROMPT, 0.001)
        time.sleep(0.005)
        run(d, "other", [4, 5, 6], 0.0)
        assert not list(d.engine.scheduler.room.leased())
        d.assert_clean()
    finally:
        d.close()


def test_a_lease_needs_the_prefix_cache():
    d = Driver(enable_prefix_caching=False)
    try:
        d.submit(d.request("r", PROMPT, max_tokens=4, lease=5.0))
        assert d.errors["r"].status == 400 and "prefix cache" in d.errors["r"].message
    finally:
        d.close()
