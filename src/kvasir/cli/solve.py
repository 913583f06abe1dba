"""``kvasir solve``: the lab's problems by strategies of test-time scaling, with one model or several, and what each answer cost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.lab import forms
from kvasir.lab.statistics import bootstrap, mcnemar, wilson
from kvasir.lab.task import Split, Task, load_task
from kvasir.logs import log
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.journal import Journal
from kvasir.scaling.ledger import Budget, Price
from kvasir.scaling.primitives import EndpointDown, opened
from kvasir.scaling.problem import Problem, Prompts
from kvasir.scaling.report import CURRENCIES, Tally, figures, frontier, loops
from kvasir.scaling.solve import Solution, solve
from kvasir.scaling.strategy import Strategy, load_strategy

if TYPE_CHECKING:
    from kvasir.lab.task import Problem as LabProblem

ROOM = 1.5  # a reply may be so many times as long as the longest right one, and a little


@dataclass(frozen=True)
class Job:
    """What to solve. ``models``: names, folders, hub ids, or ``URL#NAME`` of a server (of replicas, joined by commas); cheapest first.
    ``prices``: by model. ``minutes``: after so many no further strategy is begun. ``pool``: draw so many replies a problem once, and deal
    them out to every strategy, ``resamples`` times in another order; ``pool_file`` keeps them."""

    strategies: tuple[str, ...]
    models: tuple[str, ...]
    task: str
    count: int = 100
    seed: int = 7
    split: Split = "test"
    max_tokens: int | None = None
    temperature: float = 1.0
    prices: dict[str, Price] = dataclasses.field(default_factory=dict)
    budget: Budget | None = None
    problem_budget: Budget | None = None
    journal: Path | None = None
    at_once: int = 16
    minutes: float | None = None
    pool: int = 0
    resamples: int = 4
    pool_file: Path | None = None

    def __post_init__(self) -> None:
        for name, values in (("strategy", self.strategies), ("model", self.models)):
            if len(set(values)) < len(values):
                raise ConfigError(f"--{name}: give each once")


class LabPrompts(Prompts):
    """The prompt forms that the lab's models were trained on."""

    most = forms.FORMS["aggregate"].most
    scale = 9

    def aggregate(self, problem, candidates):
        return forms.render("aggregate", problem, candidates)

    def refine(self, problem, candidate):
        return forms.render("refine", problem, [candidate])

    def judge_pair(self, problem, first, second):
        return forms.render("judge_pair", problem, [first, second])

    def ratings(self, reply):
        return forms.ratings(reply)

    def judge_one(self, problem, candidate):
        return forms.render("judge_one", problem, [candidate])

    def verdict(self, reply):
        return {"Yes": True, "No": False}.get(forms.verdict(reply))

    def self_evaluate(self, problem, reply):
        return forms.render("self_evaluate", problem, [reply])


def lab_problems(task: Task, drawn: Sequence[LabProblem]) -> list[Problem]:
    """The lab's problems as strategies see them: without their answers. Of a reply with a check, the solution below it is what counts."""
    if any(p.tools for p in drawn):
        raise ConfigError(f"task '{task.name}' calls tools, which no strategy does")
    prompts = LabPrompts() if task.candidates else Prompts()
    return [Problem(f"p{i}", p.messages, lambda text: task.answer(forms.solution(text)), prompts) for i, p in enumerate(drawn)]


def parse_amounts(text: str | None, option: str) -> Budget | None:
    """``tokens=10000,dollars=0.5`` as a budget. Raises ConfigError."""
    if not text:
        return None
    kinds = {f.name: float if f.name == "dollars" else int for f in dataclasses.fields(Budget)}
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ConfigError(f"{option} {text}: '{name}' is none of {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError as e:
            raise ConfigError(f"{option} {text}: {name} must be a number") from e
    return Budget(**found)


def parse_prices(texts: Sequence[str]) -> dict[str, Price]:
    """``nano=0.1/0.02/0.4``: dollars per million prompt tokens, cached ones, and generated ones. Raises ConfigError."""
    found = {}
    for text in texts:
        name, _, amounts = text.rpartition("=")
        try:
            prompt, cached, generated = map(float, amounts.split("/"))
        except ValueError as e:
            raise ConfigError(f"--price {text}: expected MODEL=PROMPT/CACHED/GENERATED in dollars per million tokens") from e
        if not name or not all(0 <= value < float("inf") for value in (prompt, cached, generated)):
            raise ConfigError(f"--price {text}: expected a model, and amounts of at least 0")
        found[name] = Price(prompt, cached, generated)
    return found


def build_endpoints(job: Job, config: EngineConfig, without: Sequence[str] = ()) -> list[Endpoint]:
    """One for every model; engines on one GPU share its memory evenly. ``without``: features to do without. Raises ConfigError."""
    from kvasir.scaling.engine_endpoint import EngineEndpoint
    from kvasir.scaling.http_endpoint import HTTPEndpoint
    from kvasir.scaling.replicas import ReplicaEndpoint

    def name_of(model: str) -> str:
        return model.partition(",")[0].rpartition("#")[2] if "://" in model else model.rstrip("/").rsplit("/", 1)[-1] or "embedded"

    names = [name_of(m) for m in job.models]
    unknown = set(job.prices) - set(names)
    if unknown or len(set(names)) < len(names):
        raise ConfigError(f"--price of {', '.join(sorted(unknown))}: the models are {', '.join(names)}" if unknown else
                          f"two models are named alike: {', '.join(names)}")
    local = [m for m in job.models if "://" not in m]
    found: list[Endpoint] = []
    for model, name in zip(job.models, names):
        price = job.prices.get(name, Price())
        if "://" in model:
            key = os.environ.get("KVASIR_API_KEY", "")
            replicas = [HTTPEndpoint(*address.partition("#")[::2], price=price, api_key=key) for address in model.split(",")]
            found.append(ReplicaEndpoint(replicas) if len(replicas) > 1 else replicas[0])
        else:
            # Each takes its share of what is free when it starts.
            share = config.cache.gpu_memory_utilization / (len(local) - local.index(model))
            found.append(EngineEndpoint(config.replace(model=model, gpu_memory_utilization=share), name, price=price, without=without))
    return found


def run(config: EngineConfig, job: Job, output: Path | None, ablate: bool = False) -> None:
    """``ablate``: not the strategies are compared, but the engine's features under them (`solve_ablation`). Raises ConfigError."""
    if not job.strategies:
        raise ConfigError("give --strategy NAME:KEY=VALUE, such as majority:n=8; several are compared")
    strategies = {spec: load_strategy(spec) for spec in job.strategies}
    task = load_task(job.task)
    if task.scored != "answer":
        raise ConfigError(f"task '{job.task}' is scored by {task.scored}; strategies need answers that are right or wrong")
    drawn = task.problems(job.split, job.seed, job.count)
    problems = lab_problems(task, drawn)
    endpoints = build_endpoints(job, config)
    for strategy in strategies.values():
        strategy.check(endpoints, problems[0].prompts)
    sampling = Sampling(job.max_tokens or _room(endpoints, task, drawn), job.temperature)
    if job.pool:
        from kvasir.cli import solve_pool

        outcome = solve_pool.run(job, strategies, task, drawn, problems, endpoints, sampling)
        _write(outcome, output)
        show(outcome)
        return
    if ablate:
        from kvasir.cli import solve_ablation

        show(solve_ablation.run(config, job, strategies, task, drawn, problems, sampling, lambda outcome: _write(outcome, output)))
        return
    found: dict[str, Solution] = {}

    def keep(spec: str, solution: Solution) -> None:
        """One more strategy is through: a run that is cut off later has written what it knows."""
        found[spec] = solution
        _write(_outcome(job, task, drawn, found, sampling, endpoints), output)

    asyncio.run(_solve(job, strategies, problems, endpoints, sampling, keep))
    show(_outcome(job, task, drawn, found, sampling, endpoints))


def _write(outcome: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        from kvasir.bench.result import as_json

        output.write_text(as_json(outcome))


def checker(task: Task, drawn: Sequence[LabProblem]) -> Callable[[int, str], bool]:
    """Whether a reply solves problem i: of a recombination, what stands behind its check of the candidates."""
    return lambda i, text: task.check(drawn[i], forms.solution(text))


def _outcome(job: Job, task: Task, drawn: Sequence[LabProblem], found: dict[str, Solution], sampling: Sampling,
             endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The result of the strategies that are through."""
    check = checker(task, drawn)
    right = {spec: [check(i, s.result.text) for i, s in enumerate(solution.solved)] for spec, solution in found.items()}
    arms = []
    for spec, solution in found.items():
        metrics = figures(solution, right[spec]) | {"interval": list(wilson(sum(right[spec]), len(drawn)))}
        by_loop = loops(solution, check, lambda text: task.answer(forms.solution(text)))
        arms.append((spec, metrics | ({"loops": by_loop} if by_loop else {})))
    outcome = compared(job, arms, sampling, endpoints)
    outcome["differences"] = _differences(right)
    outcome["right"] = {spec: "".join(map(str, map(int, marks))) for spec, marks in right.items()}  # for paired tests across files
    left = [spec for spec in job.strategies if spec not in found]
    return outcome | ({"left_out": left} if left else {})


def compared(job: Job, arms: Sequence[tuple[str, dict[str, Any]]], sampling: Sampling, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Arms as one result, with the frontiers."""
    from kvasir.bench.result import arm, result

    outcome = result(f"solve-{job.task}", [arm(spec, _described(job, sampling, endpoints), metrics) for spec, metrics in arms])
    outcome["frontier"] = {c: frontier(arms, c) for c in CURRENCIES if all(c in m["per_problem"] for _, m in arms)
                           and any(m["per_problem"][c] for _, m in arms)}
    return outcome


def _room(endpoints: Sequence[Endpoint], task: Task, drawn: Sequence[LabProblem]) -> int:
    """Tokens that a reply may take, from the longest solution; with the check of as many candidates as were trained on, where the task has one."""
    tokenizer = next((e.tokenizer for e in endpoints if hasattr(e, "tokenizer")), None)
    if tokenizer is None:
        return 512
    asked = [forms.FormTask("aggregate", task).case(p, [p.solution] * forms.DRAWN) for p in drawn] if task.candidates else drawn
    return int(ROOM * max(len(tokenizer.encode(p.solution, add_special=False)) for p in asked)) + 32


async def _solve(job: Job, strategies: dict[str, Strategy], problems: Sequence[Problem], endpoints: Sequence[Endpoint],
                 sampling: Sampling, keep: Callable[[str, Solution], None]) -> None:
    plan = {"task": job.task, "n": job.count, "seed": job.seed, "split": job.split, "models": [e.name for e in endpoints],
            "sampling": repr(sampling), "budget": repr(job.budget), "problem_budget": repr(job.problem_budget)}
    journal = Journal(job.journal, plan)
    try:
        async with opened(endpoints):
            begin = time.monotonic()
            for i, (spec, strategy) in enumerate(strategies.items()):
                if i and job.minutes is not None and time.monotonic() - begin > 60 * job.minutes:
                    log.warning("%s is left out: %g minutes are over", spec, job.minutes)
                    continue
                for endpoint in endpoints:
                    endpoint.forget()  # or a later arm would find the questions of an earlier one in the cache, and look cheaper
                with _progress(spec, len(problems)) as on_event:
                    done = await solve(strategy, problems, endpoints, seed=job.seed, name=spec, sampling=sampling, budget=job.budget,
                                       problem_budget=job.problem_budget, journal=journal, on_event=on_event, at_once=job.at_once, measure=True)
                keep(spec, done)
    except EndpointDown as e:
        resume = f" What was done is in {job.journal.name}: the same command goes on from there." if job.journal else ""
        raise ConfigError(f"the run ended: {e}.{resume}") from e
    finally:
        journal.close()


@contextmanager
def _progress(spec: str, count: int):
    """A bar on a terminal, a line at the end elsewhere; yields what takes the events."""
    tally = Tally()
    if not sys.stderr.isatty():
        yield tally.add
        log.info("%s: %d problems, %s", spec, tally.done, tally)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                  console=Console(stderr=True)) as bar:
        line = bar.add_task(spec, total=count, note="")

        def take(event: dict[str, Any]) -> None:
            tally.add(event)
            bar.update(line, completed=tally.done, note=str(tally))

        yield take


def _described(job: Job, sampling: Sampling, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    return {"task": job.task, "n": job.count, "seed": job.seed, "split": job.split, "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature, "at_once": job.at_once,
            "models": {e.name: {"active_parameters": e.parameters, "price": dataclasses.asdict(e.price)} for e in endpoints},
            "budget": job.budget and dataclasses.asdict(job.budget), "problem_budget": job.problem_budget and dataclasses.asdict(job.problem_budget)}


def _differences(right: dict[str, list[bool]]) -> list[dict[str, Any]]:
    """Every later arm minus the first, on the same problems."""
    (first, base), *others = right.items()
    found = []
    for name, marks in others:
        change = [int(b) - int(a) for a, b in zip(base, marks)]
        low, high = bootstrap(change)
        found.append({"first": first, "second": name, "difference": sum(change) / len(change), "interval": [low, high],
                      "mcnemar_p": mcnemar(change.count(-1), change.count(1))})
    return found


def show(outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvasir.bench.result import WIDTH

    table = Table("strategy", "exact %", "95 %", "output", "wasted %", "all tokens", "GFLOP", "$", "s", "by model", title="per problem")
    best = {p["arm"] for p in outcome["frontier"].get("flops", outcome["frontier"]["output_tokens"]) if p["on_frontier"]}
    for entry in outcome["arms"]:
        m, each = entry["metrics"], entry["metrics"]["per_problem"]
        low, high = m["interval"]
        shares = ", ".join(f"{name} {sums['output_tokens'] / max(1, m['output_tokens']):.0%}" for name, sums in m["by_model"].items())
        table.add_row(("* " if entry["name"] in best else "  ") + entry["name"], f"{100 * m['exact']:.1f}", f"{100 * low:.1f}-{100 * high:.1f}",
                      f"{each['output_tokens']:,.0f}", f"{100 * m['wasted']:.0f}", f"{each['tokens']:,.0f}", f"{each['flops'] / 1e9:,.2f}",
                      f"{each['dollars']:.2g}", f"{each['seconds']:.2f}" if "seconds" in each else "", shares)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print("*: on the frontier of accuracy against operations")
