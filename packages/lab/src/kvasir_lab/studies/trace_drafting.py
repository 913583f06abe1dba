"""Write every step of an engine that drafts, one a line, while it runs `kvasir ARGS...`.

    kvasir_lab/studies/trace_drafting.py OUT.jsonl ARGS...
    python -m kvasir_lab.studies trace_drafting steps.jsonl bench rollouts --model base --problems 8 --samples 8
        --rounds 2 --arm suffix

For engines in this process (`generate`, `bench rollouts`, `bench speculation`, `bench offline`), not for a server. A
line introduces an engine's drafter, or holds a step: its `sort` (drafted, plain, mixed: drafted beside prompts,
unmeasured), sequences and rows, `ms` from the end of the step before to its own, the times that were `expected` and
`charged`, the `kind` it is timed as, and tokens `accepted`. Then follows the controller's state: `credit` in ms, plain
steps left to `rest`, and the `gain` it predicted before. Tracing costs some microseconds a step.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from kvasir.cli import main as command
from kvasir.engine.drafts.draft_times import DraftTimes
from kvasir.engine.drafts.drafting import Drafting
from kvasir.errors import ConfigError
from kvasir.speculation.controller import Controller
from kvasir.types import Plan


def watch(out: TextIO) -> None:
    """Write down the steps of every engine that drafts from now on."""
    seen: dict[str, Any] = {}
    accepted: dict[Drafting, int] = {}  # up to the last step
    init, charge, observe, gain = Drafting.__init__, Drafting.charge, DraftTimes.observe, Controller._gain

    def watched_init(self: Drafting, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        out.write(json.dumps({"drafter": self.drafter.name, "control": self._config.draft_control}) + "\n")

    def watched_observe(self: DraftTimes, *of: Any, **more: Any) -> tuple[float, bool]:
        num_seqs, context, num_drafts, drafted = of[:4]
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted, of[5] if len(of) > 5 else False)
        expected = self._expected(kind, shape)
        charged, known = observe(self, *of, **more)
        seen.update(kind=list(kind), expected=1e3 * expected, charged=1e3 * charged, known=known)
        return charged, known

    def watched_gain(self: Controller, *of: Any) -> float:
        seen["gain"] = gain(self, *of)
        return seen["gain"]

    def watched_charge(self: Drafting, plan: Plan) -> None:
        controller, ended = self.controller, self._ended
        step = self._measured.get(plan.step, 0)
        sort = "unmeasured" if step == 0 else "mixed" if step is None else "drafted" if step.drafted else "plain"
        charge(self, plan)
        before, accepted[self] = accepted.get(self, 0), controller.stats.accepted
        line = {
            "step": plan.step,
            "sort": sort,
            "sequences": len(plan.spans),
            "rows": plan.num_rows,
            "ms": 1e3 * (self._ended - ended),
            "accepted": controller.stats.accepted - before,
            "credit": None if controller._credit is None else 1e3 * controller._credit,
            "rest": controller.rest_left,
            **seen,
        }
        seen.clear()
        out.write(
            json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
            + "\n"
        )

    Drafting.__init__, Drafting.charge = watched_init, watched_charge
    DraftTimes.observe, Controller._gain = watched_observe, watched_gain


def main(given: list[str]) -> None:
    """Watch the command of kvasir whose words follow the file."""
    if len(given) < 2:
        raise ConfigError("name a file and a command: OUT.jsonl bench rollouts ...")
    with open(given[0], "w") as file:
        watch(file)
        sys.argv[:] = ["kvasir", *given[1:]]
        command.main()
