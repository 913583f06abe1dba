"""Simulate two classes of requests, urgent and normal, over the capacity: the real scheduler, no tensors.

    python tools/simulate_priority.py RESULT.json [--seconds 120] [--loads 0.8,1.2] [--urgent 0.2,0.8]

Requests of the Azure conversation trace arrive open loop at a share of the rate that the engine can serve. A drawn
share of them is urgent: priority 0 and a key of its own; the others have priority 10 and another key. So `priority`
orders them and displaces, `fair` shares between the two keys, and `priority:threshold=11` orders alone. Step times are
those of ``tools/simulate_serving.py``.

Requests arrive for --seconds, and then the rest is worked off. ``first`` is the time to the first token, ``last`` the
time to the last one. ``recomputed_share``: rows that were computed again, because their sequence had lost its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir import technique  # noqa: E402
from kvasir.bench.result import arm, percentile, result, write_json  # noqa: E402
from kvasir.engine.policy import POLICIES, SchedulerPolicy  # noqa: E402
from kvasir.engine.schedulers.fcfs import Fcfs  # noqa: E402
from kvasir.types import Plan, Request, Sequence  # noqa: E402
from tools.simulate_serving import Simulation, load  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--loads", default="0.8,1.2", help="shares of the rate that the engine can serve")
    parser.add_argument("--urgent", default="0.2,0.8", help="shares of the requests that are urgent")
    parser.add_argument("--policies", default=NAMES)
    options = parser.parse_args()
    gc.disable()
    capacity = Simulation(load("conversation", 500, 0.0), None, Fcfs()).run()["requests_s"]
    arms = []
    for share, urgent in product(map(float, options.loads.split(",")), map(float, options.urgent.split(","))):
        rate = share * capacity
        requests = load("conversation", int(rate * options.seconds), rate)
        for name in options.policies.split(","):
            policy = technique.load(POLICIES, name, SchedulerPolicy)
            settings = {"load": share, "requests_s": round(rate, 2), "urgent": urgent, "policy": name}
            arms.append(arm(f"{share:g}-{urgent:g}-{name}", settings, Classes(requests, policy, urgent).run()))
            print(arms[-1]["name"], arms[-1]["metrics"], flush=True)
            gc.collect()
    write_json(options.output, result("simulate-priority", arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
