"""The simulations of routers and of the front: they count what is there, and show what a router is for."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvasir import technique
from kvasir.bench.traces import BLOCK, Recorded
from kvasir.cluster.router import ROUTERS, Router
from kvasir.errors import ConfigError
from kvasir_lab.bench import front, front_http, routing

SESSIONS = 12


def sessions(turns: int = 6) -> list[Recorded]:
    """Conversations that grow by two blocks a turn, in random order."""
    rng, found, lengths = random.Random(1), [], [0] * SESSIONS
    for i in range(SESSIONS * turns):
        session = rng.randrange(SESSIONS)
        lengths[session] += 2
        blocks = tuple(1000 * session + block for block in range(lengths[session]))
        found.append(Recorded(0.5 * i, BLOCK * len(blocks), 20, blocks))
    return found


def simulated(name: str) -> dict[str, float]:
    return routing.metrics(routing.simulate(sessions(), technique.load(ROUTERS, name, Router), 4))


def test_cost_and_affinity_find_the_prefixes_that_round_robin_misses():
    best = sum(2 * (len(r.blocks) // 2 - 1) * BLOCK for r in sessions())
    found = {name: simulated(name) for name in ("cost", "affinity", "round_robin")}
    assert all(one["requests"] == len(sessions()) for one in found.values())
    # The last block of a prompt is computed again only if it is the whole prompt.
    assert found["affinity"]["cached_tokens"] == found["cost"]["cached_tokens"] == best
    assert found["round_robin"]["cached_tokens"] < 0.7 * best
    assert found["cost"]["ttft_s_p50"] <= found["round_robin"]["ttft_s_p50"]


def test_a_prompt_that_all_share_piles_up_under_affinity_alone():
    shared = [Recorded(0.05 * i, 8 * BLOCK, 50, (0, *(100 * i + b for b in range(1, 8)))) for i in range(80)]
    found = {}
    for name in ("cost", "affinity"):
        found[name] = routing.metrics(routing.simulate(shared, technique.load(ROUTERS, name, Router), 4))
    assert found["cost"]["ttft_s_p99"] < 0.5 * found["affinity"]["ttft_s_p99"]


def test_a_trace_without_blocks_is_refused(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n")
    with pytest.raises(ConfigError, match="Mooncake"):
        routing.run(trace=file, routers=["cost"], replicas=2, requests=5, speeds=[1.0], output=None)


def test_the_front_carries_simulated_engines():
    found = asyncio.run(front.measure(4, requests=24, tokens=10, at_once=12, router="cost"))
    assert found["front_us_token"] > 0 and found["front_requests_s"] > 0


def test_a_server_streams_the_tokens_of_simulated_engines():
    found = front_http.measure(2, at_once=12, tokens=10)
    assert found["server_us_token"] > 0 and found["server_tokens_s"] > 0
    assert 1 <= found["tokens_per_event"] <= 10
