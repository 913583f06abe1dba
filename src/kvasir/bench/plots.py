"""``kvasir bench plot``: the curves that results hold, as PNG files for the docs: decode rates over the context, answers over outliers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.bench.merge import load
from kvasir.errors import ConfigError

CONTEXT = re.compile(r"context(\d+)k\.decode_tok_s")  # what workloads of a case over context lengths are named
MARKERS = "osD^vP*X"
COLOURS = 128
Curve = list[tuple[float, float, float, float]]  # (x, y, least, most), by x


def run(files: list[Path], folder: Path) -> list[Path]:
    """Draw every curve that the results hold into ``folder``; returns the files. Raises ConfigError where there is none, or no matplotlib."""
    found = [load(file) for file in files]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for outcome in found:
        context, outliers = over_context(outcome), over_outliers(outcome)
        if context:
            drawn.append(folder / f"{outcome['case']}.png")
            _draw(drawn[-1], outcome, context, "tokens of each sequence", "decode, tokens a second", "{:g}k".format)
        if outliers:
            drawn.append(folder / f"{outcome['case']}-outliers.png")
            _draw(
                drawn[-1],
                outcome,
                outliers,
                "size of the outlier channels in the keys (1: the model itself)",
                f"{_task(outcome)}: right answers, % (95 % interval)",
                "{:g}".format,
            )
    if not drawn:
        raise ConfigError(
            "no curve in these results: they need workloads named context8k, context16k, ..., or arms with outliers, as "
            "tools/kv_quality.py writes them"
        )
    return drawn


def over_context(found: dict[str, Any]) -> dict[str, Curve]:
    """Arm -> decode rate by thousands of tokens; empty where fewer than two lengths were measured."""
    curves: dict[str, Curve] = {}
    for entry in found["arms"]:
        points = [
            (float(m.group(1)), v["median"], v["min"], v["max"])
            for name, v in entry["metrics"].items()
            if (m := CONTEXT.fullmatch(name))
        ]
        if len(points) > 1:
            curves[entry["name"]] = sorted(points)
    return curves


def over_outliers(found: dict[str, Any]) -> dict[str, Curve]:
    """Codec -> share right in % by the size of the outliers, of codecs that twins were asked with, and the plain cache."""
    task, curves = _task(found), {}
    if task is None:
        return {}
    for entry in found["arms"]:
        metric = entry["metrics"].get(task)
        if isinstance(metric, dict) and "exact" in metric:
            low, high = metric["interval"]
            point = float(entry["config"].get("outliers", 1)), *(100 * v for v in (metric["exact"], low, high))
            curves.setdefault(entry["name"], []).append(point)
    return {name: sorted(points) for name, points in curves.items() if len(points) > 1}


def _task(found: dict[str, Any]) -> str | None:
    """The task that the twins were given."""
    return next(
        (
            task
            for a in found["arms"]
            if a["config"].get("outliers")
            for task, m in a["metrics"].items()
            if "exact" in m
        ),
        None,
    )


def _draw(
    file: Path, found: dict[str, Any], curves: dict[str, Curve], across: str, up: str, tick: Callable[[float], str]
) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as e:
        raise ConfigError("plots need matplotlib: pip install 'kvasir[plots]'") from e
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (name, points) in enumerate(curves.items()):
        x, y, low, high = (list(values) for values in zip(*points))
        spans = [[max(0.0, a - b) for a, b in zip(y, low)], [max(0.0, b - a) for a, b in zip(y, high)]]
        axes.errorbar(
            x, y, yerr=spans, marker=MARKERS[i % len(MARKERS)], markersize=5, linewidth=1.4, capsize=3, label=name
        )
    places = sorted({x for points in curves.values() for x, *_ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [tick(x) for x in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{found['case']} · {found['machine']} · {found['commit'] or 'commit unknown'}", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        file, "png", optimize=True
    )  # a quarter of the bytes
