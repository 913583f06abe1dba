"""Long runs of the real server: overload, a soak with clients that leave, and a storm of kills. ``make test-all`` runs
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter

import httpx
import pytest

from tests.integration.load import Watch, ask, body, client, soak
from tests.integration.serving import Served, served

OVERLOAD_SECONDS = 60
SOAK_SECONDS = 3600  # `kvasir_lab/studies/gpu_soak.py` is the same for minutes, and on a GPU
STORM_KILLS = 8
SMALL = (
    "--max-model-len",
    "1024",
    "--cpu-cache-bytes",
    str(24 << 20),
    "--max-num-seqs",
    "32",
)  # the pool is soon touched all over
pytestmark = pytest.mark.slow


async def sustainable_rate(http: httpx.AsyncClient, request, seconds: float) -> float:
    """Requests per second that a closed loop of 32 clients completes."""
    end, done = time.monotonic() + seconds, 0

    async def loop() -> None:
        nonlocal done
        while time.monotonic() < end:
            assert await ask(http, request()) == "ok"
            done += 1

    started = time.monotonic()
    await asyncio.gather(*(loop() for _ in range(32)))
    return done / (time.monotonic() - started)


def test_overload(tmp_path):
    """At four times its capacity, open loop, the server refuses with Retry-After, answers every request, does not grow,
    and recovers."""
    rng = random.Random(1)

    def request() -> dict:
        return body(rng, max_tokens=150, stream=rng.random() < 0.5)

    async def run(server: Served) -> Counter:
        async with client(server.url) as http:
            rate = 4 * await sustainable_rate(http, request, 5)
            watch, tasks = Watch(server.process.pid), []
            watching = asyncio.create_task(watch.run())
            end = time.monotonic() + OVERLOAD_SECONDS
            while time.monotonic() < end:
                await asyncio.sleep(rng.expovariate(rate))
                tasks.append(asyncio.create_task(ask(http, request())))
            results = Counter(await asyncio.gather(*tasks))
            watching.cancel()
            for rss in (watch.series["rss_server"], watch.series["rss_engine"]):
                third = len(rss) // 3
                assert max(rss[third:]) < max(rss[:third]) + 64, rss
            assert await ask(http, request()) == "ok"
            return results

    with served(tmp_path, *SMALL, "--max-queued-requests", "64") as server:
        results = asyncio.run(run(server))
        assert results["ok"] > 5 and results["refused"] > results["ok"] and set(results) == {"ok", "refused"}, results
        end = server.until_idle()
        assert end['kvasir:choices_finished_total{finished_reason="length"}'] >= results["ok"]


def test_soak(tmp_path):
    """After mixed load with a third of the clients leaving, all pages, seats and files are free and memory has not
    grown."""
    with served(tmp_path, *SMALL, "--max-num-seqs", "16", "--num-pages", "160") as server:
        found = soak(server.url, server.process.pid, seconds=SOAK_SECONDS, clients=12)
        assert not found.reasons
        server.until_idle()


def test_kill_storm(tmp_path):
    """The engine process is killed again and again under load; every answer equals that of an undisturbed server."""
    requests = [
        body(random.Random(i), max_tokens=100, logprobs=1 if i % 4 == 0 else None, n=1 + i % 5 // 4) for i in range(12)
    ]
    for request in requests:
        request["frequency_penalty"] = 0.5
    with served(tmp_path, *SMALL, "--batch-invariant") as server:

        async def answer(http: httpx.AsyncClient, request: dict) -> str:
            r = await http.post("/v1/completions", json={k: v for k, v in request.items() if v is not None})
            assert r.status_code == 200, r.text
            return json.dumps(r.json()["choices"])

        async def run() -> None:
            async with client(server.url) as http:
                calm = [await answer(http, request) for request in requests]
                killed = asyncio.Event()

                async def worker(number: int) -> int:
                    count = number
                    while not killed.is_set():
                        assert await answer(http, requests[count % 12]) == calm[count % 12]
                        count += 1
                    return count - number

                async def killer() -> None:
                    for _ in range(STORM_KILLS):
                        # Once tokens flow again, a little later: somewhere in the middle of everything.
                        before = server.metrics().get('kvasir:choices_finished_total{finished_reason="length"}', 0)
                        while (
                            server.metrics().get('kvasir:choices_finished_total{finished_reason="length"}', 0)
                            < before + 14
                        ):
                            await asyncio.sleep(0.05)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(server.engine_pid(), signal.SIGKILL)
                    killed.set()

                *counts, _ = await asyncio.gather(*(worker(i) for i in range(8)), killer())
                assert sum(counts) > 8

        asyncio.run(run())
        end = server.until_idle()
        assert server.log.count("was ended by SIGKILL") == STORM_KILLS and end["kvasir:num_pages"] > 0
