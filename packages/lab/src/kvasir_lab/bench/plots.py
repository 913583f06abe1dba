"""``kvasir bench plot``: draw the curves in results as PNG files: decode rates by context length, and right answers by
the size of outliers.

This module also draws the bars of ``kvasir bench pages``.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.bench.merge import load
from kvasir.errors import ConfigError, install

# The decode rate of a workload named by its context length.
CONTEXT = re.compile(r"context(\d+)k\.decode_tok_s")
MARKERS = "osD^vP*X"
# Number of colours in the palette of a PNG file.
COLOURS = 128
# The metadata key under which a PNG file stores the numbers that it shows.
DATA = "kvasir-figures"
# Points (x, y, lower bound of y, upper bound of y), sorted by x.
Curve = list[tuple[float, float, float, float]]


def run(files: list[Path], folder: Path) -> list[Path]:
    """Draw every curve that the results hold into ``folder`` and return the files.

    Raises ConfigError where there is no curve, or no matplotlib.
    """
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
            "no curve in these results: they need workloads named context8k, context16k, ..., or arms with outliers, "
            "which kvasir_lab/studies/kv_quality.py writes"
        )
    return drawn


def over_context(found: dict[str, Any]) -> dict[str, Curve]:
    """Decode rates by arm and thousands of context tokens; empty where fewer than two lengths were measured."""
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
    """Right answers in %, by codec and size of the outliers. Codecs without outlier twins have no curve."""
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
    """The task that the outlier twins answered; None without twins."""
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


def draw_bars(file: Path, title: str, rows: list[list[Any]], data: str) -> None:
    """Draw ``rows`` (a label, our rate, the peer's rate) as bars relative to the peer.

    ``data`` is stored in the metadata of the PNG.
    """
    figure, axes = _figure(6.4, 0.9 + 0.42 * len(rows))
    for i, (_, own, peer) in enumerate(reversed(rows)):
        axes.barh(i + 0.2, own / peer, 0.38, color="#2b6cb0", label="kvasir" if i == 0 else None)
        axes.barh(i - 0.2, 1.0, 0.38, color="#a0aec0", label="peer" if i == 0 else None)
        ratio = round(own / peer, 3)  # as results store it, so that the picture and the tables say the same
        axes.text(own / peer, i + 0.2, f" {ratio:.2f}x · {own:,.0f} tokens/s", va="center", fontsize=7)
        axes.text(1.0, i - 0.2, f" {peer:,.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
    axes.set_xlim(0, 1.45 * max(own / peer for _, own, peer in rows))
    axes.set_xlabel("throughput relative to the peer in the same run", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _save(file, figure, data)


def stored(file: Path) -> str | None:
    """The data that ``draw_bars`` stored in a PNG file; None where there is none. Needs no image library."""
    content, at, prefix = file.read_bytes(), 8, DATA.encode() + b"\0"
    while at + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        body = content[at + 8 : at + 8 + length]
        if kind == b"tEXt" and body.startswith(prefix):
            return body[len(prefix) :].decode("latin-1")
        at += length + 12
    return None


def _draw(
    file: Path, found: dict[str, Any], curves: dict[str, Curve], across: str, up: str, tick: Callable[[float], str]
) -> None:
    figure, axes = _figure(6.4, 3.8)
    for i, (name, points) in enumerate(curves.items()):
        x, y, low, high = (list(values) for values in zip(*points))
        spans = [[max(0.0, a - b) for a, b in zip(y, low)], [max(0.0, b - a) for a, b in zip(y, high)]]
        marker = MARKERS[i % len(MARKERS)]
        axes.errorbar(x, y, yerr=spans, marker=marker, markersize=5, linewidth=1.4, capsize=3, label=name)
    places = sorted({x for points in curves.values() for x, *_ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [tick(x) for x in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{found['case']} · {found['machine']} · {found['commit'] or 'commit unknown'}", fontsize=8)
    _save(file, figure)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of this size in inches, and its axes. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(f"plots need matplotlib: {install('plots')}") from e
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(file: Path, figure: Any, data: str | None = None) -> None:
    """Write a PNG with a palette, which makes it a quarter of the size, and ``data`` in its metadata."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, notes = io.BytesIO(), PngInfo()
    if data is not None:
        notes.add_text(DATA, data)
    figure.savefig(drawn, dpi=130, format="png")
    image = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(file, "png", optimize=True, pnginfo=notes)
