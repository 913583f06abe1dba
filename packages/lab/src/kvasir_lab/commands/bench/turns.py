"""``kvasir bench turns``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Repeats,
    Site,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output, with_settings
from kvasir.config import EngineConfig


@command(230)
@with_settings(EngineConfig, skip=("model",))
def turns(
    shape: Annotated[str, typer.Option(help="Known model shape, with random weights.")] = "qwen3.5-9b",
    shared: Annotated[int, typer.Option(min=64, help="Tokens that a conversation starts with.")] = 8192,
    new: Annotated[int, typer.Option(min=1, help="Tokens that each turn adds.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 4,
    peer: Annotated[str | None, typer.Option(help="Engine to compare turns with, started after ours: vllm.")] = None,
    site: Site = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure an agent's turns over a prefix cache: first tokens compared with cold ones, hits, and suffix drafts."""
    from kvasir_lab.bench import turns as command

    check_output(output, make=True)
    command.run(
        model_and_settings("", options)[1],
        shape=shape,
        shared=shared,
        new=new,
        turns=rounds,
        repeats=repeats,
        peer=peer,
        site=site,
        output=output,
        commit=commit,
    )
