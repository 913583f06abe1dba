"""Arguments and options of all calibrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Lab checkpoint: a folder or a name.")]
Out = Annotated[Path, typer.Option(help="Folder to write.")]
Count = Annotated[int, typer.Option("-n", min=20, help="Number of problems.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of problems and samples.")]
Device = Annotated[str, typer.Option(help="cuda, cpu or auto.")]
