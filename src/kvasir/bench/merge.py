"""``kvasir bench merge``: join several runs of one case that takes longer than a machine can be reserved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir.bench.result import judged, middle, ratios_of, spread
from kvasir.errors import ConfigError
from kvasir.plain_files import refuse_special


def load(file: Path) -> dict[str, Any]:
    """Read a result file. Raises ConfigError."""
    refuse_special(file)
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read the result {file}: {e}") from e
    if not isinstance(found, dict) or "arms" not in found or "case" not in found:
        raise ConfigError(f"{file} is not a result of kvasir bench")
    return found


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the arms of all results by name, with all of their values, and compute ratios and targets again.

    All results must have the same case, machine and commit; otherwise ConfigError is raised.
    """
    first = results[0]
    for key in ("case", "machine", "commit"):
        if different := {r[key] for r in results} - {first[key]}:
            raise ConfigError(f"the results differ in their {key}: {first[key]}, {', '.join(sorted(different))}")
    arms: dict[str, dict[str, Any]] = {}
    for found in results:
        for entry in found["arms"]:
            if entry["name"] not in arms:
                arms[entry["name"]] = {**entry, "metrics": dict(entry["metrics"])}
                continue
            metrics = arms[entry["name"]]["metrics"]
            for name, value in entry["metrics"].items():
                metrics[name] = _together(metrics[name], value) if name in metrics else value
    limits: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    names: list[str] = []
    for found in results:
        limits |= found["limits"]
        targets |= found.get("targets", {})
        names += [n for n in found["ratios"] if n not in names]
    entries = list(arms.values())
    pairs = dict.fromkeys(tuple(n.rsplit(" ", 1)[-1].split("/")) for n in names if n.rsplit(" ", 1)[-1].count("/") == 1)
    anew = ratios_of(entries, [p for p in pairs if set(p) <= set(arms)])
    # Metrics and pairs of the ratios. Loads whose arms ran in different commands have no ratio in any single result.
    kinds = {_kind(n) for n in names}
    names += [n for n in anew if n not in names and "." in n.split(" ")[0] and _kind(n) in kinds]
    ratios = {n: anew[n] if n in anew else next(r["ratios"][n] for r in results if n in r["ratios"]) for n in names}
    judgements = {}
    for name, target in targets.items():
        metric, pair = name.rsplit(" ", 1)
        bound = {k: v for k, v in target.items() if k in ("at_least", "at_most")}
        judgements |= judged({metric: bound}, ratios, pair)
    merged = first | {
        "arms": entries,
        "ratios": ratios,
        "limits": limits,
        "command": " ; ".join(r["command"] for r in results),
        "date": max(r["date"] for r in results),
    }
    return merged | ({"targets": judgements} if judgements else {})


def _kind(name: str) -> tuple[str, str]:
    """Metric and pair of arms of a ratio named "LOAD.METRIC PAIR"."""
    metric, _, pair = name.partition(" ")
    return metric.rsplit(".", 1)[-1], pair


def _together(one: Any, other: Any) -> Any:
    """Join two values of a metric into one spread; the later one wins where they are not numbers."""
    values = [v for value in (one, other) for v in (value.get("values", []) if isinstance(value, dict) else [value])]
    return spread(values) if values and all(middle(v) is not None for v in values) else other
