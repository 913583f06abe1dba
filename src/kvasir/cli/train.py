"""``kvasir train``: train parts that make a model cheaper to serve. A command imports its work when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.options import check_output
from kvasir.errors import ConfigError, nearest
from kvasir.technique import own

# Packages of `kvasir.lab.drafters.kind`, named here because importing it imports torch.
DRAFTERS, MODELS = "kvasir.lab.trained_drafters", "kvasir.lab.trained_models"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train parts that make a model cheaper to serve.")


@app.callback()
def _group() -> None:
    pass


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


@app.command()
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
    _run(DRAFTERS, name, target, out, minutes, steps, replies, samples, resume, device, seed)


def _of_model(name: str) -> None:
    """Add the command that trains whole models by the kind ``name``."""

    @app.command(name, help=f"Train a whole model further ({name}), so that it drafts for itself.")
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
        _run(MODELS, spec, target, out, minutes, steps, replies, samples, resume, device, seed)


for _name in own(MODELS):
    _of_model(_name)


def _run(
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
    """Train the kind ``name`` of ``package`` (`kvasir.lab.drafters.kind`)."""
    import shlex
    import sys

    from kvasir.lab.drafters.training import REPLIES, Plan, default_device, main

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


Task = Annotated[str, typer.Option(help="Task whose replies are judged, with dials: countdown:min_numbers=4.")]
OwnReplies = Annotated[
    int | None,
    typer.Option(min=8, help="Replies of the target to train on; default: tens of thousands on a GPU, 256 on a CPU."),
]
HeldOut = Annotated[int, typer.Option(min=8, help="Replies to other problems, to measure on.")]


@app.command()
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
    from kvasir.lab.drafters.training import default_device

    check_output(out / "config.json", make=True)
    place = device or default_device()
    if kind == "judge":
        from kvasir.lab.adapters import reward
        from kvasir.models import checkpoint

        judge = reward.Plan(task, rank=rank, steps=steps, rows=rows, count=held_out, seed=seed)
        reward.train(judge, checkpoint.resolve(target), out, device=place)
        return
    if kind != "score":
        raise ConfigError(f"--kind {kind} is neither score nor judge.{nearest(kind, ('score', 'judge'))}")
    from kvasir.lab.rewards.score import REPLIES, Plan, train

    count = replies or REPLIES.get(place.split(":")[0], REPLIES["cpu"])
    plan = Plan(task, labels, tune, count, each, rollouts, epochs, held_out, seed)  # type: ignore[arg-type]
    train(plan, target, out, device=place)


@app.command("self_eval")
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
    from kvasir.lab.drafters.training import default_device
    from kvasir.lab.rewards.self_evaluation import REPLIES, Plan, train

    check_output(out / "config.json", make=True)
    place = device or default_device()
    count = replies or REPLIES.get(place.split(":")[0], REPLIES["cpu"])
    plan = Plan(task, rank, steps, rows, count, held_out=held_out, seed=seed, digits=digits)
    train(plan, target, out, device=place)


@app.command("pair_rl")
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
    from kvasir.lab.drafters.training import default_device
    from kvasir.lab.rewards.pair import PROBLEMS, Plan, train

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
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Train an adapter of a lab model on one task."""
    from kvasir.lab.adapters.training import Plan, train
    from kvasir.lab.drafters.training import default_device
    from kvasir.models import checkpoint

    check_output(out / "training.json", make=True)
    plan = Plan(method, task, rank=rank, steps=steps, rows=rows, lr=lr, seed=seed)
    train(plan, checkpoint.resolve(target), out, device=device or default_device())
