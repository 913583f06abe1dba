"""Training of the kinds of `kvasir_lab.drafters.kind`: drafters, and models that draft for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import Declared, command
from kvasir.cli.options import check_output
from kvasir_lab.commands.train._arguments import Device, Minutes, Replies, Resume, Samples, Seed, Steps, Target

# Packages of `kvasir_lab.drafters.kind`, named here because importing it imports torch.
DRAFTERS, MODELS = "kvasir_lab.trained_drafters", "kvasir_lab.trained_models"


def of_model(name: str) -> Declared:
    """The command that trains whole models by the kind ``name``."""

    @command(20, f"Train a whole model further ({name}), so that it drafts for itself.")
    def model(
        out: Annotated[Path, typer.Option(help="Folder to write: a model like any other.")],
        target: Target = "base",
        options: Annotated[str, typer.Option(help="Options of the method, for example stride=4,data=self.")] = "",
        minutes: Minutes = 8.0,
        steps: Steps = None,
        replies: Replies = None,
        samples: Samples = None,
        resume: Resume = False,
        device: Device = None,
        seed: Seed = 0,
    ) -> None:
        spec = f"{name}:{options}" if options else name
        run(MODELS, spec, target, out, minutes, steps, replies, samples, resume, device, seed)

    return model


def run(
    package: str,
    name: str,
    target: str,
    out: Path,
    minutes: float,
    steps: int | None,
    replies: int | None,
    samples: Path | None,
    resume: bool,
    device: str | None,
    seed: int,
) -> None:
    """Train the kind ``name`` of ``package`` (`kvasir_lab.drafters.kind`)."""
    import shlex
    import sys

    from kvasir_lab.drafters.training import REPLIES, Plan, default_device, main

    Plan(name, package).load()  # refuses an unknown name before anything is made
    check_output(out / "config.json", make=True)
    if samples is not None and not samples.exists():
        check_output(samples, make=True)
    count = replies or REPLIES.get((device or default_device()).split(":")[0], REPLIES["cpu"])
    plan = Plan(name, package, minutes=minutes, steps=steps, replies=count, held_out=max(8, count // 32), seed=seed)
    main(
        plan,
        target,
        out,
        samples=samples,
        resume=resume,
        device=device,
        command=shlex.join(["kvasir", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
    )
