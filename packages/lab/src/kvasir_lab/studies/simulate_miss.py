"""Explain where `goodput` has less than the best fixed depth: one sequence, acceptance 0.7, the tokens of the H200 run.

    python -m kvasir_lab.studies simulate_miss OUT.json [--seeds 40]

The run (bench/results/h200/speculation-llama-8b-07.json, batch 1) spoiled the same drafts in every arm, drawn from the
prompt. They are drawn again here, so the forwards of fixed depths must come out as measured. The engine's controller
then drafts for them on the simulated clock (kvasir_lab/bench/drafting_sim.py), after the round that warmed the measured
one up, with one set of step times a seed. ``exact`` has step times without noise. ``model alone`` is the controller
before it bounded what a size costs that was never run (`kvasir.engine.drafts.draft_times.UNTRIED`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

from kvasir.bench.result import spread
from kvasir.bench.workloads import SHAPES, Batch
from kvasir.engine.drafts import draft_times
from kvasir.models.families import build_spec
from kvasir_lab.bench.drafting_sim import Load, Machine, Simulation, coins
from kvasir_lab.bench.speculation import SHAPE_TEMPERATURE, random_loads
from kvasir_lab.study import SIMULATED, Arms, Report, study

ACCEPT, OUTPUT, DEPTHS = 0.7, 192, (1, 2, 4, 6, 7, 8)


def drawn() -> list[Callable[[int, int], float]]:
    """Whether each draft of an output token is right, 1 or 0, in the round that warms up and the measured ones."""
    vocab = build_spec(SHAPES["llama-8b"]).vocab_size
    found = []
    for load in random_loads(Batch("", 1, 256, OUTPUT), vocab, 3, SHAPE_TEMPERATURE):
        rng = random.Random(f"0 {list(load.prompts[0])} 0")
        right = [float(rng.random() < ACCEPT) for _ in range(OUTPUT)]
        found.append(lambda sequence, token, right=right: right[token])
    return found


def run(rounds: list[Callable[[int, int], float]], seed: int, machine: Machine, **options: Any) -> dict[str, float]:
    """Seconds, forwards and mean drafts of the last of the rounds, in one engine."""
    current = [rounds[0]]
    drafter = coins(lambda sequence, token: current[0](sequence, token), boast=ACCEPT)
    simulation = Simulation(1, drafter, machine=machine, seed=seed, **options)
    for chances in rounds:
        current[0], stats, steps = chances, simulation.drafting.controller.stats, simulation._step
        drafted, verified = stats.drafted, stats.verified
        seconds = simulation.run(Load(1, outputs=(OUTPUT,)))
    return {
        "seconds": seconds,
        "forwards": simulation._step - steps,
        "drafts": (stats.drafted - drafted) / (stats.verified - verified),
    }


@study("drafting-miss-simulated")
def main(report: Report, *, seeds: int = 40) -> Arms:
    report.more = SIMULATED
    warm, first, _ = drawn()
    for name, machine in (("noisy", Machine()), ("exact", Machine(jitter=0.0, outliers=0.0))):
        prompt = Simulation(1, None, machine=machine).run(Load(1, outputs=(1,)))
        fixed = {}
        for depth in DEPTHS:
            found = [run([first], s, machine, depth=depth, control="fixed") for s in range(seeds)]
            fixed[depth] = statistics.median(f["seconds"] for f in found) - prompt
            metrics = {"forwards": found[0]["forwards"], "seconds": round(fixed[depth], 4)}
            yield f"fixed{depth} {name}", {"depth": depth}, metrics
        for control, untried in (("goodput", draft_times.UNTRIED), ("model alone", math.inf)):
            with mock.patch.object(draft_times, "UNTRIED", untried):
                found = [run([warm, first], s, machine) for s in range(seeds)]
            metrics = {
                "forwards": spread([f["forwards"] for f in found]),
                "drafts": spread([f["drafts"] for f in found]),
                "of_best_fixed": spread([min(fixed.values()) / (f["seconds"] - prompt) for f in found]),
            }
            yield f"{control} {name}", {"seeds": seeds, "accept": ACCEPT, "batch": 1}, metrics
