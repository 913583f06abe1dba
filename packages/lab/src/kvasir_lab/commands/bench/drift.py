"""``kvasir bench drift``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output


@command(200)
def drift(
    model: Model = "",
    kind: Annotated[str | None, typer.Option(help="Drafter that learns, eagle or medusa; default: eagle.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Task of the stream; repeatable; default: chain, schema, story.")
    ] = None,
    requests: Annotated[int, typer.Option(min=8, help="Requests of each task.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Most optimizer steps after each request.")] = 8,
    start_steps: Annotated[int, typer.Option(min=1, help="Steps on the first task before the stream.")] = 1000,
    rate: Annotated[float, typer.Option(help="Learning rate while serving, for a width of 4,096.")] = 1e-4,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a reply.")] = 256,
    every: Annotated[int, typer.Option(min=1, help="Optimizer steps between two candidates.")] = 200,
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cpu",
    commit: Commit = None,
    output: JSONFile = None,
) -> None:
    """Replay one stream whose tasks change, with drafters that learn and that do not, and compare forwards."""
    from kvasir_lab.bench import drift as command

    check_output(output, make=True)
    command.run(
        model,
        kind=kind or command.KIND,
        tasks=task or list(command.TASKS),
        requests=requests,
        steps=steps,
        start_steps=start_steps,
        rate=rate,
        max_tokens=max_tokens,
        every=every,
        device=device,
        output=output,
        commit=commit,
    )
