"""``kvasir convert``: rewrite a checkpoint folder with one converter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def run(spec: str, source: str, target: Path, device: str | None = None) -> None:
    """Convert ``source`` into the folder ``target`` and say what came out. ``device``: where a calibration runs
    (None: a GPU, if there is one). Raises ConfigError."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from kvasir.convert.checkpoint import convert
    from kvasir.convert.converter import load_converter
    from kvasir.models import checkpoint
    from kvasir.models.loader import read_headers

    converter, folder = load_converter(spec), checkpoint.resolve(source)
    total = sum(t.num_bytes for t in read_headers(folder))
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        options = _calibration(device) if converter.calibration else {}
        advance = lambda num_bytes: bar.advance(task, num_bytes)  # noqa: E731
        record = convert(converter, spec, folder, target, progress=advance, **options)
    promise = converter.result or (
        f"the same function as {record['source']}" if record["exact"] else f"an approximation of {record['source']}"
    )
    print(f"{target}: {record['bytes'] / 2**20:,.1f} MiB, {promise}")


def _calibration(device: str | None) -> dict[str, Any]:
    """The device that a calibration runs on, and its default texts."""
    import torch

    from kvasir.lab.calibration import default_texts

    return {"device": device or ("cuda" if torch.cuda.is_available() else "cpu"), "texts": default_texts}
