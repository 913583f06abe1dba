"""One result schema for everything that is measured, and the facts about where it was measured.

{"case", "machine", "commit", "date", "versions", "command", "arms": [{"name", "config", "metrics": {}}], "ratios": {}, "limits": {}}
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def machine() -> str:
    """The device that did the work, in words: the GPU if torch sees one, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}, {os.cpu_count()} cores"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the working tree, with ``+`` when it has changes; empty outside a repository."""
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def versions() -> dict[str, str]:
    from kvasir import __version__

    found = {"kvasir": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def result(case: str, arms: list[dict[str, Any]], *, ratios: dict[str, float] | None = None, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    command = "kvasir " + " ".join(sys.argv[1:]) if Path(sys.argv[0]).stem in ("kvasir", "main", "__main__") else " ".join(sys.argv)
    return {"case": case, "machine": machine(), "commit": commit(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(), "command": command, "arms": arms, "ratios": ratios or {}, "limits": limits or {}}


def arm(name: str, config: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "config": config, "metrics": metrics}


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4), "n": len(values)}


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, by linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _shown(value: Any) -> str:
    """Four digits are enough for people; the JSON has them all."""
    if isinstance(value, dict) and {"median", "min", "max", "n"} <= set(value):
        return _shown(value["median"]) + (f" ({_shown(value['min'])} to {_shown(value['max'])})" if value["n"] > 1 else "")
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(v)}" for name, v in value.items())
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}" if isinstance(value, float) else str(value)


def finish(outcome: dict[str, Any], output: Path | None) -> None:
    """Show a short table, write the JSON when asked to, and end with it as one line for machines."""
    from rich.console import Console
    from rich.table import Table

    table = Table("arm", "metric", "value", title=f"{outcome['case']} on {outcome['machine']}")
    for entry in outcome["arms"]:
        for name, value in entry["metrics"].items():
            table.add_row(entry["name"], name, _shown(value))
    for name, value in outcome["ratios"].items():
        table.add_row("ratio", name, f"{value:.2f}x")
    Console(stderr=True).print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome))
