"""The report of agents by hand-made replies, the share of an unlimited cache, and Belady's bound."""

from __future__ import annotations

import itertools
import random
from array import array

import pytest

from kvasir.bench.agents_load import Session
from kvasir.bench.agents_report import Asked, by_tier, metrics, together, unlimited_tokens
from kvasir.bench.belady import PageUses, optimal_hits
from kvasir.bench.client import Reply


def reply(due, events, cached=0, status=200):
    return Reply(due, due, status, array("d", events), len(events), cached, events[-1] if events else due)


@pytest.fixture
def asked():
    """Two sessions that share their first 8 tokens, with two turns each, and a sub-agent of the first."""
    one = Session("one", 0, array("i", range(40)), [20, 40])
    two = Session("two", 0, array("i", [*range(8), *range(100, 120)]), [16, 28])
    agent = Session("agent", 1, array("i", [*range(24), *range(200, 208)]), [32])
    one.agents[0] = [agent]
    return [
        Asked(one, 0, reply(0.0, [0.1, 0.2, 0.4])),
        Asked(two, 0, reply(1.0, [1.3, 1.4, 1.5], 8)),
        Asked(agent, 0, reply(2.0, [2.2, 2.3, 2.4], 16)),
        Asked(one, 1, reply(3.0, [3.4, 3.5, 3.6], 20)),
        Asked(two, 1, reply(4.0, [4.5, 4.6], 0)),
    ]


def test_the_arithmetic(asked):
    found = metrics(asked, 3, 4)
    assert found["turns"] == 5 and found["failed"] == 0 and found["short"] == 1, "one answer has two tokens"
    assert found["seconds"] == 4.6 and found["turns_s"] == round(5 / 4.6, 3)
    assert found["output_tok_s"] == round(14 / 4.6, 2)
    assert found["prompt_tokens"] == 20 + 16 + 32 + 40 + 28 == 136 and found["cached_tokens"] == 44
    assert found["cached_share"] == round(44 / 136, 4)
    assert found["tier_share"] == {"device": round(44 / 136, 4), "host": 0.0, "disk": 0.0}
    assert found["ttft_ms_p50"] == 300.0 and found["ttft_ms_p99"] == pytest.approx(496)
    assert found["itl_ms_p99"] == pytest.approx(192, abs=5), "the longest gap is 200 ms"
    assert found["turn_ttft_ms_p50"] == {"1": 200.0, "2": 450.0}, "sub-agents are not in the tables by turn"
    assert set(found["turn_ttft_ms_p99"]) == {"1", "2"}


def test_the_unlimited_share_is_of_prompts_that_were_sent_before(asked):
    # two: the 8 shared tokens; agent: 20 of one's first prompt; one: 24, as far as the agent goes; two: 16 of its own.
    assert unlimited_tokens(asked, 4) == 0 + 8 + 20 + 24 + 16
    assert unlimited_tokens(asked, 8) == 0 + 8 + 16 + 24 + 16
    assert metrics(asked, 3, 4)["unlimited_share"] == round(68 / 136, 4)


def test_a_prompt_that_was_sent_twice_has_its_last_token_computed(asked):
    again = [asked[0], Asked(asked[0].session, 0, reply(9.0, [9.1]))]
    assert unlimited_tokens(again, 4) == 16, "20 of 20 are known, and a hit leaves the last token out"


def test_failed_turns_count_apart(asked):
    asked[3] = Asked(asked[3].session, 1, Reply(3.0, 3.0, 429, ended=3.1))
    found = metrics(asked, 3, 4)
    assert found["failed"] == 1 and found["prompt_tokens"] == 96 and found["turn_ttft_ms_p50"]["2"] == 500.0
    nothing = metrics([Asked(asked[0].session, 0, Reply(0.0, 0.0, 500, ended=1.0))], 3, 4)
    assert nothing["failed"] == 1 and nothing["cached_share"] == 0.0 and "ttft_ms_p50" not in nothing


def test_runs_become_spreads_and_tables_means(asked):
    run = metrics(asked, 3, 4)
    found = together([run, run | {"turns_s": 3.0, "turn_ttft_ms_p50": {"1": 400.0, "2": 450.0, "3": 7.0}}])
    assert found["turns_s"]["n"] == 2 and found["turns_s"]["max"] == 3.0
    assert found["turn_ttft_ms_p50"] == {"1": 300.0, "2": 450.0, "3": 7.0}


# ----------------------------------------------------------------------------------------------------------- the bound


def best(uses, capacity):
    """Most hits of any rule, by trying them all."""
    states = {frozenset(): 0}
    for page in uses:
        after: dict[frozenset, int] = {}
        for held, hits in states.items():
            have = held | {page}
            for count in range(min(capacity, len(have)) + 1):
                for kept in map(frozenset, itertools.combinations(have, count)):
                    after[kept] = max(after.get(kept, 0), hits + (page in held))
        states = after
    return max(states.values())


def test_no_rule_has_more_hits_than_the_bound():
    for seed in range(40):
        rng = random.Random(seed)
        uses = [rng.randrange(5) for _ in range(12)]
        capacity = rng.randrange(4)
        assert optimal_hits(uses, capacity) == best(uses, capacity), (uses, capacity)


def test_the_bound_of_a_loop():
    """A loop over one page more than there is room for: the least recently used page is always the next one."""
    uses = [0, 1, 2, 3] * 10
    assert optimal_hits(uses, 4) == 36 and optimal_hits(uses, 0) == 0
    assert 20 < optimal_hits(uses, 3) < 36


def test_uses_are_numbered_by_page():
    uses = PageUses()
    for key in (b"a", b"b", b"a"):
        uses.add(key)
    assert list(uses.numbers) == [0, 1, 0]


def test_shares_by_tier_come_from_the_servers_counters():
    values = {"prompt_tokens": 1000, "cached_share": 0.7}
    found = by_tier(values, {"device": 50, "host": 10}, {"device": 400, "host": 310, "disk": 100})
    assert found == {"device": 0.3, "host": 0.3, "disk": 0.1}
    assert by_tier(values, {}, {}) == {"device": 0.7, "host": 0.0, "disk": 0.0}
