"""``kvasir bench turns``, one more command of ``bench.app``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.bench import Commit, JSONFile, Repeats, Site, _given
from kvasir.cli.bench_thinking import app
from kvasir.cli.options import Command, check_output, with_settings
from kvasir.config import EngineConfig

__all__ = ["app"]


@app.command("turns", cls=Command)
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
    from kvasir.bench import turns as command

    check_output(output, make=True)
    command.run(
        _given("", options)[1],
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
