"""Mixed load on a running server and the checks after it, for ``test_load.py`` and ``kvasir_lab/studies/gpu_soak.py``.

It needs neither torch nor the server's packages, so it can run where the server is installed elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import psutil

MIB = 1 << 20
KINDS = {
    "plain": {},
    "n": {"n": 3},
    "logprobs": {"logprobs": 5},
    "penalty": {"frequency_penalty": 1.0},
    "stop": {"stop": ["nevermore", "t77"]},
    "grammar": {"guided_regex": "[a-z0-9 ]{200,400}"},
    "prompt_logprobs": {"prompt_logprobs": 2, "stream": False},
    "prefix": {},
    "long": {},
    "bad": {},
}
BAD = (
    {"prompt": []},
    {"prompt": [1 << 30]},
    {"temperature": -1},
    {"n": 0},
    {"max_tokens": -3},
    {"guided_regex": "("},
    {"warp_drive": 1},
    {"max_tokens": 1 << 20},
    {"model": "another"},
)
HEADS = 4  # beginnings that requests of the kind "prefix" share
LEAVE = 0.33  # share of the clients that leave in the middle
# How much more, in the last quarter than in the second, is not a leak. Memory in MiB. Files come and go with bursts:
# they are counted at the end.
ALLOWED = {"rss_server": 24, "rss_engine": 64, "gpu": 256, "threads": 4}
PATIENCE, IDLE_SECONDS = 20.0, 60.0  # after the end: until all clients leave, and until the server must be idle
PROBE = {
    "prompt": list(range(300, 312)),
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}  # less than a page


# ------------------------------------------------------------------------------------------------------------- requests


def body(rng: random.Random, shortest: int = 4, longest: int = 60, **more) -> dict:
    return {
        "prompt": tokens(rng, rng.randrange(shortest, longest)),
        "temperature": rng.choice([0, 1]),
        "seed": rng.getrandbits(32),
        "ignore_eos": True,
        **more,
    }


def tokens(rng: random.Random, count: int) -> list[int]:
    return [300 + rng.randrange(900) for _ in range(count)]


def mixed(rng: random.Random, context: int) -> tuple[str, dict]:
    """Draw one of KINDS and a request of it that fits into ``context``, or, if it is a bad one, must be refused."""
    kind = rng.choice(list(KINDS))
    request = body(rng, max_tokens=rng.randrange(1, min(600, context // 4)), stream=rng.random() < 0.75)
    if kind == "long":
        request["prompt"] = tokens(rng, rng.randrange(context // 3, context * 3 // 4))
    elif kind == "prefix":
        request["prompt"] = tokens(random.Random(rng.randrange(HEADS)), context // 4) + request["prompt"]
    return kind, request | KINDS[kind] | (rng.choice(BAD) if kind == "bad" else {})


async def ask(http: httpx.AsyncClient, request: dict, leave_after: int | None = None) -> str:
    """Run one request to its end. Returns how it ended: "ok", "refused" (with Retry-After), "invalid" (its own fault)
    or "left"; fails on anything else. ``leave_after``: events of a stream before the client leaves."""
    n = request.get("n", 1)
    if not request.get("stream"):
        r = await http.post("/v1/completions", json=request)
        if r.status_code == 200:
            ends = [c["finish_reason"] for c in r.json()["choices"]]
            assert len(ends) == n and set(ends) <= {"length", "stop"}, ends
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
                event = json.loads(line[6:])
                if (
                    "error" in event
                ):  # what the engine finds only once the stream has begun, such as a grammar that does not compile
                    assert event["error"]["type"] == "invalid_request_error", event
                    return "invalid"
                for choice in event.get("choices", ()):
                    ends[choice["index"]] += choice["finish_reason"] is not None
            events += 1
            if leave_after is not None and events >= leave_after:
                return "left"
    assert done == 1 and ends == dict.fromkeys(range(n), 1), (done, ends)
    return "ok"


def refused(r: httpx.Response) -> str:
    if r.status_code in (400, 404, 422):
        assert r.json()["error"]["message"], r.text
        return "invalid"
    assert r.status_code in (429, 503) and int(r.headers["retry-after"]) >= 1, (r.status_code, r.text)
    return "refused"


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))


# --------------------------------------------------------------------------------------------------------------- memory


@dataclass
class Watch:
    """Samples over time of the resources that the server and its engine process hold: a list by name, memory in MiB.
    ``gpu_of``: the processes whose GPU memory counts."""

    pid: int
    series: dict[str, list[float]] = field(default_factory=dict)
    gpu_of: str = ""

    def __post_init__(self) -> None:
        self.gpu_of = "nobody" if gpu_mib([]) is None else "the server" if gpu_mib(self.pids()) else "the device"

    def pids(self) -> list[int]:
        return [self.pid, *(p.pid for p in psutil.Process(self.pid).children())]

    def sample(self) -> dict[str, float]:
        server, *others = [psutil.Process(pid) for pid in self.pids()]
        both = [server, *others]
        found = {
            "rss_server": server.memory_info().rss / MIB,
            "rss_engine": sum(p.memory_info().rss for p in others) / MIB,
            "files": sum(p.num_fds() for p in both),
            "threads": sum(p.num_threads() for p in both),
        }
        return found | (
            {} if self.gpu_of == "nobody" else {"gpu": gpu_mib(self.pids() if self.gpu_of == "the server" else [])}
        )

    def keep(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.series.setdefault(name, []).append(value)

    async def run(self, every: float = 0.5, more: Callable[[], dict[str, float]] = dict) -> None:
        while True:
            self.keep(await asyncio.to_thread(lambda: self.sample() | more()))
            await asyncio.sleep(every)


def gpu_mib(pids: list[int]) -> float | None:
    """MiB of GPU memory that the processes hold; without processes, all memory in use. None without a GPU; 0 if the
    driver does not tell processes apart."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["--query-compute-apps=pid,used_memory"] if pids else ["--query-gpu=memory.used"]
    done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    rows = re.findall(r"^(?:(\d+), *)?(\d+)$", done.stdout, re.M)
    return float(sum(int(mib) for pid, mib in rows if not pids or int(pid) in pids)) if rows or pids else None


def quarters(values: list[float]) -> list[float]:
    """The median of each quarter of the time."""
    size = max(1, len(values) // 4)
    return [statistics.median(values[i * size : (i + 1) * size if i < 3 else None] or values[-1:]) for i in range(4)]


def leaks(series: dict[str, list[float]], allowed: dict[str, float] = ALLOWED) -> list[str]:
    """The resources that kept growing. The first quarter is for caches and heaps to fill."""
    found = []
    for name in allowed.keys() & series.keys():
        _, early, _, late = quarters(series[name])
        if late > early + allowed[name]:
            found.append(f"{name} grew from {early:.0f} to {late:.0f}; {allowed[name]} more are allowed")
    return sorted(found)


# ----------------------------------------------------------------------------------------------------------------- soak


@dataclass
class Soaked:
    """The result of a soak. ``counts``: requests by kind and end. ``totals``: increase of the server's counters.
    ``reasons``: what went wrong."""

    seconds: float
    counts: dict[str, Counter]
    series: dict[str, list[float]]
    totals: dict[str, float]
    reasons: list[str]
    gpu_of: str


def metrics(http: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics, by its whole name."""
    return {name: float(value) for name, value in re.findall(r"^([^#\s].*) (\S+)$", http.get("/metrics").text, re.M)}


def busy(now: dict[str, float]) -> str:
    """The samples that show something running, waiting or holding a page; empty when the server is idle."""
    left = {k: now[f"kvasir:num_requests_{k}"] for k in ("running", "waiting", "blocked")}
    left["pages"] = now["kvasir:num_pages"] - now["kvasir:pages_free"]
    return ", ".join(f"{value:.0f} {name}" for name, value in left.items() if value)


def soak(url: str, pid: int, *, seconds: float, clients: int, tie: float = 0.0) -> Soaked:
    """Run mixed load for ``seconds`` with ``clients`` that ask again and again, a third of which leave in the middle,
    with bursts of as many more.

    At the end nothing may run, wait or hold a page, a file or more memory than before. A greedy request must have the
    tokens it had at first, unless another token is as likely, within ``tie`` in log-probability: the same step is
    rounded otherwise once its graph exists.
    """
    with httpx.Client(base_url=url, timeout=120) as http:
        context = http.get("/v1/models").json()["data"][0]["max_model_len"]
        _probe(http)
        time.sleep(3)  # on a GPU the engine captures its graphs meanwhile
        first = [_probe(http) for _ in range(3)][-1]
        begun, watch = metrics(http), Watch(pid)
        before = watch.sample()
        started = time.monotonic()
        counts, wrong = asyncio.run(_load(url, watch, lambda: _engine_sample(metrics(http)), context, seconds, clients))
        spent = time.monotonic() - started
        end = time.monotonic() + IDLE_SECONDS
        while (held := busy(ended := metrics(http))) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)  # connections that clients left are closed
        after = watch.sample()
        last = _probe(http)
        other = last != first and (not tie or max(_lost(http, first), _lost(http, last)) > tie)
    totals = {
        name: ended[f"kvasir:{name}_total"] - begun[f"kvasir:{name}_total"]
        for name in ("prompt_tokens", "generation_tokens", "cached_tokens", "preemptions", "steps", "engine_restarts")
    }
    reasons = [*wrong, *leaks(watch.series)]
    if held:
        reasons.append(f"{IDLE_SECONDS:.0f} s after the last request there are still {held}")
    if after["files"] > before["files"] + 4:
        reasons.append(f"files stayed open: {before['files']:.0f} before, {after['files']:.0f} after")
    if other:
        reasons.append(f"a greedy request has other tokens than before: {first} and {last}")
    if totals["engine_restarts"]:
        reasons.append(f"the engine process was replaced {totals['engine_restarts']:.0f} times")
    for name in ("preemptions", "cached_tokens"):
        if not totals[name]:
            reasons.append(f"no {name}: the load was not what it is meant to be")
    reasons += [
        f"no request of the kind {kind} came to its end"
        for kind in KINDS
        if not counts[kind]["invalid" if kind == "bad" else "ok"]
    ]
    return Soaked(spent, counts, watch.series, totals, reasons, watch.gpu_of)


def _probe(http: httpx.Client) -> list[int]:
    return http.post("/v1/completions", json=PROBE).raise_for_status().json()["choices"][0]["token_ids"]


def _lost(http: httpx.Client, ids: list[int]) -> float:
    """The largest gap in log-probability between the best token and the reply's token, as the server now scores the
    probe."""
    asked = {**PROBE, "prompt": [*PROBE["prompt"], *ids], "max_tokens": 1, "prompt_logprobs": 1}
    scored = (
        http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["prompt_logprobs"][-len(ids) :]
    )
    return max(
        max(e["logprob"] for e in of.values()) - of[str(token)]["logprob"]
        for of, token in zip(scored, ids, strict=True)
    )


def _engine_sample(now: dict[str, float]) -> dict[str, float]:
    return {
        "pages_free": now["kvasir:pages_free"],
        **{k: now[f"kvasir:num_requests_{k}"] for k in ("running", "waiting")},
    }


async def _load(
    url: str, watch: Watch, more: Callable[[], dict[str, float]], context: int, seconds: float, clients: int
) -> tuple[dict[str, Counter], list[str]]:
    counts, wrong = {kind: Counter() for kind in KINDS}, Counter()
    end = time.monotonic() + seconds

    async def one(http: httpx.AsyncClient, rng: random.Random) -> None:
        kind, request = mixed(rng, context)
        leaves = rng.random() < LEAVE
        after = rng.randrange(1, 30) if leaves and request.get("stream") else None
        try:
            async with asyncio.timeout(
                rng.uniform(0.01, 1.0) if leaves and after is None else end + PATIENCE - time.monotonic()
            ):
                how = await ask(http, request, after)
            assert how == "refused" or (how == "invalid") == (kind == "bad"), (
                f"a {kind} request was {how}"
            )  # a full server may not look at it
        except TimeoutError:
            how = "left"
        except (AssertionError, httpx.HTTPError, ValueError, LookupError) as e:
            how = "failed"
            wrong[f"a {kind} request failed: {e!r:.300}"] += 1
        counts[kind][how] += 1

    async def worker(number: int) -> None:
        rng = random.Random(number)
        async with client(url) as http:
            while time.monotonic() < end and wrong.total() < 20:
                await one(http, rng)

    async def bursts() -> None:
        rng = random.Random("bursts")
        async with client(url) as http:
            while True:
                await asyncio.gather(*(one(http, rng) for _ in range(clients)))
                await asyncio.sleep(10)
                if time.monotonic() > end - 20 or wrong.total() >= 20:  # what comes in bursts is through by the end
                    return

    watching = asyncio.create_task(watch.run(min(3.0, max(0.1, seconds / 120)), more))
    await asyncio.gather(*(worker(i) for i in range(clients)), bursts())
    watching.cancel()
    try:
        await watching
    except asyncio.CancelledError:
        pass
    except (psutil.Error, httpx.HTTPError, LookupError) as e:
        wrong[f"the server could not be watched: {e!r}"] += 1
    return counts, [f"{what} ({count} times)" for what, count in wrong.items()]
