"""Run a strategy on many problems at once, with one ledger for all, a journal and events.

A problem that meets its budget ends with the best result it has. An endpoint that is down ends the run; finished calls
are in the journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.journal import Journal
from kvasir.scaling.ledger import Budget, BudgetExceeded, Ledger
from kvasir.scaling.primitives import Context, Event, Run
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy

MAX_PROBLEMS = 64  # Problems at once: enough to fill a batch, few enough that their prompts stay in the prefix cache.


@dataclass(frozen=True)
class Solved:
    """One problem's result and cost. ``seconds``: from its start to its end, while other problems run as well."""

    problem: Problem
    result: Result
    ledger: Ledger
    seconds: float


@dataclass(frozen=True)
class Solution:
    """All problems of one strategy.

    ``ledger``: of the whole run, failed calls included. ``seconds``: of the whole run; None when a journal replayed a
    part, which takes no time. ``busy``: seconds that each model's device worked, when ``measure`` was set and all
    endpoints know it. It is meaningful for engines that nobody else uses meanwhile.
    """

    solved: list[Solved]
    ledger: Ledger
    seconds: float | None
    busy: dict[str, float] | None = None


async def solve(
    strategy: Strategy,
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    *,
    seed: int = 0,
    name: str = "",
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    problem_budget: Budget | None = None,
    journal: Journal | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    at_once: int = MAX_PROBLEMS,
    retries: int = 4,
    pause: float = 0.5,
    measure: bool = False,
) -> Solution:
    """Run ``strategy`` on every problem.

    ``endpoints``: started, cheapest first. ``budget``: of the run; ``problem_budget``: of each problem. ``measure``:
    ask the endpoints how long they worked, which waits for heartbeats. Raises ConfigError before the first call for
    anything that cannot work, and EndpointDown when an endpoint keeps failing.
    """
    _check_ids(problems)
    for problem in problems[:1]:
        strategy.check(endpoints, problem.prompts)
    opened = isinstance(journal, Path)
    book = (
        Journal(journal, plan(strategy, problems, endpoints, seed, name, budget, problem_budget)) if opened else journal
    )
    book = Journal() if book is None else book
    run = Run(endpoints, seed, name, sampling or Sampling(), book, Ledger(budget), on_event, retries, pause)
    for charge in book.lost:  # this strategy's calls in earlier runs
        if charge.key.startswith(f"{name}:"):
            run.ledger.commit(charge)
    before = [await e.busy_seconds() for e in endpoints] if measure else []
    slots, begin = asyncio.Semaphore(at_once), time.perf_counter()
    try:
        solved = await _together([_one(strategy, problem, run, problem_budget, slots) for problem in problems])
    finally:
        if opened:
            book.close()
    seconds = None if run.replayed else time.perf_counter() - begin
    after = [await e.busy_seconds() for e in endpoints] if measure and seconds is not None else []
    told = bool(after) and None not in before + after
    return Solution(
        solved, run.ledger, seconds, {e.name: b - a for e, a, b in zip(endpoints, before, after)} if told else None
    )


def _check_ids(problems: Sequence[Problem]) -> None:
    """Raise ConfigError for bad or repeated ids.

    Keys of calls, and the seeds, begin with the id: two problems with the same id would share replies.
    """
    seen: set[str] = set()
    for problem in problems:
        if not problem.id or set(problem.id) & set("/#?"):
            raise ConfigError(f"a problem's id is some text without /, # and ?, not {problem.id!r}")
        if problem.id in seen:
            raise ConfigError(f"two problems have the id {problem.id!r}")
        seen.add(problem.id)


async def _together(jobs: Sequence[Any]) -> list[Any]:
    """Run all jobs.

    When one raises, the others are cancelled and waited for, so that the journal has what they did.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(
    strategy: Strategy, problem: Problem, run: Run, budget: Budget | None, slots: asyncio.Semaphore
) -> Solved:
    async with slots:
        begin = time.perf_counter()
        context = Context(run, problem.id, budget=budget)
        context.emit("begin")
        try:
            found = await strategy.run(context, problem)
        except BudgetExceeded as e:
            found = context.kept or Result()
            found.why = f"budget: {e}"
        except Exception as e:
            e.add_note(f"strategy '{strategy.name}', problem {problem.id}")
            raise
        seconds = time.perf_counter() - begin
        context.emit(
            "end",
            answer=found.answer,
            agreement=found.agreement,
            why=found.why,
            **{k: v for k, v in context.ledger.total().items() if k != "seconds"},
        )
        return Solved(problem, found, context.ledger, seconds)


def plan(
    strategy: Strategy,
    problems: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    seed: int,
    name: str,
    *budgets: Budget | None,
) -> dict[str, Any]:
    """The identity of a run: a journal is resumed under the same plan only. Prompts are checked call by call."""
    return {
        "strategy": strategy.name,
        "config": repr(strategy.config),
        "name": name,
        "seed": seed,
        "problems": len(problems),
        "models": [e.name for e in endpoints],
        "budgets": [repr(b) for b in budgets],
    }
