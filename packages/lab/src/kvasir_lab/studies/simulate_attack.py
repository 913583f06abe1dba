"""Simulate clients that ask for very long answers, and what is left for the others: the real scheduler, no tensors.

    python -m kvasir_lab.studies simulate_attack RESULT.json [--seconds 120] [--attackers 0,1,10,50]
        [--policies fcfs,fair]
        [--caps 0,512]

Forty honest keys send requests of the Azure conversation trace at a quarter of the rate that the engine can serve, so
each asks for less than its share. Each attacker has a key of its own and keeps 64 requests open, with 100 prompt tokens
and 8,192 output tokens each. A cap is the server's ``--max-output-tokens``. Step times are those of
``kvasir_lab/studies/simulate_serving.py``.
"""

from __future__ import annotations

import gc
import random
from itertools import count, product

from kvasir import technique
from kvasir.bench.result import percentile
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.types import Request, SamplingParams, Sequence, Status
from kvasir_lab.studies.simulate_serving import RECEIVE, Simulation, load
from kvasir_lab.study import Arms, Report, study

SHARE, HONEST_KEYS = 0.25, 40  # of the rate that the engine can serve; keys that share this rate
OPEN, PROMPT, OUTPUT = 64, 100, 8192


class Attack(Simulation):
    """A simulation of ``seconds`` with ``attackers``; ``cap`` bounds every answer (0: nothing does)."""

    def __init__(self, honest: list, policy: SchedulerPolicy, attackers: int, cap: int, seconds: float) -> None:
        super().__init__(honest, None, policy)
        self.attackers, self.cap, self.seconds = attackers, cap, seconds
        self.open: dict[int, list[Sequence]] = {i: [] for i in range(attackers)}
        self.honest: list[Sequence] = []
        self._names, self._ids = count(), random.Random(3)

    def run(self) -> dict[str, float]:
        while self.now < self.seconds:
            if not self.flight and not self.attackers and not self.scheduler.has_work(self.now):
                self.now = max(self.now, self.requests[self.taken][0] + RECEIVE)
            self._take()
            plan = self.scheduler.plan(self.now)
            if plan.spans:
                self._launch(plan)
            while len(self.flight) > bool(plan.spans):
                self._resolve(*self.flight.pop(0))
        # Requests that still wait count with the wait they have had, or the worst case would look best.
        waits = [self.first.get(s, self.now - s.request.arrival) for s in self.honest]
        asked = sum(s.max_output for s in self.honest if s.request.arrival < 0.9 * self.seconds)
        got = sum(s.num_output for s in self.honest if s.request.arrival < 0.9 * self.seconds)
        everything = sum(s.num_output for s in {*self.honest, *self.last})
        metrics = {f"honest_ttft_ms_p{p}": round(1e3 * percentile(waits, p / 100), 1) for p in (50, 99)}
        return metrics | {
            "honest_served_share": round(got / asked, 4),
            "honest_tokens_s": round(sum(s.num_output for s in self.honest) / self.now, 1),
            "all_tokens_s": round(everything / self.now, 1),
        }

    def _take(self) -> None:
        while self.taken < len(self.requests) and self.requests[self.taken][0] + RECEIVE <= self.now:
            at, ids, output = self.requests[self.taken]
            self.honest.append(self._add(f"honest{self.taken % HONEST_KEYS}", at, ids, output))
            self.taken += 1
        for i, mine in self.open.items():
            mine[:] = [s for s in mine if s.status is not Status.FINISHED]
            while len(mine) < OPEN:
                ids = [self._ids.randrange(1 << 40) for _ in range(PROMPT)]
                mine.append(self._add(f"attacker{i}", self.now, ids, OUTPUT))

    def _add(self, tenant: str, at: float, ids: list[int], output: int) -> Sequence:
        output = min(output, self.cap or output)
        params = SamplingParams(ignore_eos=True)
        seq = Sequence(
            Request(
                id=str(next(self._names)),
                prompt_ids=ids,
                params=params,
                seed=0,
                max_tokens=output,
                arrival=at,
                tenant=tenant,
            )
        )
        seq.max_output = output
        self.scheduler.add(seq)
        return seq


@study("simulate-attack")
def main(
    report: Report,
    *,
    seconds: float = 120.0,
    attackers: str = "0,1,10,50",
    policies: str = "fcfs,fair",
    caps: str = "0,512",
) -> Arms:
    gc.disable()
    rate = SHARE * Simulation(load("conversation", 500, 0.0), None, Fcfs()).run()["requests_s"]
    honest = load("conversation", int(rate * seconds * 1.2) + 10, rate)
    for number, policy, cap in product(map(int, attackers.split(",")), policies.split(","), map(int, caps.split(","))):
        attack = Attack(honest, technique.load(POLICIES, policy, SchedulerPolicy), number, cap, seconds)
        settings = {"attackers": number, "policy": policy, "max_output_tokens": cap, "honest_requests_s": rate}
        yield f"{number}-{policy}-{cap}", settings, attack.run()
        gc.collect()
