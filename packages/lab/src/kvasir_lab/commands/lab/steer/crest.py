"""``kvasir lab steer crest``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir_lab.commands.lab.steer._arguments import Count, Device, Model, Out, Seed


@command(50)
def crest(
    model: Model,
    out: Out,
    task: Annotated[str, typer.Option(help="Task to sample traces of, with dials: reflect:needless=0.5.")] = "reflect",
    count: Count = 1000,
    seed: Seed = 0,
    site: Annotated[str, typer.Option(help="head_out (every head by itself) or attn_out (their sum).")] = "head_out",
    chosen: Annotated[float, typer.Option(help="Share of the heads that turn, the most accurate first.")] = 0.38,
    c: Annotated[float, typer.Option(help="Turn: -1 removes the component, -2 reflects it.")] = -1.0,
    gate: Annotated[str, typer.Option(help="threshold, soft or all: how a head's probe gates its turn.")] = "threshold",
    label: Annotated[str, typer.Option(help="Segment that labels a cut: the one that follows, or ended.")] = "follows",
    device: Device = "auto",
) -> None:
    """Find heads that lead to needless checks, and the directions to turn them away from."""
    from kvasir_lab.steer.crest import Plan, calibrate

    check_output(out / "hooks.json", make=True)
    plan = Plan(task, count, seed, site, chosen, c, gate, label)  # type: ignore[arg-type]
    card = calibrate(model, plan, out, device=device)
    typer.echo(f"{out}: {card['heads'][0]} of {card['heads'][1]} heads; accuracy {card['accuracy']}; serve with:")
    typer.echo(f"  kvasir serve {model} --hook crest={out}")
