"""One picture of an evaluation: exact match with intervals, pass@k and majority@k, bits a byte, as measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError, install


def check() -> None:
    """Raise ConfigError when plots cannot be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"a plot needs matplotlib, which is not installed: `{install('plots')}`, or leave --plot out")


def draw(outcome: dict[str, Any], file: Path) -> None:
    """Write a PNG of ``outcome``, a result of `kvasir eval` (see `kvasir.bench.result`).

    Raises ConfigError without matplotlib.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = [a for a in outcome["arms"] if a["name"] != "difference"]
    panels = [(kind, tasks) for kind in ("exact", "pool", "bits_per_byte") if (tasks := _tasks(arms, kind))]
    figure = Figure(figsize=(max(4.0, 4.6 * len(panels)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (kind, tasks) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _curves(axes, arms, tasks) if kind == "pool" else _bars(axes, arms, tasks, kind)
    figure.suptitle(f"{outcome['case']} ({outcome['machine']})", fontsize=9)
    figure.savefig(file, dpi=150, format="png")


def _tasks(arms: list[dict[str, Any]], kind: str) -> list[str]:
    wanted = "pass" if kind == "pool" else kind
    return [task for task, metrics in arms[0]["metrics"].items() if wanted in metrics]


def _bars(axes: Any, arms: list[dict[str, Any]], tasks: list[str], kind: str) -> None:
    factor, width = (100 if kind == "exact" else 1), 0.8 / len(arms)
    for i, entry in enumerate(arms):
        values = [factor * entry["metrics"][task][kind] for task in tasks]
        bounds = [[factor * b for b in entry["metrics"][task]["interval"]] for task in tasks]
        errors = [
            [max(0.0, v - low) for v, (low, _) in zip(values, bounds)],
            [max(0.0, high - v) for v, (_, high) in zip(values, bounds)],
        ]
        places = [t + (i - (len(arms) - 1) / 2) * width for t in range(len(tasks))]
        axes.bar(places, values, width * 0.92, yerr=errors, capsize=3, label=entry["name"])
    axes.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("exact match, % (95 % interval)" if kind == "exact" else "bits per byte (95 % interval)")
    if kind == "exact":
        axes.set_ylim(0, 105)
    axes.legend(fontsize=7)


def _curves(axes: Any, arms: list[dict[str, Any]], tasks: list[str]) -> None:
    for entry in arms:
        for task in tasks:
            colour = None
            for name, line in (("pass", "-"), ("majority", "--")):
                points = entry["metrics"][task].get(name)
                if points:
                    drawn = axes.plot(
                        [int(k) for k in points],
                        [100 * p["share"] for p in points.values()],
                        line,
                        marker="o",
                        markersize=3,
                        color=colour,
                        label=f"{entry['name']}: {task}, {name}@k",
                    )
                    colour = drawn[0].get_color()
    sizes = sorted({int(k) for entry in arms for task in tasks for k in entry["metrics"][task]["pass"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xlabel("samples k")
    axes.set_ylabel("solved, %")
    axes.set_ylim(0, 105)
    axes.legend(fontsize=7)
