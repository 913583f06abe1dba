"""``kvasir bench startup``."""

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


@command(50)
@with_settings(EngineConfig, skip=("model",))
def startup(
    model: Model = "",
    shape: Shape = None,
    on_disk: Annotated[
        bool,
        typer.Option("--on-disk", help="Write the shape's random weights to disk and load them from there."),
    ] = False,
    peer: Annotated[str | None, typer.Option(help="Server to compare with, started in turns with ours: vllm.")] = None,
    site: Site = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure the time from starting a server to its first token, with a breakdown. The first start is the coldest."""
    from kvasir.bench import startup as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        model_and_settings(model, options)[1],
        shape=shape,
        repeats=repeats,
        output=output,
        on_disk=on_disk,
        peer=peer,
        site=site,
        commit=commit,
    )
