"""``kvasir bench processors``, one more command of ``bench.app``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.bench import Commit, JSONFile, Model, Repeats, Shape
from kvasir.cli.bench_constrained import app
from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.config import EngineConfig

__all__ = ["app"]


@app.command("processors", cls=Command)
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
    from kvasir.bench import processors as command

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
