"""``kvasir bench processors``."""

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


@command(150)
@with_settings(EngineConfig, skip=("model",))
def processors(
    model: Model = "",
    shape: Shape = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode.")] = 64,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 1024,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure what logit processors and forced tokens cost a decode step."""
    from kvasir_lab.bench import processors as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        batch=batch,
        prompt=prompt,
        repeats=repeats,
        output=output,
        commit=commit,
    )
