"""``kvasir train pair_rl``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir_lab.commands.train._arguments import (
    Device,
    Seed,
)


@command(50)
def pair_rl(
    out: Annotated[Path, typer.Option(help="Folder to write, for v1 and other strategies to take as judge=FOLDER.")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    task: Annotated[list[str] | None, typer.Option(help="Task, with dials; repeat it to train on several.")] = None,
    judge: Annotated[str, typer.Option(help="What is judged: pair, one (single replies), or none.")] = "pair",
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 100,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Problems of a step; default: 96 on a GPU, 4 on a CPU.")
    ] = None,
    group: Annotated[int, typer.Option(min=2, help="Replies to a problem, and judgements of a pair.")] = 8,
    lr: Annotated[float, typer.Option(min=1e-7, help="Largest learning rate.")] = 2e-5,
    held_out: Annotated[int, typer.Option(min=8, help="Problems of each task to measure on.")] = 256,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train a model by reinforcement to solve problems and to judge pairs of its own solutions (V1-PairRL)."""
    from kvasir_lab.drafters.training import default_device
    from kvasir_lab.rewards.pair import PROBLEMS, Plan, train

    check_output(out / "config.json", make=True)
    place = device or default_device()
    count = problems or PROBLEMS.get(place.split(":")[0], PROBLEMS["cpu"])
    plan = Plan(
        tuple(task or ("countdown",)),
        judge,  # type: ignore[arg-type]
        steps,
        count,
        group,
        lr=lr,
        held_out=held_out,
        seed=seed,
    )
    train(plan, target, out, device=place)
