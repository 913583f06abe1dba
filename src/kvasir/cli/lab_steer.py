"""``kvasir lab steer``: calibrate hooks on hidden states. A command imports its work when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.options import check_output

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Calibrate hooks on hidden states (--hook).")
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Lab checkpoint: a folder or a name.")]
Out = Annotated[Path, typer.Option(help="Folder to write.")]
Count = Annotated[int, typer.Option("-n", min=20, help="Number of problems.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of problems and samples.")]
Device = Annotated[str, typer.Option(help="cuda, cpu or auto.")]


@app.command()
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
    from kvasir.lab.steer.crest import Plan, calibrate

    check_output(out / "hooks.json", make=True)
    plan = Plan(task, count, seed, site, chosen, c, gate, label)  # type: ignore[arg-type]
    card = calibrate(model, plan, out, device=device)
    typer.echo(f"{out}: {card['heads'][0]} of {card['heads'][1]} heads; accuracy {card['accuracy']}; serve with:")
    typer.echo(f"  kvasir serve {model} --hook crest={out}")


@app.command()
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
    from kvasir.lab.steer.styles import Plan, calibrate

    check_output(out / "hooks.json", make=True)
    card = calibrate(model, Plan(target, count, seed, p, margin, least), out, device=device)  # type: ignore[arg-type]
    typer.echo(f"{out}: {len(card['layers'])} layers; accuracy {card['accuracy']}; serve with:")
    typer.echo(f"  kvasir serve {model} --hook {target}={out}")
