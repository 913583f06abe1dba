"""``kvasir solve report --together``: join runs of one task, over several seeds or strategies, into one result.

The marks of a strategy are joined seed after seed, with ``.`` where it did not run. Pairs are therefore still of the
same seed and the same problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.report import CURRENCIES, frontier
from kvasir_lab.evaluation.statistics import wilson

# Mark of a problem on which a strategy did not run.
MISSING = "."
# Settings that must be equal in all arms that are joined.
SAME = ("task", "n", "split", "temperature")
# Currencies that cannot be compared between machines.
TIMES = ("seconds", "device_seconds")


def pooled(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join results into one; those of several machines lose their times.

    Raises ConfigError where the tasks differ, or where one strategy occurs twice with the same seed.
    """
    first = results[0]["arms"][0]["config"]
    machines = list(dict.fromkeys(found["machine"] for found in results))
    runs: dict[str, dict[int, tuple[dict[str, Any], str]]] = {}
    for found in results:
        for entry in found["arms"]:
            config, name = entry["config"] or found["arms"][0]["config"], entry["name"]
            if "right" not in found or any(config[key] != first[key] for key in SAME):
                raise ConfigError(
                    f"--together: `{name}` of {found['case']} is not comparable with {results[0]['case']}: "
                    f"{', '.join(SAME)} must be the same"
                )
            if config["seed"] in runs.setdefault(name, {}):
                raise ConfigError(f"--together: two files hold `{name}` with seed {config['seed']}")
            runs[name][config["seed"]] = entry["metrics"], found["right"][name]
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    arms = [
        (name, _sum([metrics for metrics, _ in by_seed.values()], timed=len(machines) == 1))
        for name, by_seed in runs.items()
    ]
    config = {**first, "seed": ", ".join(map(str, seeds))}
    return {
        **{key: results[0][key] for key in ("case", "commit", "date")},
        "machine": " and ".join(machines),
        "arms": [
            {"name": name, "config": {} if i else config, "metrics": metrics} for i, (name, metrics) in enumerate(arms)
        ],
        "frontier": {c: frontier(arms, c) for c in CURRENCIES if all(m["per_problem"].get(c) for _, m in arms)},
        "right": {
            name: "".join(by_seed[seed][1] if seed in by_seed else MISSING * first["n"] for seed in seeds)
            for name, by_seed in runs.items()
        },
    }


def _sum(parts: list[dict[str, Any]], timed: bool) -> dict[str, Any]:
    """Metrics of one strategy over its seeds: problems and tokens are added, costs and loops averaged by problems."""
    problems = sum(m["problems"] for m in parts)

    def mean(values: Sequence[float]) -> float:
        return sum(m["problems"] * v for m, v in zip(parts, values, strict=True)) / problems

    right = sum(m["right"] for m in parts)
    models = {model for m in parts for model in m["by_model"]}
    found = {
        "problems": problems,
        "right": right,
        "exact": right / problems,
        "interval": list(wilson(int(right), int(problems))),
        "wasted": mean([m["wasted"] for m in parts]),
        "output_tokens": sum(m["output_tokens"] for m in parts),
        "per_problem": {
            unit: mean([m["per_problem"][unit] for m in parts])
            for unit in parts[0]["per_problem"]
            if timed or unit not in TIMES
        },
        "by_model": {
            model: {"output_tokens": sum(m["by_model"].get(model, {}).get("output_tokens", 0) for m in parts)}
            for model in sorted(models)
        },
    }
    if timed and "seconds" in parts[0]:
        found["seconds"] = sum(m["seconds"] for m in parts)
    if "loops" in parts[0]:
        found["loops"] = [
            {
                "loop": loops[0]["loop"],
                **{key: mean([loop[key] for loop in loops]) for key in ("mean", "any", "answers")},
            }
            for loops in zip(*(m["loops"] for m in parts))
        ]
    return found
