"""``kvasir solve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Replicas,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


@command(70)
@with_settings(EngineConfig, skip=("model", "seed", "tokenizer", "revision", "journal"))
def solve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[report FILES...]",
            show_default=False,
            help="report FILES: write a page with plots from earlier results.",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="Strategy (`kvasir doctor` lists them), e.g. majority:n=8; repeatable, to compare several.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Model, or URL#NAME of a server, with replicas joined by commas; repeatable, cheapest first.",
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Task with its dials, e.g. countdown or chain:max_steps=8.")] = "countdown",
    count: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of problems.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and sampling.")] = 7,
    split: Annotated[
        str, typer.Option(help="Split of the task: test, validation, train, or longer (sizes never trained on).")
    ] = "test",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per reply; default: from the task's longest solution.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of all replies except verdicts.")
    ] = 1.0,
    price: Annotated[
        list[str] | None,
        typer.Option(help="Price as MODEL=PROMPT/CACHED/GENERATED, in dollars per million tokens; repeatable."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Budget of a strategy's whole run: tokens=,generated=,dollars=,calls=.")
    ] = None,
    problem_budget: Annotated[str | None, typer.Option(help="Budget of each problem, in the same units.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="File that keeps every call; after a kill the same command continues.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Problems solved at the same time.")] = 16,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no further strategy after this many minutes.")
    ] = None,
    pool: Annotated[
        int, typer.Option(min=0, help="Draw this many replies per problem once, and share them among all strategies.")
    ] = 0,
    resamples: Annotated[
        int, typer.Option(min=1, help="With --pool: number of random orders in which the replies are dealt out.")
    ] = 4,
    pool_file: Annotated[
        Path | None, typer.Option(help="With --pool: prefix of the files that keep the replies for later runs.")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate",
            help="Measure what each feature of the engine is worth: one removed at a time, and all over HTTP.",
        ),
    ] = False,
    page: Annotated[
        Path, typer.Option(help="With report: the Markdown file to write; its pictures go to the same folder.")
    ] = Path("solve-report.md"),
    together: Annotated[
        bool, typer.Option("--together", help="With report: put all files into one table and pool their seeds.")
    ] = False,
    data_parallel_size: Replicas = 1,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    **options: Any,
) -> None:
    """Solve problems with test-time scaling strategies.

    A strategy spends more inference on each problem; the result compares accuracy and cost.
    """
    from kvasir_lab.solving import run as command
    from kvasir_lab.solving.job import Job, parse_amounts, parse_prices

    check_output(output, make=True)
    if words:
        if words[0] != "report":
            raise ConfigError(
                f"kvasir solve {words[0]}: the only subcommand is 'report FILES'. Give a task as --task {words[0]}"
            )
        from kvasir_lab.solving import report as solve_report

        check_output(page, make=True)
        solve_report.run([Path(word) for word in words[1:]], page, together)
        return
    job = Job(
        tuple(strategies or ()),
        tuple(models or ("",)),
        task,
        count,
        seed,
        split,
        max_tokens,
        temperature,  # type: ignore[arg-type]
        parse_prices(price or ()),
        parse_amounts(budget, "--budget"),
        parse_amounts(problem_budget, "--problem-budget"),
        journal,
        at_once,
        minutes,
        pool,
        resamples,
        pool_file,
        data_parallel_size,
    )
    if ablate and (pool or journal):
        raise ConfigError("--ablate measures running engines, which --pool and --journal bypass: leave them out")
    command.run(build_settings(options, EngineConfig), job, output, ablate)
