"""``kvasir eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Model,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(60)
@with_settings(EngineConfig, skip=("model", "seed"))
def evaluate(
    model: Model = "",
    tasks: Annotated[
        str, typer.Option(help="Tasks with their dials, e.g. chain,needle or chain:max_steps=8,path.")
    ] = "chain",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Problems per task.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and sampling.")] = 7,
    split: Annotated[
        str, typer.Option(help="Split of the task: test, validation, train, or longer (sizes never trained on).")
    ] = "test",
    form: Annotated[str, typer.Option(help="Prompt form; `kvasir lab tasks` lists them.")] = "solve",
    samples: Annotated[int, typer.Option(min=1, help="Replies per problem, for pass@k and majority@k.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature; 0 is greedy; default: greedy for one reply, else 0.8."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per reply; default: twice the longest solution, plus 32.")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="With --form (one or several): give it the model's own candidates.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="Engine switches of a second configuration to compare with, in quotes.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.")] = None,
    **options: Any,
) -> None:
    """Measure answer quality on the lab's tasks.

    Reports exact match, tokens and perplexity of one configuration, or compares two.
    """
    from kvasir_lab.evaluation import command as command
    from kvasir_lab.evaluation.evaluator import Plan

    check_output(output, make=True)
    check_output(plot, make=True)
    names = command.split_tasks(tasks)
    plan = Plan(names, count, seed, split, form, samples, temperature, max_tokens, own)  # type: ignore[arg-type]
    command.run(
        build_settings({"model": model, **options}, EngineConfig), plan, against=against, output=output, plot=plot
    )
