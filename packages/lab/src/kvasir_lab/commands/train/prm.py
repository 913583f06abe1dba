"""``kvasir train prm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir.errors import ConfigError, nearest
from kvasir_lab.commands.train._arguments import (
    Device,
    HeldOut,
    OwnReplies,
    Seed,
    Task,
)


@command(30)
def prm(
    out: Annotated[Path, typer.Option(help="Folder to write, for strategies to take as prm=FOLDER (or judge=NAME).")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    task: Task = "countdown",
    kind: Annotated[str, typer.Option(help="score (a head with one number) or judge (says Yes or No).")] = "score",
    labels: Annotated[str, typer.Option(help="outcome, rollouts, task or restart (score only).")] = "outcome",
    tune: Annotated[str, typer.Option(help="all weights, or the head alone (score only).")] = "all",
    replies: OwnReplies = None,
    each: Annotated[int, typer.Option(min=1, help="Replies to each problem (score only).")] = 8,
    rollouts: Annotated[int, typer.Option(min=1, help="Continuations of a line's end, with labels=rollouts.")] = 4,
    epochs: Annotated[float, typer.Option(min=0.01, help="Passes over the replies (score only).")] = 2.0,
    held_out: HeldOut = 2048,
    rank: Annotated[int, typer.Option(min=1, max=128, help="Rank of the trained change (judge only).")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps (judge only).")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of 512 tokens (judge only).")] = 32,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train a process reward model, which scores the beginnings of solutions.

    A score model learns from the target's own replies; a judge learns from right and wrong solutions of the task.
    """
    from kvasir_lab.drafters.training import default_device

    check_output(out / "config.json", make=True)
    place = device or default_device()
    if kind == "judge":
        from kvasir.models import checkpoint
        from kvasir_lab.adapters import reward

        judge = reward.Plan(task, rank=rank, steps=steps, rows=rows, count=held_out, seed=seed)
        reward.train(judge, checkpoint.resolve(target), out, device=place)
        return
    if kind != "score":
        raise ConfigError(f"--kind {kind} is neither score nor judge.{nearest(kind, ('score', 'judge'))}")
    from kvasir_lab.rewards.score import REPLIES, Plan, train

    count = replies or REPLIES.get(place.split(":")[0], REPLIES["cpu"])
    plan = Plan(task, labels, tune, count, each, rollouts, epochs, held_out, seed)  # type: ignore[arg-type]
    train(plan, target, out, device=place)
