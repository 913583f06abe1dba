"""``kvasir bench rollouts``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(90)
@with_settings(EngineConfig, skip=("model", "drafter", "draft_control", "max_draft_tokens"))
def rollouts(
    model: Annotated[str, typer.Option(help="Checkpoint folder or name.")] = "base",
    problems: Annotated[int, typer.Option(min=1, help="Number of problems, the same in every round.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples per problem, at temperature 1.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 5,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Task of the lab; repeatable; default: four of them.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per sample.")] = 512,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", help="Weights of one round; repeatable; default: the model's in all rounds."),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            min=0, help="Noise to add to every matrix each round, as a share of its spread: a stand-in for training."
        ),
    ] = 0.0,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="Arm to run in addition to plain; repeatable; default: all.")
    ] = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure rollouts of reinforcement learning over rounds: forwards and makespan, with and without drafts."""
    from kvasir_lab.bench import rollouts as command

    check_output(output, make=True)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        problems=problems,
        samples=samples,
        rounds=rounds,
        tasks=task,
        max_tokens=output_tokens,
        checkpoints=checkpoint or [],
        noise=noise,
        only=arm,
        output=output,
        commit=commit,
    )
