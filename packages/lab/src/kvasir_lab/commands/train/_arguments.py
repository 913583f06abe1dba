"""Arguments and options of all trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Option(help="Model to train for: a lab checkpoint, by folder or name.")]
Minutes = Annotated[float, typer.Option(min=0.01, help="Training time; sampling and measuring come on top.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of training steps, instead of --minutes.")]
Replies = Annotated[
    int | None, typer.Option(min=8, help="Replies of the target to train on; default: 32768 on a GPU, 1024 on a CPU.")
]
Samples = Annotated[
    Path | None, typer.Option(help="File to keep the replies in, or to read them from: several runs can share it.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the state in the folder.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of problems, replies and weights.")]
Task = Annotated[str, typer.Option(help="Task whose replies are judged, with dials: countdown:min_numbers=4.")]
OwnReplies = Annotated[
    int | None,
    typer.Option(min=8, help="Replies of the target to train on; default: tens of thousands on a GPU, 256 on a CPU."),
]
HeldOut = Annotated[int, typer.Option(min=8, help="Replies to other problems, to measure on.")]
