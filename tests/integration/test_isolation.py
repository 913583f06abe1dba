"""Isolation of requests: 32 requests at once, each allowed its own range of token ids, in a pool too small for them,
with preemptions and many cancels. A token outside a request's range means that seats, masks or pages were mixed up."""

from __future__ import annotations

import random

import pytest

from kvasir.types import Request
from tests.engine.driver import Driver

CROWD = 32
WIDTH = 50


def own_range(slot: int) -> range:
    return range(300 + WIDTH * slot, 300 + WIDTH * (slot + 1))


def canary(driver: Driver, slot: int, generation: int, rng: random.Random) -> Request:
    """A request whose prompt, bias and first output tokens lie in its range; half of them share a beginning."""
    mine = own_range(slot)
    shared = [40 + j for j in range(20)] if slot % 2 else []
    prompt = shared + [mine[rng.randrange(WIDTH)] for _ in range(rng.randrange(1, 40))]
    extra = [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"top_k": 5, "repetition_penalty": 1.3},
        {"top_p": 0.7, "min_p": 0.02},
        {"logit_bias": {mine[3]: 4.0}, "logprobs": 2},
    ][slot % 5]
    return driver.request(
        f"c{slot}.{generation}",
        prompt,
        allowed_token_ids=tuple(mine),
        temperature=1.0,
        seed=rng.getrandbits(40),
        max_tokens=rng.randrange(5, 40),
        ignore_eos=True,
        n=1 + slot % 3 // 2,
        **extra,
    )


@pytest.mark.parametrize("exact", [True, False])
def test_no_token_leaves_its_range(exact):
    rng = random.Random(7)
    driver = Driver(
        num_pages=60,
        page_slots=8,
        max_model_len=128,
        max_num_seqs=24,
        max_num_batched_tokens=48,
        batch_invariant=exact,
        prefix_eviction="lru",  # nobody waits for the sake of the cache, so that pages run out
    )
    generation = [0] * CROWD
    for slot in range(CROWD):
        driver.submit(canary(driver, slot, 0, rng))
    for step in range(250):
        driver.step(preempt=step % 5 == 4)
        if step % 7 == 6:  # the storm: a few at once, in whatever state they are
            for request_id in rng.sample(sorted(driver.engine.requests.live), min(5, len(driver.engine.requests.live))):
                driver._take(driver.engine.cancel(request_id))
        live = {int(name[1:].split(".")[0]) for name in driver.engine.requests.live}
        for slot in set(range(CROWD)) - live:
            generation[slot] += 1
            driver.submit(canary(driver, slot, generation[slot], rng))
    stats = driver.engine.stats()
    while driver.engine.has_work():
        driver.step()
    driver.assert_clean()
    assert not driver.errors
    assert stats.preemptions > 5 and stats.num_running > 1, "there was no pressure"
    ends = [out.finish_reason for out in driver.outputs.values()]
    assert ends.count("cancelled") > 60 and ends.count("length") > 60
    num_tokens = 0
    for (name, branch), out in driver.outputs.items():
        mine = own_range(int(name[1:].split(".")[0]))
        assert all(token in mine for token in out.tokens), (name, branch)
        assert not out.logprobs or [p.id for p in out.logprobs] == out.tokens
        num_tokens += len(out.tokens)
    assert num_tokens > 1000
    driver.close()


def test_the_canary_can_sing():
    """Negative control: without one row's mask, a token does leave its range."""
    driver = Driver(max_num_seqs=4, num_pages=60)
    rng = random.Random(1)
    requests = [canary(driver, slot, 0, rng) for slot in range(4)]
    requests[2].params = driver.request("x", [300], temperature=1.0, max_tokens=40, ignore_eos=True).params
    driver.run(requests)
    strays = {
        name
        for (name, _), out in driver.outputs.items()
        if set(out.tokens) - set(own_range(int(name[1:].split(".")[0])))
    }
    assert strays == {"c2.0"}
    driver.close()
