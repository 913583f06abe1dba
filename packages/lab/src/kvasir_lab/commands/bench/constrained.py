"""``kvasir bench constrained``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Repeats,
    Shape,
    Site,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(140)
@with_settings(EngineConfig, skip=("model",))
def constrained(
    model: Model = "",
    shape: Shape = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; default: 1, 16 and 64; repeatable.")
    ] = None,
    peer: Annotated[str | None, typer.Option(help="Server to compare with, started after ours: vllm.")] = None,
    site: Site = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure what a JSON schema costs: time per token, first tokens of new schemas, many schemas, forced text."""
    from kvasir_lab.bench import constrained as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        model_and_settings(model, options)[1],
        shape=shape,
        repeats=repeats,
        batches=batch,
        output=output,
        peer=peer,
        site=site,
        commit=commit,
    )
