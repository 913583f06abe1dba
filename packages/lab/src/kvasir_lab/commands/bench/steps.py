"""``kvasir bench steps``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Shape,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(160)
@with_settings(EngineConfig, skip=("model",))
def steps(
    model: Model = "",
    shape: Shape = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Batch to predict and measure: NAME:BATCH:PROMPT:OUTPUT; repeatable; default: seven."),
    ] = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Fit the terms of a step's time within three minutes, predict the runtimes of other batches, and compare."""
    from kvasir_lab.bench import steps as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        workloads=workload,
        output=output,
        commit=commit,
    )
