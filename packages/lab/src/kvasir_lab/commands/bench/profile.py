"""``kvasir bench profile``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Repeats,
    Shape,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(70)
@with_settings(EngineConfig, skip=("model",))
def profile(
    model: Model = "",
    shape: Shape = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences that decode.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 1024,
    mixed: Annotated[
        int, typer.Option(min=0, help="Tokens of a new prompt that each step computes in addition to the decodes.")
    ] = 0,
    repeats: Repeats = 5,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Profile one decode step: kernels by time, and the share of it in which the GPU is idle."""
    from kvasir_lab.bench import profile as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        batch=batch,
        prompt=prompt,
        repeats=repeats,
        output=output,
        commit=commit,
        mixed=mixed,
    )
