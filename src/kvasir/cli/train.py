"""``kvasir train``: train parts that make a model cheaper to serve. A command imports its work when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.options import check_output
from kvasir.technique import own

HEAD_KINDS = "kvasir.speculation.head_kinds"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train parts that make a model cheaper to serve.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def drafter(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which drafter: {', '.join(own(HEAD_KINDS))}.")],
    target: Annotated[str, typer.Option(help="Model to draft for: a lab checkpoint, by folder or name.")],
    out: Annotated[Path, typer.Option(help="Folder to write; --drafter NAME:model=FOLDER then serves it.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time; sampling and measuring come on top.")] = 2.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of training steps, instead of --minutes.")] = None,
    replies: Annotated[
        int | None,
        typer.Option(min=8, help="Replies of the target to train on; default: 32768 on a GPU, 1024 on a CPU."),
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="File to keep the replies in, or to read them from: drafters can share it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the state in the folder.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems, replies and weights.")] = 0,
) -> None:
    """Train a drafter on the target's own replies to the lab's problems."""
    import shlex
    import sys

    from kvasir.lab.drafters.training import REPLIES, Plan, default_device, main
    from kvasir.speculation.heads import class_of

    class_of(name)  # refuses an unknown name before anything is made
    check_output(out / "config.json", make=True)
    if samples is not None and not samples.exists():
        check_output(samples, make=True)
    count = replies or REPLIES.get((device or default_device()).split(":")[0], REPLIES["cpu"])
    plan = Plan(name, minutes=minutes, steps=steps, replies=count, held_out=max(8, count // 32), seed=seed)
    main(
        plan,
        target,
        out,
        samples=samples,
        resume=resume,
        device=device,
        command=shlex.join(["kvasir", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
    )


@app.command()
def prm(
    out: Annotated[Path, typer.Option(help="Folder to write: a model, to name as the judge of beam or particle.")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    task: Annotated[str, typer.Option(help="Task whose steps are judged, with dials: chain:max_steps=12.")] = "chain",
    rank: Annotated[int, typer.Option(min=1, max=128, help="Rank of the trained change.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of 512 tokens.")] = 32,
    count: Annotated[int, typer.Option(min=1, help="Beginnings of solutions to measure the judge on.")] = 1000,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and weights.")] = 0,
) -> None:
    """Train a process reward model: a judge of the beginnings of solutions."""
    from kvasir.lab.adapters.reward import Plan, train
    from kvasir.lab.drafters.training import default_device
    from kvasir.models import checkpoint

    check_output(out / "config.json", make=True)
    plan = Plan(task, rank=rank, steps=steps, rows=rows, count=count, seed=seed)
    train(plan, checkpoint.resolve(target), out, device=device or default_device())


@app.command()
def adapter(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="lora, corda, paca, hydra or soka.")],
    task: Annotated[str, typer.Option(help="Task of the lab to train on, with dials: chain:modulus=499.")],
    out: Annotated[Path, typer.Option(help="Folder to write; kvasir convert to_lora makes a LoRA adapter of it.")],
    target: Annotated[str, typer.Option(help="Base model: a lab checkpoint, by folder or name.")] = "base",
    rank: Annotated[int, typer.Option(min=1, max=128, help="Rank of LoRA; other methods train as many numbers.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of 512 tokens.")] = 8,
    lr: Annotated[float | None, typer.Option(help="Largest learning rate; default: the method's.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and weights.")] = 0,
) -> None:
    """Train an adapter of a lab model on one task."""
    from kvasir.lab.adapters.training import Plan, train
    from kvasir.lab.drafters.training import default_device
    from kvasir.models import checkpoint

    check_output(out / "training.json", make=True)
    plan = Plan(method, task, rank=rank, steps=steps, rows=rows, lr=lr, seed=seed)
    train(plan, checkpoint.resolve(target), out, device=device or default_device())
