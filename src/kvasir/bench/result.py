"""One result schema for everything that is measured.

    {"case", "machine", "hardware", "commit", "date", "versions", "command", "arms": [{"name", "config", "metrics":
    {}}], "ratios": {}, "limits": {}, "targets": {}}

``hardware`` holds the model of the CPU and, on a GPU, its name, its driver and the version of CUDA; results from before
it was recorded lack it (``bench/results/incomplete.toml`` lists them). Settings that all arms share stand in the
``config`` of the first arm alone; a peer's ``config`` names its version. A metric is a number, a number for each part,
or a ``spread`` with its values.

``ratios`` maps "METRIC ARM/ARM" to a number. ``limits`` holds the most that the machine could do, by metric or "METRIC
ARM", and the rates from which this follows. ``targets`` exists only where a case sets some: "METRIC ARM/ARM" ->
{"ratio", "at_least" or "at_most", "met"}. Results of ``kvasir solve`` also have ``frontier`` (points of accuracy
against each cost), ``differences`` (paired, with intervals), ``right`` (which problems each arm solved, as a row of 0
and 1), ``left_out`` (arms that time did not reach) and ``pool`` (what the shared replies hold, by model). A study that
may be cut into several runs has ``cells``: how many are done, and how many are left; one that trains models has
``trained``, what their trainers recorded, and ``parity``, the distance of engine and trainer, where it was checked.
``peer_version_source`` says where a peer's version is known from, if it was added later. A result holds no path of a
machine: each is cut to its last part.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from kvasir import records
from kvasir.bench.provenance import commit, hardware, machine, versions

# Columns of a table that is not shown in a terminal.
WIDTH = 130
# Most characters of a line of JSON, which holds an arm of a few metrics.
LINE = 400
# An absolute path of at least two parts, but not the path of a URL.
_PATH = re.compile(r"(?<![\w.:/~-])~?/(?:[\w.@+-]+/)+([\w.@+-]*)")


def without_paths(value: Any) -> Any:
    """Cut every absolute path in the strings of ``value`` to its last part."""
    if isinstance(value, str):
        return _PATH.sub(r"\1", value)
    if isinstance(value, dict):
        return {k: without_paths(v) for k, v in value.items()}
    return [without_paths(v) for v in value] if isinstance(value, (list, tuple)) else value


def result(
    case: str,
    arms: list[dict[str, Any]],
    *,
    ratios: dict[str, float] | None = None,
    limits: dict[str, Any] | None = None,
    targets: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A result with the facts about this machine and this commit."""
    command = (
        "kvasir " + " ".join(sys.argv[1:])
        if Path(sys.argv[0]).stem in ("kvasir", "main", "__main__")
        else " ".join(sys.argv)
    )
    found = {
        "case": case,
        "machine": machine(),
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "command": command,
        "arms": arms,
        "ratios": ratios or {},
        "limits": limits or {},
    }
    return without_paths(found | ({"targets": targets} if targets else {}))


def arm(name: str, config: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """One arm of a result."""
    return {"name": name, "config": config, "metrics": metrics}


def spread(values: list[float]) -> dict[str, Any]:
    """Median, minimum and maximum, and the values in the order they were taken."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
        "values": [round(v, 4) for v in values],
    }


def middle(metric: Any) -> float | None:
    """A metric as one number: itself, or the median of its spread. None where it has no single number."""
    value = metric.get("median") if isinstance(metric, dict) else metric
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def ratios_of(arms: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Ratios "METRIC A/B" of every metric that both arms of a pair have, except start and client times."""
    metrics, found = {a["name"]: a["metrics"] for a in arms}, {}
    for one, other in pairs:
        for key in metrics.get(one, {}):
            top, bottom = middle(metrics[one][key]), middle(metrics.get(other, {}).get(key))
            if top is not None and bottom and not key.startswith(("start", "client_")):
                found[f"{key} {one}/{other}"] = round(top / bottom, 3)
    return found


def judged(targets: dict[str, dict[str, float]], ratios: dict[str, float], pair: str) -> dict[str, Any]:
    """Judge whether each target is met.

    ``targets`` maps a metric to {"at_least": ratio} or {"at_most": ratio}; ``pair`` is "ARM/ARM".
    """
    found = {}
    for metric, bound in targets.items():
        name = f"{metric} {pair}"
        if name in ratios:
            met = bound.get("at_least", -float("inf")) <= ratios[name] <= bound.get("at_most", float("inf"))
            found[name] = {"ratio": ratios[name], **bound, "met": met}
    return found


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, by linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def shown(value: Any) -> str:
    """A value with four digits, for people; the JSON has all digits."""
    if isinstance(value, dict) and {"median", "min", "max", "n"} <= set(value):
        return shown(value["median"]) + (f" ({shown(value['min'])} to {shown(value['max'])})" if value["n"] > 1 else "")
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(v)}" for name, v in value.items())
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def share_of_limit(metric: Any, limit: Any) -> str:
    """The share of ``limit`` that a metric reaches, in words; empty where either is no single number."""
    value = middle(metric)
    return f"{value / limit:.0%}" if value is not None and isinstance(limit, (int, float)) and limit > 0 else ""


def limit_of(limits: dict[str, Any], metric: str, arm: str) -> Any:
    """The limit of one arm's metric: its own, else the one for all arms; None where there is none."""
    return limits.get(f"{metric} {arm}", limits.get(metric))


def verdict(target: dict[str, Any]) -> str:
    """Whether a target is met, and its bound, in words."""
    bounds = [f"{kind.replace('_', ' ')} {target[kind]:g}" for kind in ("at_least", "at_most") if kind in target]
    return f"{'met' if target['met'] else 'MISSED'}: {' and '.join(bounds)}"


def as_json(value: Any) -> str:
    """JSON for a file that people read: whatever fits into a line stays on one."""
    return _lines(value, LINE, "") + "\n"


def write_json(output: Path, value: Any) -> None:
    """Write ``as_json`` of a value to a file, as a whole or not at all. Raises OSError; what was there before stays."""
    records.replace(output, as_json(value).encode())


def _lines(value: Any, width: int, pad: str) -> str:
    line = json.dumps(value)
    if len(pad) + len(line) <= width or not value or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, dict):
        opening, closing, parts = (
            "{",
            "}",
            [f"{json.dumps(k)}: {_lines(v, width - len(k) - 4, pad + ' ')}" for k, v in value.items()],
        )
    else:
        opening, closing, parts = "[", "]", [_lines(v, width, pad + " ") for v in value]
    return f"{opening}\n" + ",\n".join(f"{pad} {part}" for part in parts) + f"\n{pad}{closing}"


def save(outcome: dict[str, Any], output: Path | None, commit: str | None = None) -> None:
    """Write the JSON to ``output`` if given; after each arm, so that a run which is cut off keeps what it has. Paths of
    arms that came later are cut, too.

    ``commit`` names the measured commit on a machine without the repository.
    """
    if commit:
        outcome["commit"] = commit
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, without_paths(outcome))


def finish(outcome: dict[str, Any], output: Path | None, commit: str | None = None) -> None:
    """Show a short table and ``save``; without a file, print the JSON as one line for machines."""
    from rich.console import Console
    from rich.table import Table

    save(outcome, output, commit)
    limits, targets = outcome["limits"], outcome.get("targets", {})
    rows = [
        (entry["name"], name, shown(value), share_of_limit(value, limit_of(limits, name, entry["name"])))
        for entry in outcome["arms"]
        for name, value in entry["metrics"].items()
    ]
    rows += [
        ("ratio", name, f"{value:.2f}x", verdict(targets[name]) if name in targets else "")
        for name, value in outcome["ratios"].items()
    ]
    columns = ("arm", "metric", "value", "of the limit")[: 4 if any(last for *_, last in rows) else 3]
    table = Table(*columns, title=f"{outcome['case']} on {outcome['machine']}")
    for row in rows:
        table.add_row(*row[: len(columns)])
    Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH).print(table)
    if output is None:
        print(json.dumps(without_paths(outcome)))
