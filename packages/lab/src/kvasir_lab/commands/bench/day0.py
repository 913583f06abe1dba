"""``kvasir bench day0``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(210)
@with_settings(EngineConfig, skip=("model",))
def day0(
    model: Model = "",
    task: Annotated[
        list[str] | None, typer.Option(help="Task whose problems are asked; repeatable; default: chain, schema, story.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes with learning.")] = 6.0,
    plain_minutes: Annotated[float, typer.Option(min=0.01, help="Minutes without drafts, before.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a reply.")] = 256,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Serve with a drafter that learns from random weights on, and show when it becomes faster than none."""
    from kvasir_lab.bench import day0 as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        tasks=task or list(command.TASKS),
        batch=batch,
        minutes=minutes,
        plain_minutes=plain_minutes,
        max_tokens=max_tokens,
        output=output,
        commit=commit,
    )
