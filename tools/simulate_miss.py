"""Explain where `goodput` has less than the best fixed depth: one sequence, acceptance 0.7, the tokens of the H200 run.

    python tools/simulate_miss.py OUT.json [--seeds 40]

The run (bench/results/h200/speculation-llama-8b-07.json, batch 1) spoiled the same drafts in every arm, drawn from the
prompt. They are drawn again here, so the forwards of fixed depths must come out as measured. The engine's controller
then drafts for them on the simulated clock (src/kvasir/bench/drafting_sim.py), after the round that warmed the measured
one up, with one set of step times a seed. ``exact`` has step times without noise. ``model alone`` is the controller
before it bounded what a size costs that was never run (`kvasir.engine.draft_times.UNTRIED`).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from kvasir.bench.drafting_sim import Load, Machine, Simulation, coins
from kvasir.bench.result import arm, finish, result, spread
from kvasir.bench.speculation import SHAPE_TEMPERATURE, random_loads
from kvasir.bench.workloads import SHAPES, Batch
from kvasir.engine import draft_times
from kvasir.models.families import build_spec

ACCEPT, OUTPUT, DEPTHS = 0.7, 192, (1, 2, 4, 6, 7, 8)


def drawn() -> list[Callable[[int, int], float]]:
    """For the round that warms up and the measured ones: whether the draft of an output token is right, 1 or 0."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=40)
    given = parser.parse_args()
    warm, first, _ = drawn()
    arms = []
    for name, machine in (("noisy", Machine()), ("exact", Machine(jitter=0.0, outliers=0.0))):
        prompt = Simulation(1, None, machine=machine).run(Load(1, outputs=(1,)))
        fixed = {}
        for depth in DEPTHS:
            found = [run([first], s, machine, depth=depth, control="fixed") for s in range(given.seeds)]
            fixed[depth] = statistics.median(f["seconds"] for f in found) - prompt
            metrics = {"forwards": found[0]["forwards"], "seconds": round(fixed[depth], 4)}
            arms.append(arm(f"fixed{depth} {name}", {"depth": depth}, metrics))
        for control, untried in (("goodput", draft_times.UNTRIED), ("model alone", math.inf)):
            with mock.patch.object(draft_times, "UNTRIED", untried):
                found = [run([warm, first], s, machine) for s in range(given.seeds)]
            metrics = {
                "forwards": spread([f["forwards"] for f in found]),
                "drafts": spread([f["drafts"] for f in found]),
                "of_best_fixed": spread([min(fixed.values()) / (f["seconds"] - prompt) for f in found]),
            }
            config = {"seeds": given.seeds, "accept": ACCEPT, "batch": 1}
            arms.append(arm(f"{control} {name}", config, metrics))
    finish(
        result("drafting-miss-simulated", arms) | {"machine": "simulated: step times of an H200, nothing was measured"},
        given.out,
    )


if __name__ == "__main__":
    main()
