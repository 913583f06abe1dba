"""Simulate clients that ask for very long answers, and what is left for the others: the real scheduler, no tensors.

    python tools/simulate_attack.py RESULT.json [--seconds 120] [--attackers 0,1,10,50] [--policies fcfs,fair]
        [--caps 0,512]

Forty honest keys send requests of the Azure conversation trace at a quarter of the rate that the engine can serve, so
each asks for less than its share. Each attacker has a key of its own and keeps 64 requests open, with 100 prompt tokens
and 8,192 output tokens each. A cap is the server's ``--max-output-tokens``. Step times are those of
``tools/simulate_serving.py``.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from itertools import count, product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir import technique  # noqa: E402
from kvasir.bench.result import arm, percentile, result, write_json  # noqa: E402
from kvasir.engine.policy import POLICIES, SchedulerPolicy  # noqa: E402
from kvasir.engine.schedulers.fcfs import Fcfs  # noqa: E402
from kvasir.types import Request, SamplingParams, Sequence, Status  # noqa: E402
from tools.simulate_serving import RECEIVE, Simulation, load  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--attackers", default="0,1,10,50")
    parser.add_argument("--policies", default="fcfs,fair")
    parser.add_argument("--caps", default="0,512")
    options = parser.parse_args()
    gc.disable()
    rate = SHARE * Simulation(load("conversation", 500, 0.0), None, Fcfs()).run()["requests_s"]
    honest = load("conversation", int(rate * options.seconds * 1.2) + 10, rate)
    arms = []
    for attackers, policy, cap in product(
        map(int, options.attackers.split(",")), options.policies.split(","), map(int, options.caps.split(","))
    ):
        attack = Attack(honest, technique.load(POLICIES, policy, SchedulerPolicy), attackers, cap, options.seconds)
        settings = {"attackers": attackers, "policy": policy, "max_output_tokens": cap, "honest_requests_s": rate}
        arms.append(arm(f"{attackers}-{policy}-{cap}", settings, attack.run()))
        print(arms[-1]["name"], arms[-1]["metrics"], flush=True)
        gc.collect()
    write_json(options.output, result("simulate-attack", arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
