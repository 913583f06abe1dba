"""``kvasir train self_eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir_lab.commands.train._arguments import (
    Device,
    HeldOut,
    OwnReplies,
    Seed,
    Task,
)


@command(40)
def self_eval(
    out: Annotated[Path, typer.Option(help="Folder to write: a model that also judges its own replies.")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    task: Task = "countdown",
    rank: Annotated[int, typer.Option(min=1, max=128, help="Rank of the trained change.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of 512 tokens.")] = 32,
    replies: OwnReplies = None,
    held_out: HeldOut = 1024,
    digits: Annotated[bool, typer.Option("--digits", help="Learn to rate steps from 0 to 9, too.")] = False,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train a model to say in one token whether starting its reply again would do no better."""
    from kvasir_lab.drafters.training import default_device
    from kvasir_lab.rewards.self_evaluation import REPLIES, Plan, train

    check_output(out / "config.json", make=True)
    place = device or default_device()
    count = replies or REPLIES.get(place.split(":")[0], REPLIES["cpu"])
    plan = Plan(task, rank, steps, rows, count, held_out=held_out, seed=seed, digits=digits)
    train(plan, target, out, device=place)
