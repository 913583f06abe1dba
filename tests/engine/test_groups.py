"""First m of n: tokens alone decide which branches count, the others end in the step that shows it, and no noise
changes.
"""

from __future__ import annotations

import pytest

from kvasir.engine.groups import Groups
from kvasir.errors import RequestError
from kvasir.types import Request, SamplingParams, Sequence
from tests.engine.driver import Driver

PROMPT = [5, 9, 14, 3, 3, 8, 21]
N = 24


@pytest.fixture(scope="module")
def world():
    """A driver, and the outputs of all N branches when none is cancelled. A stop token is drawn now and then."""
    d = Driver(max_num_seqs=8)  # fewer seats than branches: some wait, start later, and may still be the shortest
    d.run([request(d, "free", None)])
    yield d, [d.outputs["free", b] for b in range(N)]
    d.close()


def request(d, name, m, n=N, **params):
    usual = dict(n=n, finish_after=m, seed=3, temperature=1.5, max_tokens=30, stop_token_ids=tuple(range(7, 500, 4)))
    return d.request(name, PROMPT, **usual | params)


def first(outputs, m):
    return sorted((len(o.tokens), b) for b, o in enumerate(outputs) if o.finish_reason == "stop")[:m]


@pytest.mark.parametrize("m", [1, 3, 9])
def test_the_first_m_are_those_of_the_free_run(world, m):
    d, free = world
    name = f"first{m}"
    d.run([request(d, name, m)])
    found = [d.outputs.get((name, b)) for b in range(N)]
    kept = first(free, m)
    assert len(kept) == m
    stopped = sorted((len(o.tokens), b) for b, o in enumerate(found) if o.finish_reason == "stop")
    assert stopped[:m] == kept, "others came first"
    for b, (ours, all_) in enumerate(zip(found, free)):
        assert ours.tokens == all_.tokens[: len(ours.tokens)], "a branch lost its noise"
        if ours.finish_reason == "cancelled":
            # It was beaten (its next token would have put it behind the last that counts) and stopped there.
            assert kept[-1] < (len(ours.tokens) + 1, b)
    wasted = sum(len(o.tokens) for o in found if o.finish_reason == "cancelled")
    assert wasted < sum(len(o.tokens) for o in free) - sum(length for length, _ in kept)


def test_beaten_in_the_same_step():
    """All end in one step, and only branch 0, which is a step ahead (it computed the prompt), is longer than the
    shortest."""
    d = Driver(max_num_seqs=64)
    try:
        d.submit(request(d, "r", 1))
        while d.engine.has_work():
            before = {key for key, o in d.outputs.items() if o.finish_reason}
            d.step()
            after = {key for key, o in d.outputs.items() if o.finish_reason}
            if after - before:
                break
        ended = [o for o in d.outputs.values() if o.finish_reason == "stop"]
        shortest = min(len(o.tokens) for o in ended)
        assert len(after) == N and all(len(o.tokens) <= shortest + (b == 0) for (_, b), o in d.outputs.items())
        d.assert_clean()
    finally:
        d.close()


def test_length_does_not_count(world):
    d, _ = world
    d.run([request(d, "cut", 1, n=4, max_tokens=2, stop_token_ids=())])
    assert [d.outputs["cut", b].finish_reason for b in range(4)] == ["length"] * 4


def test_overlap_and_preemption_choose_the_same(world):
    _, free = world
    for options in (dict(overlap=True), dict(num_pages=12, max_model_len=128), dict(max_num_batched_tokens=4)):
        d = Driver(max_num_seqs=8, **options)
        try:
            d.run([request(d, "r", 3)], preempt_every=5)
            stopped = sorted((len(o.tokens), b) for (_, b), o in d.outputs.items() if o.finish_reason == "stop")
            assert stopped[:3] == first(free, 3)
        finally:
            d.close()


def test_ends_of_an_earlier_engine_count():
    """A replayed request brings the delivered tokens: branch 1 had ended by itself, branch 2 was cut short."""
    params = SamplingParams(n=3, finish_after=1)
    again = Request(
        id="r",
        prompt_ids=[1],
        params=params,
        seed=0,
        max_tokens=9,
        epoch=1,
        emitted=[[4], [4, 4, 2], [4, 4, 4]],
        ended=[1, 2],
    )
    groups = Groups(frozenset({2}))
    for branch in (1, 2):
        groups.replayed(Sequence(again, branch))
    running = Sequence(again, 0)
    assert groups.decided() == ["r"] and groups.beaten([running]) == []
    running.tokens += [4, 4]
    assert groups.beaten([running]) == [running]


def test_cancelling_does_not_decide(world):
    """A client that cancels a branch does not make it one of the first."""
    d, free = world
    d.submit(request(d, "c", 1))
    d.step()
    d._take(d.engine.cancel("c", 0))
    d.run([])
    kept = [(length, b) for length, b in first(free, N) if b][:1]
    assert (
        sorted((len(o.tokens), b) for (name, b), o in d.outputs.items() if name == "c" and o.finish_reason == "stop")[
            :1
        ]
        == kept
    )


def test_too_many_branches():
    d = Driver(max_queued_requests=20)
    try:
        with pytest.raises(RequestError, match="out of range: 1 to 256"):
            request(d, "r", None, n=257)
        d.submit(request(d, "r", None, n=21))
        assert d.errors["r"].status == 400 and "21" in d.errors["r"].message
    finally:
        d.close()
