"""``kvasir bench constrained``, one more command of ``bench.app``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.bench import Commit, JSONFile, Model, Repeats, Shape, Site, _given, app
from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.config import EngineConfig

__all__ = ["app"]


@app.command("constrained", cls=Command)
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
    from kvasir.bench import constrained as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        _given(model, options)[1],
        shape=shape,
        repeats=repeats,
        batches=batch,
        output=output,
        peer=peer,
        site=site,
        commit=commit,
    )
