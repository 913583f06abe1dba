"""``kvasir solve --ablate``: the same strategies without each feature of the engine, and over HTTP, which has none of
them.

Every variant solves the same problems with the same noise. A feature changes time and tokens but no reply (in exact
mode; up to ties elsewhere): ``same_replies`` is the share of problems whose chosen reply equals that of the whole
engine. Over HTTP the server draws the noise, so only the accuracy can agree.

Every variant starts fresh engines. Before anything is timed, the first strategy solves another problem that is not
counted, so that it does not pay for work done once per engine (compilation, tapes).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.scaling.endpoint import Endpoint, Sampling
from kvasir.scaling.primitives import EndpointDown
from kvasir.scaling.problem import Problem
from kvasir.scaling.report import figures
from kvasir.scaling.solve import Solution, solve
from kvasir.scaling.strategy import Strategy
from kvasir_lab.evaluation.statistics import difference_interval, wilson
from kvasir_lab.solving.job import Job, build_endpoints, checker, compared, lab_problems, started

if TYPE_CHECKING:
    from kvasir_lab.task import Problem as LabProblem
    from kvasir_lab.task import Task

# Metrics whose ratios are reported.
SHOWN = ("seconds", "device_seconds", "tokens", "uncached", "output_tokens", "discarded")


@dataclass(frozen=True)
class Variant:
    """One variant. ``without``: features that the endpoint must not use. ``options``: changed settings of the engine.
    ``http``: behind our server."""

    without: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    http: bool = False


WHOLE = "whole"
VARIANTS = {
    WHOLE: Variant(),
    "no fork": Variant(("fork",)),
    "no prefix cache": Variant(options=(("enable_prefix_caching", False),)),
    "no scalar score": Variant(("score",)),
    "no group finish": Variant(("group",)),
    "drafts, primed": Variant(options=(("drafter", "suffix"),)),
    "drafts, own text": Variant(options=(("drafter", "suffix:scope=request"),)),
    "by problem": Variant(options=(("scheduling_policy", "affinity"),)),
    "none of them": Variant(("fork", "score", "group"), (("enable_prefix_caching", False),)),
    "http": Variant(http=True),
}


def run(
    config: EngineConfig,
    job: Job,
    strategies: dict[str, Strategy],
    task: Task,
    drawn: Sequence[LabProblem],
    problems: Sequence[Problem],
    sampling: Sampling,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run all variants and return the result. ``keep`` gets the result so far after every variant."""
    if any("://" in model for model in job.models):
        raise ConfigError("--ablate starts its own engines and servers: name models, not URLs")
    found: dict[str, dict[str, Solution]] = {spec: {} for spec in strategies}
    other = lab_problems(task, task.problems(job.split, job.seed + 1, 1))
    check, begin, left, described = checker(task, drawn), time.monotonic(), [], build_endpoints(job, config)
    for name, variant in VARIANTS.items():
        if job.minutes is not None and name != WHOLE and time.monotonic() - begin > 60 * job.minutes:
            left.append(name)
            continue
        with _endpoints(config, job, variant) as endpoints:
            left += [
                f"{spec} | {name}"
                for spec in asyncio.run(_solve(job, name, strategies, problems, other, endpoints, sampling, found))
            ]
        keep(outcome := _outcome(job, check, found, sampling, described, left))
    return outcome


@contextlib.contextmanager
def _endpoints(config: EngineConfig, job: Job, variant: Variant) -> Iterator[list[Endpoint]]:
    """Yield the endpoints of a variant, not yet started. Servers are started here and end with the block."""
    config = config.replace(**dict(variant.options))
    if not variant.http:
        yield build_endpoints(job, config, variant.without)
        return
    from kvasir.bench.servers import flags_of, serving

    with contextlib.ExitStack() as stack:
        urls = []
        for i, model in enumerate(job.models):
            share = config.cache.gpu_memory_utilization / (len(job.models) - i)
            server = stack.enter_context(
                serving("kvasir", model, flags_of(_changed(config) | {"gpu_memory_utilization": share}))
            )
            server.wait()
            urls.append(f"{server.url}/v1#{model.rstrip('/').rsplit('/', 1)[-1]}")
        endpoints = build_endpoints(dataclasses.replace(job, models=tuple(urls)), config)
        for endpoint, local in zip(endpoints, build_endpoints(job, config)):
            endpoint.parameters = local.parameters  # servers do not report them
        yield endpoints


def _changed(config: EngineConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, by name, except the model."""
    sections = [(getattr(config, s.name), getattr(EngineConfig(), s.name)) for s in dataclasses.fields(EngineConfig)]
    return {
        f.name: getattr(own, f.name)
        for own, usual in sections
        for f in dataclasses.fields(own)
        if f.name != "model" and getattr(own, f.name) != getattr(usual, f.name)
    }


async def _solve(
    job: Job,
    name: str,
    strategies: dict[str, Strategy],
    problems: Sequence[Problem],
    other: Sequence[Problem],
    endpoints: Sequence[Endpoint],
    sampling: Sampling,
    found: dict[str, dict[str, Solution]],
) -> list[str]:
    """Run every strategy on one variant; return the strategies that need a feature it lacks. ``other``: problems to
    warm up with, under another seed."""
    left, warm = [], False
    try:
        async with started(endpoints):
            for spec, strategy in strategies.items():
                try:
                    strategy.check(endpoints, problems[0].prompts)
                except ConfigError as e:
                    log.info("%s, %s: %s", spec, name, e)
                    left.append(spec)
                    continue
                if not warm:
                    await solve(
                        strategy,
                        other,
                        endpoints,
                        seed=job.seed + 1,
                        name=spec,
                        sampling=sampling,
                        problem_budget=job.problem_budget,
                    )
                    warm = True
                for endpoint in endpoints:
                    endpoint.forget()
                found[spec][name] = await solve(
                    strategy,
                    problems,
                    endpoints,
                    seed=job.seed,
                    name=spec,
                    sampling=sampling,
                    at_once=job.at_once,
                    problem_budget=job.problem_budget,
                    measure=True,
                )
                log.info("%s, %s: %.1f s", spec, name, found[spec][name].seconds)
    except EndpointDown as e:
        raise ConfigError(f"the run ended: {e}") from e
    return left


def _outcome(
    job: Job,
    check: Callable[[int, str], bool],
    found: dict[str, dict[str, Solution]],
    sampling: Sampling,
    endpoints: Sequence[Endpoint],
    left: Sequence[str],
) -> dict[str, Any]:
    from kvasir.bench.result import ratios_of

    arms, marks, pairs, differences = [], {}, [], []
    for spec, variants in found.items():
        for name, solution in variants.items():
            arm, whole = f"{spec} | {name}", variants[WHOLE]
            right = marks[arm] = [check(i, s.result.text) for i, s in enumerate(solution.solved)]
            same = [a.result.text == b.result.text for a, b in zip(solution.solved, whole.solved)]
            arms.append(
                (
                    arm,
                    figures(solution, right)
                    | {"interval": list(wilson(sum(right), len(right))), "same_replies": sum(same) / len(same)},
                )
            )
            if solution is not whole:
                pairs.append((arm, f"{spec} | {WHOLE}"))
                change = [int(b) - int(a) for a, b in zip(marks[pairs[-1][1]], right)]
                differences.append(
                    {
                        "first": pairs[-1][1],
                        "second": arm,
                        "difference": sum(change) / len(change),
                        "interval": list(difference_interval(change)),
                    }
                )
    outcome = compared(job, arms, sampling, endpoints)
    ratios = ratios_of(outcome["arms"], pairs)
    outcome["ratios"] = {name: value for name, value in ratios.items() if name.split(" ")[0] in SHOWN}
    outcome["differences"] = differences
    outcome["right"] = {arm: "".join(str(int(m)) for m in row) for arm, row in marks.items()}
    return outcome | ({"left_out": list(left)} if left else {})
