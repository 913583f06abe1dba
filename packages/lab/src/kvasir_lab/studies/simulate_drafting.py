"""Simulate the drafting controller on an H200, in 5 minutes a core.

For each batch and acceptance: rates relative to plain decoding, of the first 192 tokens of a sequence with nothing
known, of the next ones, and of fixed depths. Step times follow measurements, the rest is drawn
(kvasir_lab/bench/drafting_sim.py). The figures are simulated; they show how the controller decides.
"""

from __future__ import annotations

from kvasir.bench.result import spread
from kvasir_lab.bench.drafting_sim import Load, coins, compare
from kvasir_lab.study import SIMULATED, Arms, Report, study

BATCHES, ACCEPTS = (1, 4, 16, 64, 256), (0.0, 0.3, 0.5, 0.7, 0.9)


@study("drafting-simulated")
def main(report: Report, seeds: int = 4, first: int = 0) -> Arms:
    report.more = SIMULATED | {"ratios": {}}
    for batch in BATCHES:
        for accept in ACCEPTS:
            found = [
                compare(Load(batch), coins(accept, seed=seed), seed=seed, depths=(1, 2, 4, 8) if accept else ())
                for seed in range(first, first + (seeds if batch < 256 else max(1, seeds // 2)))
            ]
            metrics = {f"round{i}.of_plain": spread([f.rounds[i] for f in found]) for i in range(2)}
            metrics |= {f"round{i}.of_best_fixed": spread([f.rounds[i] / f.best for f in found]) for i in range(2)}
            metrics |= {f"fixed{depth}.of_plain": spread([f.fixed[depth] for f in found]) for depth in found[0].fixed}
            name = f"simulated goodput accept={accept:g} {batch}"
            report.more["ratios"] |= {
                f"{key} {name}": metrics[key]["median"]
                for key in ("round0.of_plain", "round1.of_plain", "round1.of_best_fixed")
            }
            settings = {"batch": batch, "accept": accept, "prompt": 256, "output": 192, "shape": "llama-8b"}
            yield name, settings, metrics
