"""Routers over simulated replicas: load is spread, prefixes are found, and a slow replica does not pile up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvasir import technique
from kvasir.cluster.router import ROUTERS, Candidate, Guarded, Router
from kvasir.cluster.routers import cost
from kvasir.types import Request, SamplingParams


def request(number: int = 0, prompt: list[int] | None = None, **more) -> Request:
    return Request(
        id=f"r{number}", prompt_ids=prompt or [7] * 1000, params=SamplingParams(), seed=0, max_tokens=10, **more
    )


def load(name: str) -> Router:
    return technique.load(ROUTERS, name, Router)


class Simulated:
    """A replica that computes queued prompts at its rate; ``cached``: tokens of the hot prompt that it has."""

    def __init__(self, number: int, rate: float, cached: int = 0, decodes: int = 0) -> None:
        self.number, self.rate, self.cached, self.decodes = number, rate, cached, decodes
        self.queued = 0.0

    def candidate(self) -> Candidate:
        return Candidate(self.number, int(self.queued), self.rate, self.decodes, self.cached)


def simulate(router: Router, replicas: Sequence[Simulated], count: int = 400, seconds: float = 0.02) -> float:
    """Send ``count`` requests for the hot prompt, one each ``seconds``. Returns the longest wait, in seconds."""
    longest = 0.0
    for i in range(count):
        wanted = request(i)
        chosen = replicas[router.choose(wanted, [r.candidate() for r in replicas]).number]
        chosen.queued += len(wanted.prompt_ids) - chosen.cached
        chosen.cached = len(wanted.prompt_ids) - 1
        longest = max(longest, chosen.queued / chosen.rate)
        for replica in replicas:
            replica.queued = max(0.0, replica.queued - seconds * replica.rate)
    return longest


def hot_prefix_at_a_slow_replica(router: Router) -> float:
    """The replica with the prefix is two hundred times slower, and has a queue of 100 s already."""
    slow = Simulated(0, 50.0, cached=999)
    slow.queued = 5000.0
    return simulate(router, [slow, Simulated(1, 10_000.0), Simulated(2, 10_000.0)])


def test_a_hot_prefix_at_a_slow_replica_does_not_pile_up():
    assert hot_prefix_at_a_slow_replica(load("cost")) < 0.2
    assert hot_prefix_at_a_slow_replica(load("affinity")) > 90


def test_a_cost_without_the_load_piles_up(monkeypatch):
    """Negative control: the check above fails for a cost that leaves the queue out."""
    monkeypatch.setattr(cost, "seconds", lambda wanted, c: (len(wanted.prompt_ids) - c.cached) / c.rate)
    assert hot_prefix_at_a_slow_replica(load("cost")) > 90


def test_the_cost_is_in_seconds():
    wanted = request()
    assert cost.seconds(wanted, Candidate(0, 3000, 1000.0, 0, 0)) == 4.0
    assert cost.seconds(wanted, Candidate(0, 3000, 1000.0, 2, 500)) == pytest.approx(3.0 + 0.5 + 0.1 * 2 * 0.5)
    assert cost.seconds(wanted, Candidate(0, 0, 1000.0, 0, 2000)) == 0.001, "the last token is always computed"


def test_the_cost_weighs_a_prefix_against_a_queue():
    router, near = load("cost"), Candidate(0, 0, 1000.0, 4, 900)
    others = [Candidate(i, 0, 1000.0, 4, 0) for i in range(1, 8)]
    assert {router.choose(request(), [near, *others]).number for _ in range(50)} == {0}, "always among the candidates"
    busy = Candidate(0, 6000, 1000.0, 4, 900)
    assert 0 not in {router.choose(request(), [busy, *others]).number for _ in range(50)}


@pytest.mark.parametrize("name", technique.names(ROUTERS))
def test_every_router_uses_all_replicas_and_chooses_among_the_given(name):
    router, replicas = load(name), [Simulated(i, 10_000.0) for i in (0, 1, 2)]
    rng, used = random.Random(1), set()
    for i in range(300):
        given = rng.sample(replicas, rng.randrange(1, 4))
        given.sort(key=lambda r: r.number)
        chosen = router.choose(request(i), [r.candidate() for r in given])
        assert chosen.number in {r.number for r in given}
        used.add(chosen.number)
        replicas[chosen.number].queued += 100
    assert used == {0, 1, 2}


@pytest.mark.parametrize("answer", [None, ZeroDivisionError("a bug"), Candidate(9, 0, 1.0, 0, 0)])
def test_a_faulty_router_is_switched_off(answer, caplog):
    class Faulty(Router):
        calls = 0

        def choose(self, wanted, candidates):
            Faulty.calls += 1
            if isinstance(answer, Exception):
                raise answer
            return answer

    router, given = Guarded(Faulty()), [Candidate(i, 10 - i, 1.0, 0, 0) for i in range(3)]
    assert [router.choose(request(), given).number for _ in range(3)] == [2, 2, 2]
    assert Faulty.calls == 1 and "choose another --router" in caplog.text


def test_round_robin_takes_turns():
    router, given = load("round_robin"), [Candidate(i, 0, 1.0, 0, 0) for i in range(3)]
    assert [router.choose(request(), given).number for _ in range(5)] == [0, 1, 2, 0, 1]
    assert router.choose(request(), [given[0], given[1]]).number == 0
