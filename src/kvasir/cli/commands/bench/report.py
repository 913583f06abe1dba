"""``kvasir bench report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir.errors import ConfigError


@command(110)
def report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Results that --json wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Render results as one HTML page with tables and plots."""
    from kvasir.bench import report as command

    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"the report is HTML; {output.name} does not end in .html")
    check_output(output, make=True)
    command.run(files, output)
