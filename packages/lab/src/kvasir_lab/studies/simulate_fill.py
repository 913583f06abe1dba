"""Simulate a fixed row budget for every step, FastGen's Dynamic SplitFuse, compared with our bounds on mixed steps.

    python -m kvasir_lab.studies simulate_fill RESULT.json [--requests 1000] [--budgets 768,784]

Dynamic SplitFuse (Holmes et al., DeepSpeed-FastGen, arXiv:2401.08671) splits long prompts and fuses short ones with the
decodes, so that every forward has the same number of rows. Here that is ``--max-num-batched-tokens`` alone: the real
scheduler fills that budget with decodes first, then with prompts. The last chunk ends at the end of a page, so a full
step may lack less than a page of its budget. A budget of whole tiles (768) is rounded down to a tile once more, mostly
to 640 rows; one page more (784) leaves that out. Step times are those of ``kvasir_lab/studies/simulate_serving.py``.

A step has a *backlog* if prompt rows wait that would fill it. ``full_share`` is the share of these steps whose rows
reach the budget but for a page. ``rows`` counts all steps by their rows, in eighths of the budget; ``rows.8/8`` are
those at it.
"""

from __future__ import annotations

import gc
from collections import Counter

from kvasir.engine.schedule.pace import MixedRows
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.engine.schedule.spans import rows_left
from kvasir.types import Plan, Status
from kvasir_lab.studies.simulate_serving import SHARES, Simulation, load
from kvasir_lab.study import Arms, Report, study

OURS = MixedRows(2048, 1152)  # the bounds on an H200


class Filled(Simulation):
    """A simulation that counts the rows of its steps. ``budget``: rows of a step; ``bounds``: as by default."""

    def __init__(self, requests: list, budget: int, bounds: MixedRows | None) -> None:
        super().__init__(requests, bounds, Fcfs(), budget)
        self.budget = budget
        self.rows: Counter[int] = Counter()
        self.backlogged = self.full = 0

    def _launch(self, plan: Plan) -> None:
        scheduler, rows = self.scheduler, plan.num_rows
        self.rows[min(8, 8 * (rows + scheduler.pages.page_slots - 1) // self.budget)] += 1
        # What waits after this step was planned, and what the step took of it.
        running = sum(rows_left(seq) for seq in scheduler.running if seq.status is Status.RUNNING)
        if scheduler._seats() > 0 and scheduler.backlog.waiting.rows + running - len(scheduler.running) > self.budget:
            self.backlogged += 1
            self.full += rows > self.budget - scheduler.pages.page_slots
        super()._launch(plan)

    def run(self) -> dict[str, float]:
        metrics, steps = super().run(), self.rows.total()
        metrics |= {"steps": steps, "backlogged_steps": self.backlogged}
        if self.backlogged:
            metrics["full_share"] = round(self.full / self.backlogged, 4)
        return metrics | {f"rows.{eighth}/8": round(self.rows[eighth] / steps, 4) for eighth in range(9)}


@study("simulate-fill")
def main(report: Report, *, requests: int = 1000, budgets: str = "768,784") -> Arms:
    gc.disable()
    for trace, shares in SHARES.items():
        capacity = Simulation(load(trace, requests // 2, 0.0), None, Fcfs()).run()["requests_s"]
        loads = [(f"{trace}{share * 100:.0f}", round(share * capacity, 2)) for share in shares] + [(f"{trace}-all", 0)]
        for label, rate in loads:
            for name, budget, bounds in [
                ("fcfs", 8192, OURS),
                *((f"fill{rows}", int(rows), None) for rows in budgets.split(",")),
            ]:
                settings = {"rate": rate, "max_num_batched_tokens": budget, "mixed": bounds}
                yield f"{label}-{name}", settings, Filled(load(trace, requests, rate), budget, bounds).run()
                gc.collect()
