"""Fit a table for ``compute_optimal`` on a task: run the strategies, predict difficulties, and judge held-out folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvasir.scaling.difficulty import predicted
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.policy_table import BINS, Outcomes, PolicyTable, cross_fitted, fit
from kvasir.scaling.primitives import Context, Run
from kvasir.scaling.problem import Problem
from kvasir.scaling.report import costs
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.evaluation.statistics import bootstrap

PRM = "{prm}"  # Stands for the reward model in a table's specs.
USUAL = (  # Strategies to choose from, where none are given.
    "majority:n=4",
    "majority:n=16",
    "best_of_n:n=8,by=prm,weighted=true,prm={prm}",
    "beam:N=8,width=4,prm={prm}",
    "particle:N=8,prm={prm}",
    "revisions:chains=4,revisions=3,prm={prm}",
)


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


async def difficulties(
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    prm: str,
    pilot: int,
    sampling: Sampling,
    seed: int,
    currency: str = "flops",
) -> tuple[list[float], list[float]]:
    """The predicted score of each problem, and what the prediction cost."""
    run = Run(endpoints, seed, "difficulty", sampling)
    whole = Context(run, "difficulty")

    async def one(_: Context, problem: Problem) -> tuple[float, float]:
        context = Context(run, problem.id)
        score = await predicted(context, problem, context.endpoint(prm), context.endpoint(), pilot)
        return score, costs(context.ledger.total())[currency]

    scores, cost = zip(*await whole.map("problem", one, problems))
    return list(scores), list(cost)


async def outcomes(
    specs: Sequence[str],
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    check: Callable[[int, str], bool],
    prm: str,
    sampling: Sampling,
    seeds: Sequence[int],
    currency: str = "flops",
    say: Callable[[str], None] = print,
    at_once: int = 64,
) -> dict[str, Outcomes]:
    """Run each strategy. Returns shares of right results over the seeds and mean costs, by problem."""
    found = {}
    for spec in specs:
        right, cost = [0.0] * len(problems), [0.0] * len(problems)
        for seed in seeds:
            for endpoint in endpoints:
                endpoint.forget()
            strategy = load_strategy(spec.replace(PRM, prm))
            done = await solve(strategy, problems, endpoints, seed=seed, name=spec, sampling=sampling, at_once=at_once)
            for i, solved in enumerate(done.solved):
                right[i] += check(i, solved.result.text) / len(seeds)
                cost[i] += costs(solved.ledger.total())[currency] / len(seeds)
        found[spec] = Outcomes(right, cost)
        say(f"  {spec}: {mean(right):.1%} right, {mean(cost):.3g} {currency} a problem")
    return found


def judged(
    scores: Sequence[float],
    spent: Sequence[float],
    found: dict[str, Outcomes],
    budgets: Sequence[float],
    bins: int = BINS,
) -> list[dict[str, Any]]:
    """Compare the table with the best single strategy for each budget, on folds that neither was fitted on.

    ``spent``: what predicting cost; it is added to the table's cost, which may then be above the budget, since table
    and single strategy choose from the same ones. ``oracle``: the same with problems split by how often all strategies
    solve them, which no prediction can know.
    """
    rows = []
    easy = [mean([o.right[i] for o in found.values()]) for i in range(len(scores))]
    for budget in budgets:
        told, oracle = cross_fitted(scores, found, budget, bins=bins), cross_fitted(easy, found, budget, bins=bins)
        change = [a - b for a, b in zip(told.table.right, told.single.right)]
        rows.append(
            {
                "budget": budget,
                "table": mean(told.table.right),
                "single": mean(told.single.right),
                "oracle": mean(oracle.table.right),
                "difference": mean(change),
                "interval": list(bootstrap(change)),
                "table_cost": mean(told.table.cost) + mean(spent),
                "single_cost": mean(told.single.cost),
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of `judged` for readers."""
    low, high = (100 * x for x in row["interval"])
    table, single = (row[f"{name}_cost"] / 1e9 for name in ("table", "single"))
    return (
        f"{row['budget'] / 1e9:.3g} GFLOP: table {row['table']:.1%} at {table:.3g}, best single {row['single']:.1%} at "
        f"{single:.3g} ({100 * row['difference']:+.1f} points, {low:+.1f} to {high:+.1f}), "
        f"oracle bins {row['oracle']:.1%}"
    )


def table(
    scores: Sequence[float],
    found: dict[str, Outcomes],
    budgets: Sequence[float],
    bins: int,
    pilot: int,
    currency: str,
    **about: Any,
) -> PolicyTable:
    """The table fitted on all problems, to be used on others."""
    return fit(scores, found, budgets, bins=bins, pilot=pilot, currency=currency, about=about)
