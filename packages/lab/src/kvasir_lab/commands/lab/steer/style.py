"""``kvasir lab steer style``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir_lab.commands.lab.steer._arguments import Count, Device, Model, Out, Seed


@command(60)
def style(
    model: Model,
    out: Out,
    target: Annotated[str, typer.Option(help="Style to raise: plain, formal or lively.")] = "formal",
    count: Count = 300,
    seed: Seed = 0,
    p: Annotated[float, typer.Option(help="Probability that the probe shall give the style.")] = 0.9,
    margin: Annotated[str, typer.Option(help="runner_up, or sigmoid as published.")] = "runner_up",
    least: Annotated[float, typer.Option(help="Layers whose probe is less accurate are left alone.")] = 0.9,
    device: Device = "auto",
) -> None:
    """Fit probes of the style task's templates, and write the edit that raises one of them."""
    from kvasir_lab.steer.styles import Plan, calibrate

    check_output(out / "hooks.json", make=True)
    card = calibrate(model, Plan(target, count, seed, p, margin, least), out, device=device)  # type: ignore[arg-type]
    typer.echo(f"{out}: {len(card['layers'])} layers; accuracy {card['accuracy']}; serve with:")
    typer.echo(f"  kvasir serve {model} --hook {target}={out}")
