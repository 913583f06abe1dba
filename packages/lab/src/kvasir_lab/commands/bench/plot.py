"""``kvasir bench plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command


@command(120)
def plot(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT...", help="Results that --json or kvasir_lab/studies/kv_quality.py wrote."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the PNG files.")] = Path(
        "docs/methods/img"
    ),
) -> None:
    """Draw the curves in results: decode rates by context length, answers by the size of outliers."""
    from kvasir_lab.bench import plots

    for file in plots.run(files, output):
        typer.echo(file)
