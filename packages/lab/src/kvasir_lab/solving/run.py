"""``kvasir solve``: solve the lab's problems with strategies of test-time scaling, and compare accuracy and cost."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.journal import Journal
from kvasir.scaling.primitives import EndpointDown
from kvasir.scaling.problem import Problem
from kvasir.scaling.report import Tally, figures, loops
from kvasir.scaling.solve import Solution, solve
from kvasir.scaling.strategy import Strategy, load_strategy
from kvasir_lab import forms
from kvasir_lab.evaluation.statistics import bootstrap, mcnemar, wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.solving import ablation as solve_ablation
from kvasir_lab.solving import pool as solve_pool
from kvasir_lab.solving.job import Job, build_endpoints, checker, compared, lab_problems, missing_rewards, started
from kvasir_lab.task import Task

if TYPE_CHECKING:
    from kvasir_lab.task import Problem as LabProblem

# Most tokens of a reply, as a multiple of the longest correct solution; 32 tokens come on top.
ROOM = 1.5


def run(config: EngineConfig, job: Job, output: Path | None, ablate: bool = False) -> None:
    """Run the job, print its result and write it to ``output``. Raises ConfigError.

    ``ablate``: compare the features of the engine and not the strategies (`solve_ablation`).
    """
    if not job.strategies:
        raise ConfigError("give --strategy NAME:KEY=VALUE, e.g. majority:n=8; repeat it to compare several")
    strategies = {spec: load_strategy(spec) for spec in job.strategies}
    task = load_task(job.task)
    if task.scored != "answer":
        raise ConfigError(
            f"task '{job.task}' is scored by {task.scored}; strategies need answers that are right or wrong"
        )
    drawn = task.problems(job.split, job.seed, job.count)
    problems = lab_problems(task, drawn)
    job = dataclasses.replace(job, rewards=missing_rewards(job, strategies.values()))
    endpoints = build_endpoints(job, config)
    if job.pool and not all(e.caps.writes for e in endpoints):
        raise ConfigError(
            "a pool holds replies, which neither a reward model nor a judge reads: leave out --pool, or prm= and judge="
        )
    for strategy in strategies.values():
        strategy.check(endpoints, problems[0].prompts)
    sampling = Sampling(job.max_tokens or _room(endpoints, task, drawn), job.temperature)
    if job.pool:
        outcome = solve_pool.run(job, strategies, task, drawn, problems, endpoints, sampling)
        _write(outcome, output)
        show(outcome)
        return
    if ablate:
        show(
            solve_ablation.run(
                config, job, strategies, task, drawn, problems, sampling, lambda outcome: _write(outcome, output)
            )
        )
        return
    found: dict[str, Solution] = {}

    def keep(spec: str, solution: Solution) -> None:
        """Write the result after each strategy, so that an interrupted run keeps the finished ones."""
        found[spec] = solution
        _write(_outcome(job, task, drawn, found, sampling, endpoints), output)

    try:
        asyncio.run(_solve(job, strategies, problems, endpoints, sampling, keep))
    finally:  # after a fault or an interrupt, too: show the finished strategies
        if found:
            show(_outcome(job, task, drawn, found, sampling, endpoints))


def _write(outcome: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        from kvasir.bench.result import write_json

        write_json(output, outcome)


def _outcome(
    job: Job,
    task: Task,
    drawn: Sequence[LabProblem],
    found: dict[str, Solution],
    sampling: Sampling,
    endpoints: Sequence[Endpoint],
) -> dict[str, Any]:
    """The result of the finished strategies."""
    check = checker(task, drawn)
    right = {spec: [check(i, s.result.text) for i, s in enumerate(solution.solved)] for spec, solution in found.items()}
    arms = []
    for spec, solution in found.items():
        metrics = figures(solution, right[spec]) | {"interval": list(wilson(sum(right[spec]), len(drawn)))}
        by_loop = loops(solution, check, lambda text: task.answer(forms.solution(text)))
        arms.append((spec, metrics | ({"loops": by_loop} if by_loop else {})))
    outcome = compared(job, arms, sampling, endpoints)
    outcome["differences"] = _differences(right)
    # For paired tests across files: one digit per problem.
    outcome["right"] = {spec: "".join(map(str, map(int, marks))) for spec, marks in right.items()}
    left = [spec for spec in job.strategies if spec not in found]
    return outcome | ({"left_out": left} if left else {})


def _room(endpoints: Sequence[Endpoint], task: Task, drawn: Sequence[LabProblem]) -> int:
    """Most tokens of a reply, from the longest solution. For a task with candidates, that solution also checks as many
    of them as the model was trained on."""
    tokenizer = next((e.tokenizer for e in endpoints if hasattr(e, "tokenizer")), None)
    if tokenizer is None:
        return 512
    asked = (
        [forms.FormTask("aggregate", task).case(p, [p.solution] * forms.DRAWN) for p in drawn]
        if task.candidates
        else drawn
    )
    return int(ROOM * max(len(tokenizer.encode(p.solution, add_special=False)) for p in asked)) + 32


async def _solve(
    job: Job,
    strategies: dict[str, Strategy],
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    sampling: Sampling,
    keep: Callable[[str, Solution], None],
) -> None:
    plan = {
        "task": job.task,
        "n": job.count,
        "seed": job.seed,
        "split": job.split,
        "models": [e.name for e in endpoints],
        "sampling": repr(sampling),
        "budget": repr(job.budget),
        "problem_budget": repr(job.problem_budget),
    }
    journal = Journal(job.journal, plan)
    try:
        async with started(endpoints):
            begin = time.monotonic()
            for i, (spec, strategy) in enumerate(strategies.items()):
                if i and job.minutes is not None and time.monotonic() - begin > 60 * job.minutes:
                    log.warning("%s is left out: the %g minutes are over", spec, job.minutes)
                    continue
                for endpoint in endpoints:
                    endpoint.forget()  # otherwise prompts cached by an earlier arm would make a later one look cheaper
                with _progress(spec, len(problems)) as on_event:
                    done = await solve(
                        strategy,
                        problems,
                        endpoints,
                        seed=job.seed,
                        name=spec,
                        sampling=sampling,
                        budget=job.budget,
                        problem_budget=job.problem_budget,
                        journal=journal,
                        on_event=on_event,
                        at_once=job.at_once,
                        measure=True,
                    )
                keep(spec, done)
    except EndpointDown as e:
        resume = (
            f" Finished calls are in {job.journal.name}; the same command continues from there." if job.journal else ""
        )
        raise ConfigError(f"the run ended: {e}.{resume}") from e
    finally:
        journal.close()


@contextmanager
def _progress(spec: str, count: int):
    """Show a bar on a terminal, elsewhere one line at the end; yields the function that takes events."""
    tally = Tally()
    if not sys.stderr.isatty():
        yield tally.add
        log.info("%s: %d problems, %s", spec, tally.done, tally)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    ) as bar:
        line = bar.add_task(spec, total=count, note="")

        def take(event: dict[str, Any]) -> None:
            tally.add(event)
            bar.update(line, completed=tally.done, note=str(tally))

        yield take


def _differences(right: dict[str, list[bool]]) -> list[dict[str, Any]]:
    """Differences between every later arm and the first, on the same problems."""
    (first, base), *others = right.items()
    found = []
    for name, marks in others:
        change = [int(b) - int(a) for a, b in zip(base, marks)]
        low, high = bootstrap(change)
        found.append(
            {
                "first": first,
                "second": name,
                "difference": sum(change) / len(change),
                "interval": [low, high],
                "mcnemar_p": mcnemar(change.count(-1), change.count(1)),
            }
        )
    return found


def show(outcome: dict[str, Any]) -> None:
    """Print a result as a table."""
    from rich.console import Console
    from rich.table import Table

    from kvasir.bench.result import WIDTH

    table = Table(
        "strategy",
        "exact %",
        "95 %",
        "output",
        "wasted %",
        "all tokens",
        "GFLOP",
        "$",
        "s",
        "by model",
        title="per problem",
    )
    best = {
        p["arm"] for p in outcome["frontier"].get("flops", outcome["frontier"]["output_tokens"]) if p["on_frontier"]
    }
    for entry in outcome["arms"]:
        m, each = entry["metrics"], entry["metrics"]["per_problem"]
        low, high = m["interval"]
        shares = ", ".join(
            f"{name} {sums['output_tokens'] / max(1, m['output_tokens']):.0%}" for name, sums in m["by_model"].items()
        )
        table.add_row(
            ("* " if entry["name"] in best else "  ") + entry["name"],
            f"{100 * m['exact']:.1f}",
            f"{100 * low:.1f}-{100 * high:.1f}",
            f"{each['output_tokens']:,.0f}",
            f"{100 * m['wasted']:.0f}",
            f"{each['tokens']:,.0f}",
            f"{each['flops'] / 1e9:,.2f}",
            f"{each['dollars']:.2g}",
            f"{each['seconds']:.2f}" if "seconds" in each else "",
            shares,
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print("*: on the frontier of accuracy against operations")
