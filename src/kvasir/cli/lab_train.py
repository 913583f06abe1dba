"""``kvasir lab train``: train a lab model from nothing; the work is in `kvasir.lab.train`, which also runs without kvasir installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.options import check_output
from kvasir.errors import ConfigError


def train(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which model: nano or base (smoke: seconds, to try the path).")
    ],
    out: Annotated[Path | None, typer.Option(help="The folder to write; default: lab-NAME.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Train this long (sampling and evaluation come on top).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many steps instead.")] = None,
    stop_after: Annotated[
        str | None, typer.Option(help="Stop and save after this much wall time, e.g. 8m; go on with --resume.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on exactly where a stopped run saved its state.")
    ] = False,
    continue_from: Annotated[
        Path | None, typer.Option(help="Go on with a finished model: the last phase alone, 2 minutes.")
    ] = None,
    also: Annotated[
        Path | None, typer.Option(help="Another finished model, whose mistakes are judged and combined, too.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed than the recipe's.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that make batches.")] = None,
) -> None:
    """Train a lab model from nothing (nano: 6 minutes, base: 14, on one H200)."""
    from kvasir.lab.train import main

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
