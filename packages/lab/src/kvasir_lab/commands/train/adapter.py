"""``kvasir train adapter``."""

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


@command(60)
def adapter(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="lora, corda, paca, hydra or soka.")],
    task: Annotated[str, typer.Option(help="Task of the lab to train on, with dials: chain:modulus=499.")],
    out: Annotated[Path, typer.Option(help="Folder to write; kvasir convert to_lora makes a LoRA adapter of it.")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    rank: Annotated[int, typer.Option(min=1, max=128, help="Rank of LoRA; other methods train as many numbers.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of 512 tokens.")] = 8,
    lr: Annotated[float | None, typer.Option(help="Largest learning rate; default: the method's.")] = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train an adapter of a lab model on one task."""
    from kvasir.models import checkpoint
    from kvasir_lab.adapters.training import Plan, train
    from kvasir_lab.drafters.training import default_device

    check_output(out / "training.json", make=True)
    plan = Plan(method, task, rank=rank, steps=steps, rows=rows, lr=lr, seed=seed)
    train(plan, checkpoint.resolve(target), out, device=device or default_device())
