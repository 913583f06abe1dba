"""``kvasir bench merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output


@command(100)
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Results of one case.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the merged result.")],
) -> None:
    """Merge several runs of one case into one result."""
    from kvasir.bench import merge as command
    from kvasir.bench.result import write_json

    check_output(output, make=True)
    write_json(output, command.merge([command.load(f) for f in files]))
