"""Routers on a recorded trace, with simulated engines and a simulated clock: cached tokens and time to the first token.

The routers and the map of prefixes are those of the front; replicas report load and pages every 100 ms, as engines do.
A simulated engine has the step times of an 8B model on one H200 (`kvasir_lab/studies/simulate_serving.py` says how
these were measured), computes prompts first come, first served, in steps of at most ``ROWS`` rows with all decodes, and
keeps the pages of prompts that were used last. A page is a block of the trace: 512 tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvasir import technique
from kvasir.bench.result import arm, finish, percentile, result
from kvasir.bench.traces import BLOCK, Recorded, read
from kvasir.client import messages
from kvasir.client.engine_process import REPORT_SECONDS
from kvasir.cluster.prefixes import PrefixMap
from kvasir.cluster.router import ROUTERS, Candidate, Router
from kvasir.errors import ConfigError
from kvasir.types import Request, SamplingParams

# Most rows of a step.
ROWS = 2048
# Milliseconds of a step by its rows, on an H200 with an 8B model; and for each decode, what its keys and values add.
STEP_ROWS = [1, 64, 128, 256, 512, 768, 1056, 1536, 2048]
STEP_MS = [4.1, 5.5, 6.5, 8.7, 14.6, 19.9, 27.5, 37.5, 48.0]
DECODE_MS_TOKEN = 131072 / 4.2e12 * 1e3  # bytes of a token's keys and values over the memory's bandwidth
# Tokens whose keys and values fit next to the weights: about 100 GB at 128 KiB each.
CACHE_TOKENS = 800_000


@dataclass(slots=True)
class Job:
    """A request in the simulation. ``left``: prompt tokens to compute; ``made``: output tokens so far."""

    number: int
    at: float
    prompt: int
    output: int
    keys: list[bytes]
    left: int = 0
    cached: int = 0
    made: int = 0
    first: float = 0.0
    submit: int = 0


@dataclass(slots=True)
class Engine:
    """One simulated replica."""

    number: int
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    queue: deque[Job] = field(default_factory=deque)
    decodes: list[Job] = field(default_factory=list)
    running: bool = False
    submits: int = 0
    # The load that the router was told last, and the rate and pages that it is told next.
    told: tuple[int, int, int] = (0, 0, 0)  # queued tokens, decodes, submissions that are counted in
    rate: float = 1e3 * ROWS / STEP_MS[-1]
    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    news: int = 0
    report_at: float = 0.0

    def submit(self, job: Job) -> None:
        self.submits += 1
        job.submit = self.submits
        job.left = job.prompt
        self.queue.append(job)

    def start(self, job: Job) -> None:
        """Look the prompt up when its turn comes."""
        hits = 0
        for key in job.keys:
            if key not in self.pages:
                break
            self.pages.move_to_end(key)
            hits += 1
        job.cached = min(hits * BLOCK, job.prompt - 1)
        job.left = job.prompt - job.cached

    def step(self, now: float) -> tuple[float, list[Job]]:
        """Run a step. Returns its end and the requests that have ended then."""
        rows, room = len(self.decodes), ROWS - len(self.decodes)
        length = sum(job.prompt + job.made for job in self.decodes)
        for job in self.decodes:
            job.made += 1
        finished_prompts = []
        while self.queue and room > 0:
            job = self.queue[0]
            if job.left == job.prompt and not job.cached:
                self.start(job)
            take = min(room, job.left)
            job.left, room, rows = job.left - take, room - take, rows + take
            if job.left:
                break
            finished_prompts.append(self.queue.popleft())
        end = now + 1e-3 * (float(np.interp(rows, STEP_ROWS, STEP_MS)) + DECODE_MS_TOKEN * length)
        for job in finished_prompts:
            job.first, job.made = end, 1
            self.keep(job)
        alive = [*self.decodes, *finished_prompts]
        self.decodes = [job for job in alive if job.made < job.output]
        return end, [job for job in alive if job.made >= job.output]

    def keep(self, job: Job) -> None:
        """Store the full pages of a prompt; those that were not used for longest go."""
        for key in job.keys[: job.prompt // BLOCK]:
            if key not in self.pages:
                self.stored.append(key)
            self.pages[key] = None
            self.pages.move_to_end(key)
        while len(self.pages) > CACHE_TOKENS // BLOCK:
            key, _ = self.pages.popitem(last=False)
            self.evicted.append(key)

    def report(self, known: PrefixMap) -> None:
        """Tell the front load and pages."""
        self.told = sum(job.left for job in self.queue), len(self.decodes), self.submits
        if self.stored or self.evicted:
            self.news += 1
            gone = [key for key in dict.fromkeys(self.evicted) if key not in self.pages]
            here = [key for key in dict.fromkeys(self.stored) if key in self.pages]
            known.take(self.number, messages.PageNews(self.news, here, gone))
            self.stored, self.evicted = [], []


def simulate(trace: list[Recorded], router: Router, count: int) -> list[Job]:
    """Serve the trace with ``count`` replicas; returns all requests, in the order of their arrival."""
    engines, known = [Engine(i) for i in range(count)], PrefixMap()
    sent: list[deque[tuple[int, int]]] = [deque() for _ in engines]
    jobs: list[Job] = []
    events: list[tuple[float, int, int]] = []  # time, order, engine: the end of a step
    order = 0

    def run(engine: Engine, now: float) -> None:
        nonlocal order
        end, ended = engine.step(now)
        if ended or end >= engine.report_at:
            engine.report(known)
            engine.report_at = end + REPORT_SECONDS
        for job in ended:
            known.settle(str(job.number))
        order += 1
        heapq.heappush(events, (end, order, engine.number))

    def until(now: float) -> None:
        while events and events[0][0] <= now:
            at, _, number = heapq.heappop(events)
            engine = engines[number]
            engine.running = bool(engine.queue or engine.decodes)
            if engine.running:
                run(engine, at)
            else:
                engine.report(known)

    for number, recorded in enumerate(trace):
        until(recorded.at)
        keys = [block.to_bytes(16, "big") for block in recorded.blocks[: recorded.prompt // BLOCK]]
        job = Job(number, recorded.at, recorded.prompt, recorded.output, keys)
        candidates = []
        for engine in engines:
            queued, decodes, reported = engine.told
            mine = sent[engine.number]
            while mine and mine[0][0] <= reported:
                mine.popleft()
            cached = min(known.cached(engine.number, keys) * BLOCK, job.prompt - 1)
            total = queued + sum(tokens for _, tokens in mine)
            candidates.append(Candidate(engine.number, total, engine.rate, decodes, cached))
        wanted = Request(
            id=str(number), prompt_ids=range(job.prompt), params=SamplingParams(), seed=0, max_tokens=job.output
        )
        chosen = router.choose(wanted, candidates)
        engine = engines[chosen.number]
        sent[engine.number].append((engine.submits + 1, max(1, job.prompt - chosen.cached)))
        known.expect(engine.number, str(number), keys)
        engine.submit(job)
        jobs.append(job)
        if not engine.running:
            engine.running = True
            run(engine, recorded.at)
    until(float("inf"))
    return jobs


def metrics(jobs: list[Job]) -> dict[str, float]:
    """Cached share of all prompt tokens, and simulated seconds to the first token."""
    waits = [job.first - job.at for job in jobs]
    return {
        "requests": len(jobs),
        "prompt_tokens": sum(job.prompt for job in jobs),
        "cached_tokens": sum(job.cached for job in jobs),
        "cached_share": round(sum(job.cached for job in jobs) / sum(job.prompt for job in jobs), 4),
        "ttft_s_p50": round(percentile(waits, 0.5), 3),
        "ttft_s_p90": round(percentile(waits, 0.9), 3),
        "ttft_s_p99": round(percentile(waits, 0.99), 3),
    }


def run(
    *, trace: Path, routers: list[str] | None, replicas: int, requests: int, speeds: list[float], output: Path | None
) -> None:
    """Simulate every router (None: all of ours) at every speed, print and write. Raises ConfigError for a trace without
    blocks."""
    recorded = read(trace)[:requests]
    if not all(one.blocks for one in recorded):
        raise ConfigError(f"{trace.name} does not tell which prompts share a prefix. Use Mooncake's trace")
    arms = []
    for speed in speeds:
        faster = [Recorded(r.at / speed, r.prompt, r.output, r.blocks) for r in recorded]
        for name in routers or technique.names(ROUTERS):
            jobs = simulate(faster, technique.load(ROUTERS, name, Router), replicas)
            config = {"router": name, "replicas": replicas, "speed": speed, "cache_tokens": CACHE_TOKENS}
            arms.append(arm(f"{name} at {speed:g}x", config, metrics(jobs)))
    finish(result("routing", arms), output)
