"""``kvasir lab train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir.errors import ConfigError


@command(10)
def train(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Model to train: nano, base, base-hybrid or experts (smoke: a test of seconds)."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: lab-NAME.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Training time; sampling and evaluation come on top.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of training steps, instead of --minutes.")] = None,
    stop_after: Annotated[
        str | None, typer.Option(help="Stop and save after this much wall time, e.g. 8m; --resume continues.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue exactly where a stopped run saved its state.")
    ] = False,
    continue_from: Annotated[
        Path | None, typer.Option(help="Finished model to train further: only the last phase, 2 minutes.")
    ] = None,
    also: Annotated[
        Path | None, typer.Option(help="Another finished model, whose mistakes are also judged and combined.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed; default: the recipe's.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Number of processes that make batches.")] = None,
) -> None:
    """Train a lab model from scratch (nano: 6 minutes, base: 14, on one H200)."""
    from kvasir_lab.train import main

    given = {
        "--minutes": minutes,
        "--steps": steps,
        "--stop-after": stop_after,
        "--device": device,
        "--seed": seed,
        "--workers": workers,
        "--continue-from": continue_from,
        "--also": also,
    }
    options = [part for option, value in given.items() if value is not None for part in (option, str(value))]
    if minutes is not None and steps is not None:
        raise ConfigError("give --minutes or --steps, not both")
    out = out or Path(f"lab-{name}")
    check_output(out / "config.json", make=True)
    main(["--recipe", name, "--out", str(out), *options, *(["--resume"] if resume else [])])
