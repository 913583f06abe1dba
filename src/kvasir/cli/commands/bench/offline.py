"""``kvasir bench offline``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Repeats,
    Shape,
    Workloads,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(20)
@with_settings(EngineConfig, skip=("model",))
def offline(
    model: Model = "",
    shape: Shape = None,
    workload: Workloads = None,
    peer: Annotated[str | None, typer.Option(help="Engine to compare with, e.g. transformers.")] = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure tokens per second of batches through the Python API, alone or compared with a peer."""
    from kvasir.bench import offline as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        workloads=workload,
        peer=peer,
        repeats=repeats,
        output=output,
        commit=commit,
    )
