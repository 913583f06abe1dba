"""``kvasir train drafter``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.technique import own
from kvasir_lab.commands.train._arguments import (
    Device,
    Minutes,
    Replies,
    Resume,
    Samples,
    Seed,
    Steps,
    Target,
)
from kvasir_lab.commands.train._kinds import DRAFTERS, run


@command(10)
def drafter(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"Which drafter, with options (idlm:rank=16): {', '.join(own(DRAFTERS))}."),
    ],
    target: Target,
    out: Annotated[Path, typer.Option(help="Folder to write; --drafter NAME:model=FOLDER then serves it.")],
    minutes: Minutes = 2.0,
    steps: Steps = None,
    replies: Replies = None,
    samples: Samples = None,
    resume: Resume = False,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train a drafter on the target's own replies to the lab's problems."""
    run(DRAFTERS, name, target, out, minutes, steps, replies, samples, resume, device, seed)
