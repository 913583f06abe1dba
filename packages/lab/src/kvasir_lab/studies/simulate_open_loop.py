"""Simulate drafts under an open-loop trace on an H200: off, `goodput` and a fixed depth, on the same requests.

    python -m kvasir_lab.studies simulate_open_loop RESULT.json [--requests 300] [--rates 4,12,18]
        [--accept 0,0.5,0.7,mixed]

Requests of the Azure conversation trace arrive by a Poisson process. The drafter proposes chains of which each token is
right with the chance --accept; ``mixed``: 0.9 for every other request and 0 for the rest. Its calls take as long as
those of ``suffix``. Everything else is `kvasir_lab/bench/drafting_sim.py`: the engine's own controller on a simulated
clock, so the figures say how it decides, not how fast a GPU is.

``delivery`` is the time between two deliveries to a request, which may hold several tokens. ``itl`` is that between two
tokens, 0 within a delivery, and ``tpot`` a request's mean time a token after the first. All graphs are captured from
the start, and compiling takes no time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Annotated, Any

from kvasir.bench.result import percentile
from kvasir.types import Request, SamplingParams, Sequence, Span, Status
from kvasir_lab.bench import drafting_sim
from kvasir_lab.bench.drafting_sim import RIGHT, Accept, coins, constant
from kvasir_lab.studies.simulate_serving import load
from kvasir_lab.study import SIMULATED, Arms, Report, study

SEATS, DEPTH = 256, 4  # sequences at once; drafts of the fixed arm
CALL, EACH = 0.1e-3, 5e-6  # Seconds of a proposal, and of each sequence in it.
ARMS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "goodput": {},
    f"fixed {DEPTH}": {"control": "fixed", "depth": DEPTH},
}


class OpenLoop(drafting_sim.Simulation):
    """A simulation of requests (seconds of arrival, prompt tokens, output tokens)."""

    def __init__(self, requests: list[tuple[float, int, int]], drafter: Callable | None, **options: Any) -> None:
        super().__init__(SEATS, drafter, **options)
        self.requests = requests
        self.first: dict[Sequence, float] = {}
        self.last: dict[Sequence, float] = {}
        self.deliveries: list[float] = []
        self.gaps: list[float] = []

    def serve(self) -> dict[str, float]:
        """Serve all. Returns the figures, in milliseconds."""
        waiting = deque(self._request(i, *given) for i, given in enumerate(self.requests))
        running: list[Sequence] = []
        while waiting or running or self._flight:
            while waiting and len(running) < SEATS and waiting[0].request.arrival <= self.clock.now:
                seq = waiting.popleft()
                seq.status, seq.seat = Status.RUNNING, 0
                running.append(seq)
            if not running and not self._flight:
                self.clock.now = max(self.clock.now, waiting[0].request.arrival)
                continue
            self._turn(running)
            running = [seq for seq in running if seq.status is Status.RUNNING]
        waits = [at - seq.request.arrival for seq, at in self.first.items()]
        each = [(self.last[s] - at) / (s.num_output - 1) for s, at in self.first.items() if s.num_output > 1]
        found = {f"ttft_ms_p{p}": percentile(waits, p / 100) for p in (50, 99)}
        found |= {f"delivery_ms_p{p}": percentile(self.deliveries, p / 100) for p in (50, 99)}
        found["itl_ms_p99"] = percentile(self.gaps, 0.99)
        found |= {"tpot_ms_mean": statistics.mean(each), "tpot_ms_p99": percentile(each, 0.99)}
        found["e2e_ms_mean"] = statistics.mean(at - seq.request.arrival for seq, at in self.last.items())
        return {name: round(1e3 * value, 2) for name, value in found.items()}

    def _request(self, i: int, at: float, prompt: int, output: int) -> Sequence:
        params = SamplingParams(ignore_eos=True)
        return Sequence(
            Request(id=str(i), prompt_ids=[RIGHT] * prompt, params=params, seed=i, max_tokens=output, arrival=at)
        )

    def _commit(self, span: Span) -> None:
        seq, before = span.seq, span.seq.num_output
        super()._commit(span)
        if seq.num_output > before:
            if seq in self.first:
                gap = self.clock.now - self.last[seq]
                self.deliveries.append(gap)
                self.gaps += [gap, *[0.0] * (seq.num_output - before - 1)]
            else:
                self.first[seq] = self.clock.now
            self.last[seq] = self.clock.now


def chances(text: str) -> Accept:
    """The chance that a draft is right, by the number of the request."""
    if text == "mixed":
        return lambda sequence, token: 0.9 * (sequence % 2)
    return constant(float(text))


@study("drafting-open-loop-simulated")
def main(
    report: Report,
    *,
    requests: int = 300,
    rates: Annotated[str, "requests a second"] = "4,12,18",
    accept: str = "0,0.5,0.7,mixed",
) -> Arms:
    report.more = SIMULATED
    drafting_sim.COMPILES = drafting_sim.CAPTURES = 0.0
    for rate, accepts in product(map(float, rates.split(",")), accept.split(",")):
        stream = [(at, len(ids), output) for at, ids, output in load("conversation", requests, rate)]
        for name, given in ARMS.items():
            drafter = None if given is None else coins(chances(accepts), call=CALL, each=EACH)
            metrics = OpenLoop(stream, drafter, **(given or {})).serve()
            yield f"{rate:g}/s {accepts} {name}", {"requests_s": rate, "accept": accepts, "drafts": name}, metrics
