"""Pairwise covering arrays: few cases in which every pair of values of any two factors occurs at least once."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(factors: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy: each new case is the best of many random fillings around one pair that is still uncovered."""
    rng = random.Random(seed)
    names = list(factors)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while open_pairs:
        best: dict[str, int] = {}
        best_covers: set = set()
        (a, i), (b, j) = min(open_pairs)
        for _ in range(60):
            case = {name: rng.randrange(len(values)) for name, values in factors.items()} | {a: i, b: j}
            covers = open_pairs & {((x, case[x]), (y, case[y])) for x, y in itertools.combinations(names, 2)}
            if len(covers) > len(best_covers):
                best, best_covers = case, covers
        open_pairs -= best_covers
        cases.append({name: factors[name][k] for name, k in best.items()})
    return cases


def product(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(factors, values)) for values in itertools.product(*factors.values())]


def label(case: dict[str, Any]) -> str:
    return "-".join(f"{k}={v}" for k, v in case.items())
