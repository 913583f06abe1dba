"""``kvasir solve --pool N``: strategies that only choose or stop samples, on N replies a problem that were drawn
once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.pool import Pool, PoolEndpoint, fill, ranked_right
from kvasir.scaling.primitives import EndpointDown
from kvasir.scaling.problem import Problem
from kvasir.scaling.report import figures
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import Strategy
from kvasir_lab.evaluation.statistics import difference_interval, mean_interval, pass_at_k
from kvasir_lab.solving.job import Job, checker, compared, started

if TYPE_CHECKING:
    from kvasir_lab.task import Problem as LabProblem
    from kvasir_lab.task import Task

SIGNALS = ("confidence", "lowest", "logprob", "short")


def run(
    job: Job,
    strategies: dict[str, Strategy],
    task: Task,
    drawn: Sequence[LabProblem],
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    sampling: Sampling,
) -> dict[str, Any]:
    """Run every strategy ``job.resamples`` times over the pools. Shares and costs are means over these runs, intervals
    are over problems."""
    pools = asyncio.run(_pools(job, problems, endpoints, sampling))
    check = checker(task, drawn)
    replies = {
        p.model: [[check(i, s.text) for s in p.of(problem)] for i, problem in enumerate(problems)] for p in pools
    }
    arms, shares = [], {}
    for spec, strategy in strategies.items():
        strategy.check([PoolEndpoint(p, 0) for p in pools], problems[0].prompts)
        metrics, shares[spec] = asyncio.run(_resampled(job, strategy, check, problems, pools, sampling))
        arms.append((spec, metrics))
        log.info("%s: %.1f %% right", spec, 100 * metrics["exact"])
    outcome = compared(job, arms, sampling, endpoints)
    (first, base), *others = shares.items()
    outcome["differences"] = [
        {
            "first": first,
            "second": name,
            "difference": _mean(change := [b - a for a, b in zip(base, other)]),
            "interval": list(difference_interval(change)),
        }
        for name, other in others
    ]
    outcome["pool"] = {p.model: _told(p, problems, replies[p.model]) for p in pools}
    return outcome


async def _pools(
    job: Job, problems: Sequence[Problem], endpoints: Sequence[Endpoint], sampling: Sampling
) -> list[Pool]:
    """Load each model's pool from its file, or draw it."""
    about = {
        "task": job.task,
        "n": job.count,
        "seed": job.seed,
        "split": job.split,
        "pool": job.pool,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    found = []
    for endpoint in endpoints:
        file = job.pool_file and job.pool_file.with_name(f"{job.pool_file.name}.{endpoint.name}.jsonl.gz")
        if file and file.exists():
            found.append(Pool.load(file, about, endpoint.price))
            continue
        try:
            async with started([endpoint]):
                found.append(await fill(endpoint, problems, job.pool, sampling, job.seed, job.at_once))
        except EndpointDown as e:
            raise ConfigError(f"the run ended: {e}") from e
        if file:
            found[-1].save(file, about)
    return found


async def _resampled(
    job: Job,
    strategy: Strategy,
    check: Callable[[int, str], bool],
    problems: Sequence[Problem],
    pools: Sequence[Pool],
    sampling: Sampling,
) -> tuple[dict[str, Any], list[float]]:
    """Run one strategy; return its metrics and, for each problem, the share of runs that solved it."""
    marks, told = [], []
    for seed in range(job.resamples):
        solution = await solve(
            strategy,
            problems,
            [PoolEndpoint(p, seed) for p in pools],
            seed=seed,
            sampling=sampling,
            at_once=1,
            problem_budget=job.problem_budget,
        )
        marks.append([check(i, s.result.text) for i, s in enumerate(solution.solved)])
        told.append(figures(solution, marks[-1]))
    shares = [_mean(column) for column in zip(*marks)]
    metrics = {
        name: _mean([t[name] for t in told])
        for name in told[0]
        if isinstance(told[0][name], (int, float)) and name != "seconds"
    }
    metrics |= {
        "per_problem": {
            name: _mean([t["per_problem"][name] for t in told]) for name in told[0]["per_problem"] if name != "seconds"
        },
        "by_model": {
            model: {unit: _mean([t["by_model"].get(model, {}).get(unit, 0) for t in told]) for unit in sums}
            for model, sums in told[0]["by_model"].items()
        },
        "interval": list(mean_interval(shares)),
        "resamples": job.resamples,
    }
    return metrics, shares


def _told(pool: Pool, problems: Sequence[Problem], right: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Facts about a pool: its replies, pass@k, and how well each signal ranks right replies above wrong ones."""
    counted = [(sum(marks), len(marks)) for marks in right if marks]
    sizes = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= min(total for _, total in counted)]
    by_mark: dict[bool, list[int]] = {True: [], False: []}
    for problem, marks in zip(problems, right):
        for sample, mark in zip(pool.of(problem), marks):
            by_mark[mark].append(sample.tokens)
    return {
        "replies": sum(total for _, total in counted),
        "pass_at": {str(k): _mean([pass_at_k(r, n, k) for r, n in counted]) for k in sizes},
        "auc": {s: auc for s in SIGNALS if (auc := ranked_right(pool, problems, right, s)) is not None},
        "tokens": {"right": _mean(by_mark[True]), "wrong": _mean(by_mark[False])},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
