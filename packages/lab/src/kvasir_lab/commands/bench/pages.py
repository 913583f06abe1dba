"""``kvasir bench pages``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.errors import ConfigError


@command(130)
def pages(
    root: Annotated[Path, typer.Option(help="The root of the repository.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a page and its results differ.")
    ] = False,
) -> None:
    """Write the tables of figures in README and docs from the results in bench/results."""
    from kvasir_lab.bench import pages as command

    changed = command.run(root, check=check)
    for file in changed:
        typer.echo(file)
    if check and changed:
        raise ConfigError("these pages differ from their results: run 'kvasir bench pages'")
