"""Long runs of the real server: overload, a soak with clients that leave, and a storm of kills. ``make test-all`` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.integration.serving import Served, served

OVERLOAD_SECONDS = 60
SOAK_SECONDS = 300
STORM_KILLS = 8
SMALL = ("--max-model-len", "1024", "--cpu-cache-bytes", str(24 << 20), "--max-num-seqs", "32")  # the pool is soon touched all over
MIB = 1 << 20
pytestmark = pytest.mark.slow


@dataclass
class Watch:
    """Memory (bytes) and open files of the server and its engine process, sampled as time goes by."""

    server: Served
    rss: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        parent = psutil.Process(self.server.process.pid)
        both = [parent, *parent.children()]
        self.rss.append(sum(p.memory_info().rss for p in both))
        self.fds.append(sum(p.num_fds() for p in both))

    async def run(self, every: float = 0.5) -> None:
        while True:
            self.sample()
            await asyncio.sleep(every)


def body(rng: random.Random, **more) -> dict:
    return {"prompt": [300 + rng.randrange(900) for _ in range(rng.randrange(4, 60))], "temperature": rng.choice([0, 1]),
            "seed": rng.getrandbits(32), "ignore_eos": True, **more}


async def ask(http: httpx.AsyncClient, request: dict, leave_after: int | None = None) -> str:
    """One request to its end. Returns how it ended: "ok", "refused" (with Retry-After), or "left"; fails on anything else."""
    n = request.get("n", 1)
    if not request.get("stream"):
        r = await http.post("/v1/completions", json=request)
        if r.status_code == 200:
            assert [c["finish_reason"] for c in r.json()["choices"]] == ["length"] * n
            return "ok"
        return refused(r)
    ends, done, events = Counter(), 0, 0
    async with http.stream("POST", "/v1/completions", json=request) as r:
        if r.status_code != 200:
            await r.aread()
            return refused(r)
        async for line in r.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                assert not done, "an event after the end"
                for choice in json.loads(line[6:]).get("choices", ()):
                    ends[choice["index"]] += choice["finish_reason"] is not None
            events += 1
            if leave_after is not None and events >= leave_after:
                return "left"
    assert done == 1 and ends == dict.fromkeys(range(n), 1), (done, ends)
    return "ok"


def refused(r: httpx.Response) -> str:
    assert r.status_code in (429, 503) and int(r.headers["retry-after"]) >= 1, (r.status_code, r.text)
    return "refused"


def client(server: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None))


async def sustainable_rate(http: httpx.AsyncClient, request, seconds: float) -> float:
    """Requests a second that a closed loop of 32 clients gets through."""
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
    """Four times what it can do, open loop: it says no with Retry-After, forgets nobody, keeps its size and comes back."""
    rng = random.Random(1)

    def request() -> dict:
        return body(rng, max_tokens=150, stream=rng.random() < 0.5)

    async def run(server: Served) -> Counter:
        async with client(server) as http:
            rate = 4 * await sustainable_rate(http, request, 5)
            watch, tasks = Watch(server), []
            watching = asyncio.create_task(watch.run())
            end = time.monotonic() + OVERLOAD_SECONDS
            while time.monotonic() < end:
                await asyncio.sleep(rng.expovariate(rate))
                tasks.append(asyncio.create_task(ask(http, request())))
            results = Counter(await asyncio.gather(*tasks))
            watching.cancel()
            third = len(watch.rss) // 3
            assert max(watch.rss[third:]) < max(watch.rss[:third]) + 64 * MIB, [r // MIB for r in watch.rss]
            assert await ask(http, request()) == "ok"
            return results

    with served(tmp_path, *SMALL, "--max-queued-requests", "64") as server:
        results = asyncio.run(run(server))
        assert results["ok"] > 5 and results["refused"] > results["ok"] and set(results) == {"ok", "refused"}, results
        end = server.until_idle()
        assert end["kvasir:choices_finished_total{finished_reason=\"length\"}"] >= results["ok"]


def test_soak(tmp_path):
    """Mixed load, a third of which leaves in the middle: in the end every page, row and file is back, and memory has stood still."""
    async def run(server: Served, watch: Watch) -> Counter:
        results: Counter = Counter()
        end = time.monotonic() + SOAK_SECONDS

        async def worker(number: int) -> None:
            rng = random.Random(number)
            async with client(server) as http:
                while time.monotonic() < end:
                    extra = rng.choice([{}, {"n": 3}, {"logprobs": 5}, {"frequency_penalty": 1.0}, {"guided_regex": "[a-z ]{200,400}"},
                                        {"prompt_logprobs": 2, "stream": False}, {"stop": ["nevermore"]}])
                    request = body(rng, **{"max_tokens": rng.randrange(1, 120), "stream": True, **extra})
                    leave = rng.randrange(1, 30) if request["stream"] and rng.random() < 0.33 else None
                    results[await ask(http, request, leave)] += 1

        watching = asyncio.create_task(watch.run(max(0.1, SOAK_SECONDS / 120)))
        await asyncio.gather(*(worker(i) for i in range(12)))
        watching.cancel()
        return results

    with served(tmp_path, *SMALL) as server:
        watch = Watch(server)
        asyncio.run(run(server, watch))
        server.until_idle()
        fds = watch.fds[0]
        watch.sample()
        assert watch.fds[-1] <= fds + 4, "files stayed open"
        quarter = len(watch.rss) // 4
        early, late = statistics.median(watch.rss[quarter:2 * quarter]), statistics.median(watch.rss[-quarter:])
        assert late < early + 24 * MIB, [r // MIB for r in watch.rss]
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200


def test_kill_storm(tmp_path):
    """The engine process is killed again and again under load. Every answer is the one an undisturbed server gives."""
    requests = [body(random.Random(i), max_tokens=100, logprobs=1 if i % 4 == 0 else None, n=1 + i % 5 // 4) for i in range(12)]
    for request in requests:
        request["frequency_penalty"] = 0.5
    with served(tmp_path, *SMALL, "--batch-invariant") as server:
        async def answer(http: httpx.AsyncClient, request: dict) -> str:
            r = await http.post("/v1/completions", json={k: v for k, v in request.items() if v is not None})
            assert r.status_code == 200, r.text
            return json.dumps(r.json()["choices"])

        async def run() -> None:
            async with client(server) as http:
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
                        before = server.metrics().get("kvasir:choices_finished_total{finished_reason=\"length\"}", 0)
                        while server.metrics().get("kvasir:choices_finished_total{finished_reason=\"length\"}", 0) < before + 14:
                            await asyncio.sleep(0.05)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(server.engine_pid(), signal.SIGKILL)
                    killed.set()

                *counts, _ = await asyncio.gather(*(worker(i) for i in range(8)), killer())
                assert sum(counts) > 8

        asyncio.run(run())
        end = server.until_idle()
        assert server.log.count("was ended by SIGKILL") == STORM_KILLS and end["kvasir:pages_total"] > 0
