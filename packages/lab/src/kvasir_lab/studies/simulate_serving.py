"""Simulate how the rule for mixed steps changes latency: the real scheduler with step times of an H200.

    python -m kvasir_lab.studies simulate_serving RESULT.json [--requests 1000] [--mixed none,2048,2048:1152]
        [--policies fcfs,shortest]

There are no tensors: steps of the Llama-8B shape take the time that they took on the GPU, launches included (`python -m
kvasir_lab.kernels mixed` and `decode`), and a step is read after the next was launched. Loads are shares of the rate at
which the engine works when all requests wait at once, without the rule; a measured rate; and a minute of Mooncake's
trace as recorded. An HTTP server's time is not included: compare rules, not servers.
"""

from __future__ import annotations

import gc
import random
import statistics
from itertools import product
from typing import Annotated

import numpy as np

from kvasir import technique
from kvasir.bench.result import percentile
from kvasir.bench.traces import prompt_ids, read, scaled
from kvasir.config import SchedulerConfig
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.pace import MixedRows, Pace
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.types import CacheGroup, CacheRow, Plan, Request, SamplingParams, Sequence, Span, Status
from kvasir_lab.study import ROOT, Arms, Report, study

TRACES = {
    "conversation": "azure2023/AzureLLMInferenceTrace_conv.csv.gz",
    "code": "azure2023/AzureLLMInferenceTrace_code.csv.gz",
    "mooncake": "mooncake/conversation_trace.jsonl.gz",
}
SHARES = {"conversation": (0.5, 0.8, 0.9), "code": (0.8,)}
RATE, MINUTE, LONGEST = (
    18.0,
    60.0,
    32_768,
)  # of the conversation, as it was measured once; of Mooncake's recorded arrivals; prompts are cut
# Milliseconds on the GPU by rows: steps with prompts, and decodes without their keys.
MIXED = (
    [1, 64, 128, 256, 512, 768, 1056, 1536, 2048, 4096, 8192],
    [4.1, 5.5, 6.5, 8.7, 14.6, 19.9, 27.5, 37.5, 48.0, 93.0, 182.0],
)
DECODES = [1, 8, 64, 256], [4.05, 4.13, 4.63, 6.86]
KV_BYTES, BANDWIDTH, PAIR_FLOPS, FLOPS = 131072, 4.2e12, 4 * 32 * 128 * 32, 6.5e14
PIECES, LAUNCH_PIECES, LAUNCH_KERNELS, LAUNCH_GRAPH = 1152, 7.5e-3, 17e-3, 1.2e-3  # rows; seconds of the host
RECEIVE, SEND, COMMIT = (
    3e-3,
    1e-3,
    6e-4,
)  # seconds until a request is in the queue; until a token is out; of a step's bookkeeping


def gpu_seconds(spans: list[Span]) -> float:
    rows, keys = sum(s.length for s in spans), sum(s.start for s in spans if s.length == 1)
    if rows == len(spans):
        return float(np.interp(rows, *DECODES)) * 1e-3 + KV_BYTES * keys / BANDWIDTH
    pairs = sum(
        s.length * (s.start + s.length / 2 - 512) for s in spans if s.length > 1
    )  # the table's prompts had about 512 keys a row
    return float(np.interp(rows, *MIXED)) * 1e-3 + max(0.0, pairs) * PAIR_FLOPS / FLOPS + KV_BYTES * keys / BANDWIDTH


class Simulation:
    def __init__(
        self,
        requests: list[tuple[float, list[int], int]],
        mixed: MixedRows | None,
        policy: SchedulerPolicy,
        max_rows: int = 8192,
    ) -> None:
        """``requests``: seconds of arrival, prompts, output tokens. ``max_rows``: ``--max-num-batched-tokens``."""
        pages = PageManager([CacheGroup("full", (0,), (CacheRow(1, 8, 8),))], [45_000], 16, b"root")
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=256),
            pages,
            policy,
            max_rows=max_rows,
            max_model_len=40_000,
            pace=Pace(None, None, mixed),
        )
        self.requests, self.now, self.gpu_free = requests, 0.0, 0.0
        self.flight: list[tuple[Plan, float]] = []
        self.first: dict[Sequence, float] = {}
        self.last: dict[Sequence, float] = {}
        self.gaps: list[float] = []
        self.taken = self.done = 0

    def run(self) -> dict[str, float]:
        scheduler = self.scheduler
        while self.done < len(self.requests):
            if not self.flight and not len(scheduler.backlog.waiting) and not len(scheduler.running):
                self.now = max(self.now, self.requests[self.taken][0] + RECEIVE)
            self._take()
            plan = scheduler.plan(self.now)
            if plan.spans:
                self._launch(plan)
            while len(self.flight) > bool(plan.spans):
                self._resolve(*self.flight.pop(0))
        waits = list(self.first.values())
        metrics = {f"ttft_ms_p{p}": percentile(waits, p / 100) for p in (50, 90, 99)}
        metrics |= {f"itl_ms_p{p}": percentile(self.gaps, p / 100) for p in (50, 99)}
        metrics["e2e_ms_mean"] = statistics.mean(t - seq.request.arrival for seq, t in self.last.items())
        metrics = {name: round(1e3 * float(seconds), 1) for name, seconds in metrics.items()}
        return metrics | {"requests_s": round(self.done / max(self.last.values()), 2)}

    def _take(self) -> None:
        while self.taken < len(self.requests) and self.requests[self.taken][0] + RECEIVE <= self.now:
            seq = Sequence(self._request(self.taken))
            seq.max_output = seq.request.max_tokens
            self.scheduler.add(seq)
            self.taken += 1

    def _request(self, number: int) -> Request:
        at, ids, output = self.requests[number]
        params = SamplingParams(ignore_eos=True)
        return Request(id=str(number), prompt_ids=ids, params=params, seed=0, max_tokens=output, arrival=at)

    def _launch(self, plan: Plan) -> None:
        graph = plan.num_rows == len(plan.spans)
        launch = LAUNCH_GRAPH if graph else LAUNCH_PIECES if plan.num_rows <= PIECES else LAUNCH_KERNELS
        begin = max(self.gpu_free, self.now + min(launch, 2.5e-3))  # kernels run as they are launched
        self.now += launch
        self.gpu_free = max(begin + gpu_seconds(plan.spans), self.now)
        self.flight.append((plan, self.gpu_free))

    def _resolve(self, plan: Plan, end: float) -> None:
        self.now = max(self.now, end) + COMMIT
        for span in plan.spans:
            seq = span.seq
            if not span.valid or seq.status is not Status.RUNNING:
                continue
            drawn = "sample" in span.want
            self.scheduler.advance(span, [5] if drawn else [])
            if drawn:
                out = self.now + SEND
                if seq in self.first:
                    self.gaps.append(out - self.last[seq])
                else:
                    self.first[seq] = out - seq.request.arrival
                self.last[seq] = out
                if seq.num_output >= seq.max_output:
                    self.scheduler.finish(seq, "length")
                    self.done += 1
        self.scheduler.complete(plan)


def load(trace: str, count: int, rate: float | None) -> list[tuple[float, list[int], int]]:
    """The trace's lengths with Poisson arrivals.

    ``rate`` 0: all at once. None: a minute as it was recorded, with its shared prefixes.
    """
    found = read(ROOT / "bench/traces" / TRACES[trace])
    if rate is None:
        return [
            (r.at, prompt_ids(r, i), r.output)
            for i, r in enumerate(r for r in scaled(found, 1.0, LONGEST) if r.at <= MINUTE)
        ]
    arrivals, ids, at, calls = random.Random(1), random.Random(0), 0.0, []
    for request in found[:count]:
        calls.append(
            (at, [ids.randrange(1 << 40) for _ in range(min(request.prompt, 15_000))], request.output)
        )  # shares nothing with another
        at += arrivals.expovariate(rate) if rate else 0.0
    return calls


@study("simulate-serving")
def main(
    report: Report,
    *,
    requests: int = 1000,
    mixed: Annotated[str, "Most prompt rows of a step with decodes, and of a short step."] = "none,2048,2048:1152",
    policies: str = "fcfs,shortest",
) -> Arms:
    gc.disable()
    loads: list[tuple[str, str, float | None]] = [
        ("mooncake", "mooncake", None),
        (f"conversation-{RATE:g}s", "conversation", RATE),
    ]
    for trace, shares in SHARES.items():
        capacity = Simulation(load(trace, requests // 2, 0.0), None, Fcfs()).run()["requests_s"]
        loads += [(f"{trace}{share * 100:.0f}", trace, round(share * capacity, 2)) for share in shares]
    for (label, trace, rate), text, name in product(loads, mixed.split(","), policies.split(",")):
        most, _, short = text.partition(":")
        bounds = None if most == "none" else MixedRows(int(most), int(short or 1))  # of 1: none is short
        policy = technique.load(POLICIES, name, SchedulerPolicy)
        metrics = Simulation(load(trace, requests, rate), bounds, policy).run()
        yield f"{label}-{text}-{name}", {"rate": rate, "mixed": bounds, "policy": name}, metrics
        gc.collect()
