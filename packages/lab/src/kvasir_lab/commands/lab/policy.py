"""``kvasir lab policy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


@command(20)
def policy(
    prm: Annotated[str, typer.Option(help="Folder of the reward model ('kvasir train prm').")],
    out: Annotated[Path, typer.Option(help="File to write the table to.")],
    model: Annotated[str, typer.Option(help="Model that solves: a name or a folder.")] = "base",
    task: Annotated[str, typer.Option(help="Task with dials: countdown:min_numbers=4.")] = "countdown",
    strategy: Annotated[
        list[str] | None, typer.Option(help="A strategy to choose from, with {prm} for the reward model; repeat it.")
    ] = None,
    budget: Annotated[
        list[float] | None, typer.Option(help="GFLOP a problem; repeat it. Default: the strategies' own mean costs.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=10, help="Problems to fit on, of the validation split.")] = 300,
    bins: Annotated[int, typer.Option(min=1, max=20, help="Bins of difficulty.")] = 5,
    pilot: Annotated[int, typer.Option(min=0, help="Pilot replies that predict it; 0 reads the prompt alone.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every strategy.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU when there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and replies.")] = 0,
) -> None:
    """Fit a table of strategies by difficulty and budget, and compare it with the best single strategy.

    Both are judged on problems that they were not fitted on.
    """
    import asyncio

    from kvasir.scaling.endpoint import Sampling
    from kvasir.scaling.strategy import load_strategy
    from kvasir_lab import policy as lab
    from kvasir_lab.lookup import load_task
    from kvasir_lab.solving.job import Job, build_endpoints, checker, lab_problems, started

    check_output(out, make=True)
    specs = tuple(strategy or lab.USUAL)
    loaded = [load_strategy(spec.replace(lab.PRM, prm)) for spec in specs]  # refuses an unknown name first
    inner = load_task(task)
    if inner.scored != "answer":
        raise ConfigError(f"task '{task}' is scored by {inner.scored}; strategies need answers that are right or wrong")
    drawn = inner.problems("validation", seed, n)
    problems, check = lab_problems(inner, drawn), checker(inner, drawn)
    job = Job(specs, (model,), task, rewards=(prm,))
    endpoints = build_endpoints(job, EngineConfig.of(**({"device": device} if device else {})))
    for one in loaded:
        one.check(endpoints, problems[0].prompts)
    sampling = Sampling(512)

    async def measure() -> tuple[list[float], list[float], dict]:
        async with started(endpoints):
            scores, spent = await lab.difficulties(problems, endpoints, prm, pilot, sampling, seed)
            found = await lab.outcomes(
                specs, problems, endpoints, check, prm, sampling, range(seed, seed + seeds), say=typer.echo
            )
        return scores, spent, found

    scores, spent, found = asyncio.run(measure())
    budgets = [b * 1e9 for b in budget] if budget else sorted({lab.mean(o.cost) for o in found.values()})
    for row in lab.judged(scores, spent, found, budgets, bins):
        typer.echo(f"  {lab.line(row)}")
    made = lab.table(scores, found, budgets, bins, pilot, "flops", task=task, problems=n, seed=seed)
    made.save(out)
    typer.echo(f"{out}: use compute_optimal:table={out},prm={prm}")
