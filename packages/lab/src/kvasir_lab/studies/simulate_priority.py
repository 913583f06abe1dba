"""Simulate two classes of requests, urgent and normal, over the capacity: the real scheduler, no tensors.

    python -m kvasir_lab.studies simulate_priority RESULT.json [--seconds 120] [--loads 0.8,1.2] [--urgent 0.2,0.8]

Requests of the Azure conversation trace arrive open loop at a share of the rate that the engine can serve. A drawn
share of them is urgent: priority 0 and a key of its own; the others have priority 10 and another key. So `priority`
orders them and displaces, `fair` shares between the two keys, and `priority:threshold=11` orders alone. Step times are
those of ``kvasir_lab/studies/simulate_serving.py``.

Requests arrive for --seconds, and then the rest is worked off. ``first`` is the time to the first token, ``last`` the
time to the last one. ``recomputed_share``: rows that were computed again, because their sequence had lost its place.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from itertools import product
from typing import Annotated

from kvasir import technique
from kvasir.bench.result import percentile
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.types import Plan, Request, Sequence
from kvasir_lab.studies.simulate_serving import Simulation, load
from kvasir_lab.study import Arms, Report, study

CLASSES = {"urgent": 0, "normal": 10}  # and their priorities
NAMES = "fcfs,fair,priority,priority:threshold=11"


class Classes(Simulation):
    """A simulation in which each request is urgent with the chance ``urgent``."""

    def __init__(self, requests: list, policy: SchedulerPolicy, urgent: float) -> None:
        super().__init__(requests, None, policy)
        draw = random.Random(5)
        self.kinds = ["urgent" if draw.random() < urgent else "normal" for _ in requests]
        self.rows = self.again = 0  # rows computed, and those of them that had been computed before
        self._reached: dict[Sequence, int] = {}

    def run(self) -> dict[str, float]:
        everything = super().run()
        metrics: dict[str, float] = {}
        for kind in CLASSES:
            mine = [seq for seq in self.last if seq.request.tenant == kind]
            waits = {"first": self.first, "last": {s: self.last[s] - s.request.arrival for s in mine}}
            for (name, seconds), p in product(waits.items(), (50, 99)):
                metrics[f"{kind}_{name}_s_p{p}"] = round(percentile([seconds[s] for s in mine], p / 100), 3)
            metrics[f"{kind}_requests"] = len(mine)
        metrics |= {"requests_s": everything["requests_s"], "displaced": self.scheduler.preemptions}
        return metrics | {"recomputed_share": round(self.again / self.rows, 5)}

    def _launch(self, plan: Plan) -> None:
        for span in plan.spans:
            before, end = self._reached.get(span.seq, 0), span.start + span.length
            self.rows += span.length
            self.again += max(0, min(before, end) - span.start)
            self._reached[span.seq] = max(before, end)
        super()._launch(plan)

    def _request(self, number: int) -> Request:
        kind = self.kinds[number]
        return dataclasses.replace(super()._request(number), priority=CLASSES[kind], tenant=kind)


@study("simulate-priority")
def main(
    report: Report,
    *,
    seconds: float = 120.0,
    loads: Annotated[str, "shares of the rate that the engine can serve"] = "0.8,1.2",
    urgent: Annotated[str, "shares of the requests that are urgent"] = "0.2,0.8",
    policies: str = NAMES,
) -> Arms:
    gc.disable()
    capacity = Simulation(load("conversation", 500, 0.0), None, Fcfs()).run()["requests_s"]
    for share, part in product(map(float, loads.split(",")), map(float, urgent.split(","))):
        rate = share * capacity
        requests = load("conversation", int(rate * seconds), rate)
        for name in policies.split(","):
            policy = technique.load(POLICIES, name, SchedulerPolicy)
            settings = {"load": share, "requests_s": round(rate, 2), "urgent": part, "policy": name}
            yield f"{share:g}-{part:g}-{name}", settings, Classes(requests, policy, part).run()
            gc.collect()
