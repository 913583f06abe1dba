"""``kvasir bench churn``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    JSONFile,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import Settings


@command(170)
@with_settings(Settings, skip=("model", "seed"))
def churn(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="Checkpoint; default: simulated engines.")
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of faults under load.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of requests and faults.")] = 0,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Kill and stop replicas and cut connections under load, and check every token.

    With a model its engines run in exact mode. The exit code is 1 when a request failed, or a token was doubled, lost
    or wrong.
    """
    from kvasir_lab.bench import churn as command

    check_output(output, make=True)
    given = {name: value for name, value in options.items() if value is not None}
    exact = {"batch_invariant": True} if model else {}
    usual = {"replicas": 3, "watchdog": 3.0, "startup_timeout": 60.0, "crash_dumps": "", **exact}
    settings = build_settings({"model": model, **usual, **given})
    if not command.run(settings, minutes=minutes, seed=seed, simulated=not model, output=output):
        raise typer.Exit(1)
