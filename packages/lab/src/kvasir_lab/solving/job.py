"""The job of ``kvasir solve``: its options, problems and models, and its arms as one result."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.progress import loading
from kvasir.scaling.endpoint import Endpoint, Sampling, short
from kvasir.scaling.ledger import Budget, Price
from kvasir.scaling.primitives import opened
from kvasir.scaling.problem import Problem, Prompts
from kvasir.scaling.report import CURRENCIES, frontier
from kvasir.scaling.strategy import Strategy
from kvasir_lab import forms
from kvasir_lab.task import Split, Task
from kvasir_lab.tasks.two_part import TwoPart

if TYPE_CHECKING:
    from kvasir_lab.task import Problem as LabProblem


@dataclass(frozen=True)
class Job:
    """The options of one run.

    ``models``: names, folders, hub ids, or ``URL#NAME`` of a server (replicas joined by commas), cheapest first.
    ``prices``: by model. ``minutes``: no further strategy starts after this time. ``pool``: draw this many replies per
    problem once and deal them out to every strategy, ``resamples`` times in another order; ``pool_file`` keeps them.
    ``replicas``: engines of each model of this host. ``rewards``: reward models and judges that strategies name and
    ``models`` does not hold: folders, or names. They write no solutions.
    """

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
    replicas: int = 1
    rewards: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("strategy", self.strategies), ("model", self.models)):
            if len(set(values)) < len(values):
                raise ConfigError(f"--{name}: a {name} is given twice; give each once")


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

    def solution(self, reply):
        return forms.solution(reply)


class PlannedPrompts(LabPrompts):
    """The prompt forms of a task that knows plans and budgets. Its step i is its part i."""

    def __init__(self, task: TwoPart) -> None:
        self.task = task

    def plan(self, problem):
        return self.task.plan_request(problem.messages)

    def budgeted(self, problem, steps, budgets):
        return self.task.budget_request(problem.messages, budgets)

    def section_end(self, number, count):
        return self.task.part_end(number, count)


def lab_problems(task: Task, drawn: Sequence[LabProblem]) -> list[Problem]:
    """The lab's problems as strategies see them, without their answers. In a reply that checks candidates first, the
    solution below the check counts."""
    if any(p.tools for p in drawn):
        raise ConfigError(f"task '{task.name}' needs tool calls, which no strategy makes")
    prompts = LabPrompts() if task.candidates else Prompts()
    if isinstance(task, TwoPart):
        prompts = PlannedPrompts(task)
    return [
        Problem(f"p{i}", p.messages, lambda text: task.answer(forms.solution(text)), prompts)
        for i, p in enumerate(drawn)
    ]


def missing_rewards(job: Job, strategies: Iterable[Strategy]) -> tuple[str, ...]:
    """The reward models and judges that ``strategies`` ask and that no ``--model`` is named as."""
    names = {short(model) for model in job.models}
    return tuple(dict.fromkeys(r for strategy in strategies for r in strategy.rewards() if short(r) not in names))


def parse_amounts(text: str | None, option: str) -> Budget | None:
    """Parse ``tokens=10000,dollars=0.5`` into a budget. Raises ConfigError."""
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
    """Parse ``nano=0.1/0.02/0.4``: dollars per million prompt, cached and generated tokens. Raises ConfigError."""
    found = {}
    for text in texts:
        name, _, amounts = text.rpartition("=")
        try:
            prompt, cached, generated = map(float, amounts.split("/"))
        except ValueError as e:
            raise ConfigError(
                f"--price {text}: expected MODEL=PROMPT/CACHED/GENERATED in dollars per million tokens"
            ) from e
        if not name or not all(0 <= value < float("inf") for value in (prompt, cached, generated)):
            raise ConfigError(f"--price {text}: expected a model and amounts of at least 0")
        found[name] = Price(prompt, cached, generated)
    return found


def build_endpoints(job: Job, config: EngineConfig, without: Sequence[str] = ()) -> list[Endpoint]:
    """Make an endpoint for every model; engines on one GPU share its memory evenly. Raises ConfigError.

    ``without``: features that the endpoints must not use.
    """
    from kvasir.scaling.engine_endpoint import EngineEndpoint
    from kvasir.scaling.http_endpoint import HTTPEndpoint
    from kvasir.scaling.replicas import ReplicaEndpoint

    def name_of(model: str) -> str:
        return model.partition(",")[0].rpartition("#")[2] if "://" in model else short(model) or "embedded"

    names = [name_of(m) for m in (*job.models, *job.rewards)]
    unknown = set(job.prices) - set(names)
    if unknown or len(set(names)) < len(names):
        raise ConfigError(
            f"--price of {', '.join(sorted(unknown))}: the models are {', '.join(names)}"
            if unknown
            else f"two models are named alike: {', '.join(names)}"
        )
    models = [*job.models, *job.rewards]
    local = [m for m in models if "://" not in m]
    found: list[Endpoint] = []
    for model, name in zip(models, names):
        price = job.prices.get(name, Price())
        if "://" in model:
            key = os.environ.get("KVASIR_API_KEY", "")
            replicas = [
                HTTPEndpoint(*address.partition("#")[::2], price=price, api_key=key) for address in model.split(",")
            ]
            found.append(ReplicaEndpoint(replicas) if len(replicas) > 1 else replicas[0])
        else:
            # Each takes its share of what is free when it starts.
            share = config.cache.gpu_memory_utilization / (len(local) - local.index(model))
            found.append(
                EngineEndpoint(
                    config.replace(model=model, gpu_memory_utilization=share),
                    name,
                    price=price,
                    without=without,
                    replicas=job.replicas,
                )
            )
    for endpoint in found[len(job.models) :]:
        endpoint.caps = dataclasses.replace(endpoint.caps, writes=False)
    return found


@contextlib.asynccontextmanager
async def started(endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
    """Start endpoints and say so meanwhile; close them whatever happens."""
    async with contextlib.AsyncExitStack() as stack:
        with loading(", ".join(e.name for e in endpoints)):
            await stack.enter_async_context(opened(endpoints))
        yield


def checker(task: Task, drawn: Sequence[LabProblem]) -> Callable[[int, str], bool]:
    """A function that says whether a reply solves problem i;
    in a recombination, the solution after its check counts."""
    return lambda i, text: task.check(drawn[i], forms.solution(text))


def compared(
    job: Job, arms: Sequence[tuple[str, dict[str, Any]]], sampling: Sampling, endpoints: Sequence[Endpoint]
) -> dict[str, Any]:
    """Combine arms into one result, with the frontiers. All have the same settings, which the first arm holds."""
    from kvasir.bench.result import arm, result

    outcome = result(
        f"solve-{job.task}",
        [
            arm(spec, {} if i else _described(job, sampling, endpoints), metrics)
            for i, (spec, metrics) in enumerate(arms)
        ],
    )
    outcome["frontier"] = {
        c: frontier(arms, c)
        for c in CURRENCIES
        if all(c in m["per_problem"] for _, m in arms) and any(m["per_problem"][c] for _, m in arms)
    }
    return outcome


def _described(job: Job, sampling: Sampling, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    return {
        "task": job.task,
        "n": job.count,
        "seed": job.seed,
        "split": job.split,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "at_once": job.at_once,
        "models": {
            e.name: {"active_parameters": e.parameters, "price": dataclasses.asdict(e.price)} for e in endpoints
        },
        "budget": job.budget and dataclasses.asdict(job.budget),
        "problem_budget": job.problem_budget and dataclasses.asdict(job.problem_budget),
    }
