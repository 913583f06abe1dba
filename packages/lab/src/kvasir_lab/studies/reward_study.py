"""Measure reward models, adaptive self-evaluation and the policy table, against votes and untrained judges.

    python -m kvasir_lab.studies reward_study OUT.json [--minutes 8] [--problems 1000] [--seeds 3]
        [--arms beam,particle]

What is missing in OUT.models is trained: three reward models of ``base`` on the task (labels by the outcome and by
rollouts with all weights, and a head on frozen states), a judge, and the self-evaluation. The outcome's model and the
self-evaluation come first, then every arm that needs no more answers the same problems, then come the next model and
its arms (`STAGES`). An engine starts when an arm first needs it.

Every cell (seed, arm) is written to OUT.cells.jsonl when it is done, and OUT.json now and then; the same command goes
on with the others. Nothing begins after --minutes, so a run may be cut into several. Arms come in the order of their
weight. OUT.json has for each arm its accuracy and cost, and the paired differences from its control and from the
cheapest vote that costs as much; and for each budget the policy table against the best single strategy, on problems
that neither was fitted on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from kvasir.bench.result import arm, finish, result, write_json
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.scaling.endpoint import Sampling
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.policy_table import Outcomes
from kvasir.scaling.report import costs
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab import policy
from kvasir_lab.adapters import reward
from kvasir_lab.cells import keep_cell, read_cells
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.statistics import bootstrap, wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.rewards import score, self_evaluation
from kvasir_lab.solving.job import checker, lab_problems
from kvasir_lab.study import Report, study

TASK = "countdown:min_numbers=4"  # base solves about 45 % of it
AT_ONCE = 256  # problems at once: a step of a small model costs the same for many rows
SAMPLES = 64  # the most samples that a call of an arm may ask for
MAX_TOKENS = 160
# Models to train, in stages. The arms that a stage makes possible run before the next one, and labels by rollouts come
# last because they take far longer than the others.
STAGES = (("outcome", "self"), ("head",), ("judge",), ("rollouts",))
TRAINED = tuple(name for stage in STAGES for name in stage)
DIFFICULTY = "difficulty"
WRITTEN = 20.0  # Seconds between two writings of the result, whose intervals take a second.
BUDGETS = 5  # Budgets of the policy table, spread over the costs of its strategies.


@dataclass(frozen=True)
class Arm:
    """A strategy. ``control``: the arm that it is compared with besides the votes. ``pooled``: the policy table may
    choose it."""

    spec: str
    control: str = ""
    pooled: bool = False

    @property
    def models(self) -> list[str]:
        """The engines that it needs."""
        named = {part.partition("=")[::2] for part in self.spec.partition(":")[2].split(",")}
        return list(dict.fromkeys(v for k, v in sorted(named) if k in ("model", "prm", "judge") and v))


def arms() -> list[Arm]:
    """All arms, the most telling first."""
    m, prm = "model=base", "prm=outcome,model=base"
    found = [Arm(f"majority:n={n},{m}", pooled=True) for n in (8, 1, 16, 4)]
    for spec in (
        "beam:N=8,width=4",
        "particle:N=8",
        "a_star:k=4,expansions=8",
        "self_eval_prune:n=8,prefix=12",  # a line has about eight tokens
        "best_of_n:n=8,by=self",
    ):
        trained = spec.replace("by=self", "by=prm,weighted=true")
        found += [Arm(f"{spec},{m}"), Arm(f"{trained},{prm}", f"{spec},{m}", pooled=True)]
    plain, adaptive = f"adaptive_consistency:n=16,{m}", "adaptive_self_eval:n=16,threshold=0.9"
    found.append(Arm(plain))
    found += [Arm(f"adaptive_self_eval:n=16,threshold={t},model=self", plain) for t in (0.9, 0.7, 0.97)]
    found += [
        Arm("majority:n=8,model=self", f"majority:n=8,{m}"),
        Arm(f"{adaptive},{m}", plain),
        Arm(f"{adaptive},{prm}", plain, pooled=True),
        Arm("self_eval_prune:n=8,prefix=12,model=self", f"self_eval_prune:n=8,prefix=12,{m}"),
        Arm(f"{adaptive},first=1,rise=0,{prm}", f"{adaptive},{prm}"),
        Arm(f"beam:N=8,width=4,lookahead=1,{prm}", f"beam:N=8,width=4,{prm}", pooled=True),
        Arm(f"revisions:chains=4,revisions=1,{prm}", f"best_of_n:n=8,by=prm,weighted=true,{prm}", pooled=True),
        Arm(f"revisions:chains=2,revisions=3,{prm}", f"best_of_n:n=8,by=prm,weighted=true,{prm}", pooled=True),
        Arm(f"particle:N=4,iterations=2,{prm}", f"particle:N=8,{prm}"),
        Arm(f"particle:N=4,iterations=4,{prm}", f"particle:N=16,{prm}"),
        Arm(f"particle:N=16,{prm}", pooled=True),
        Arm(f"beam:N=16,width=4,{prm}", pooled=True),
        Arm(f"best_of_n:n=16,by=prm,weighted=true,{prm}", pooled=True),
    ]
    for kind in ("prm=rollouts", "prm=head", "judge=judge"):
        for spec in ("beam:N=8,width=4", "particle:N=8"):
            found.append(Arm(f"{spec},{kind},{m}", f"{spec},{prm}"))
    found += [Arm(f"{spec},{prm}", pooled=True) for spec in ("beam:N=4,width=4", "particle:N=4")]
    found += [Arm(f"majority:n={n},{m}", pooled=True) for n in (32, 2)]
    return found


def train(name: str, folder: Path, options: argparse.Namespace, device: str) -> None:
    """Train what is called ``name`` into ``folder``."""
    few = options.replies
    if name == "self":
        plan = self_evaluation.Plan(options.task, replies=few or 16384, steps=options.steps, held_out=options.held_out)
        if options.rows:
            plan = self_evaluation.Plan(**{**vars(plan), "rows": options.rows})
        self_evaluation.train(plan, options.model, folder, device=device)
    elif name == "judge":
        judge = reward.Plan(options.task, steps=options.steps, rows=options.rows or 32, count=options.held_out)
        reward.train(judge, checkpoint.resolve(options.model), folder, device=device)
    else:
        labels = "rollouts" if name == "rollouts" else "outcome"
        replies = few or {"outcome": 65536, "rollouts": 16384, "head": 32768}[name]
        kind = score.Plan(
            options.task,
            labels,  # type: ignore[arg-type]
            "head" if name == "head" else "all",
            replies,
            held_out=options.held_out,
            epochs=2.0 if name != "rollouts" else 4.0,
        )
        score.train(kind, options.model, folder, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines are other processes


class Engines:
    """The engines of a run, started when they are first asked for.

    ``memory``: shares of the GPU's memory by name, where 0.12 is not enough. ``warm``: what a caller has warmed up.
    """

    def __init__(self, models: dict[str, str], device: str) -> None:
        self.models, self.device = models, device
        self.started: dict[str, EngineEndpoint] = {}
        self.memory: dict[str, float] = {}
        self.warm: set[tuple[str, str]] = set()

    async def __call__(self, names: Sequence[str]) -> list[EngineEndpoint]:
        """Endpoints called ``names``, in that order."""
        for name in names:
            if name not in self.started:
                own: dict[str, Any] = {"gpu_memory_utilization": self.memory.get(name, 0.12), "max_num_seqs": 1024}
                if self.device == "cpu":
                    own = {"device": "cpu"}
                own["max_queued_requests"] = AT_ONCE * SAMPLES  # all samples of all problems at once may wait
                config = EngineConfig.of(model=self.models[name], max_model_len=1024, **own)
                self.started[name] = EngineEndpoint(config, name)
                await self.started[name].start()
        return [self.started[name] for name in names]

    async def close(self) -> None:
        for endpoint in self.started.values():
            await endpoint.close()


async def cell(
    spec: str, endpoints: list[EngineEndpoint], task: Any, drawn: list, seed: int, max_tokens: int = MAX_TOKENS
) -> dict[str, Any]:
    """One arm on one seed's problems: right [N] as 0 and 1, MFLOP [N], and sums."""
    for endpoint in endpoints:
        endpoint.forget()
    problems, check, began = lab_problems(task, drawn), checker(task, drawn), time.monotonic()
    done = await solve(
        load_strategy(spec),
        problems,
        endpoints,
        seed=seed,
        name=spec,
        sampling=Sampling(max_tokens),
        at_once=AT_ONCE,
    )
    spent = [costs(s.ledger.total())["flops"] for s in done.solved]
    total = done.ledger.total()
    stats = [s.result.stats.get("drawn") for s in done.solved]
    return {
        "right": "".join(str(int(check(i, s.result.text))) for i, s in enumerate(done.solved)),
        "mflop": [round(x / 1e6) for x in spent],
        "output": total["generated"] + total["discarded"],
        "discarded": total["discarded"],
        "calls": total["calls"],
        "drawn": sum(n for n in stats if n) if any(stats) else None,
        "s": round(time.monotonic() - began, 2),
    }


# -------------------------------------------------------------------------------------------------------------- results


def bits(cells: dict[tuple, dict], spec: str, seeds: Sequence[int]) -> list[int]:
    return [int(c) for seed in seeds for c in cells[seed, spec]["right"]]


def difference(cells: dict[tuple, dict], spec: str, other: str, options: argparse.Namespace) -> dict[str, Any]:
    """The paired difference in points over the seeds that both have; the bootstrap resamples problems."""
    seeds = [s for s in range(options.seeds) if (s, spec) in cells and (s, other) in cells]
    if not seeds or spec == other:
        return {}
    change = [a - b for a, b in zip(bits(cells, spec, seeds), bits(cells, other, seeds))]
    low, high = bootstrap(change, resamples=2000)
    found = {"": sum(change) / len(change), ".low": low, ".high": high}
    return {f"over {other}{part}": round(float(value), 4) for part, value in found.items()}


def summed(cells: dict[tuple, dict], planned: list[Arm], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One arm of the result for each strategy, over the seeds that are there."""
    found, price, seeds = [], {}, range(options.seeds)
    rows_of = {one.spec: [cells[s, one.spec] for s in seeds if (s, one.spec) in cells] for one in planned}
    for spec, rows in rows_of.items():
        if rows:
            price[spec] = sum(sum(row["mflop"]) for row in rows) / (1e3 * options.problems * len(rows))
    votes = sorted((spec for spec in price if spec.startswith("majority") and "model=base" in spec), key=price.get)
    for one in planned:
        rows = rows_of[one.spec]
        if not rows:
            continue
        count, right = options.problems * len(rows), sum(row["right"].count("1") for row in rows)
        low, high = wilson(right, count)
        metrics: dict[str, Any] = {
            "exact": round(right / count, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "gflop": round(price[one.spec], 3),
            "output": round(sum(row["output"] for row in rows) / count, 2),
            "wasted": round(sum(row["discarded"] for row in rows) / max(1, sum(row["output"] for row in rows)), 4),
            "calls": round(sum(row["calls"] for row in rows) / count, 2),
            "seeds": len(rows),
        }
        if rows[0]["drawn"] is not None:
            metrics["drawn"] = round(sum(row["drawn"] for row in rows) / count, 3)
        if one.control:
            metrics |= difference(cells, one.spec, one.control, options)
        if votes and one.spec not in votes:
            equal = next((v for v in votes if price[v] >= price[one.spec]), votes[-1])
            metrics |= {"equal_vote": equal, **difference(cells, one.spec, equal, options)}
        found.append(arm(one.spec, {"task": options.task, "problems": options.problems}, metrics))
    return found


def policies(cells: dict[tuple, dict], planned: list[Arm], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The policy table against the best single strategy, on the problems of each seed that all pooled arms have."""
    pooled = [one.spec for one in planned if one.pooled and any((s, one.spec) in cells for s in range(options.seeds))]
    seeds = [s for s in range(options.seeds) if (s, DIFFICULTY) in cells and all((s, spec) in cells for spec in pooled)]
    if not seeds or len(pooled) < 2:
        return []
    told = {
        spec: Outcomes(
            [float(b) for b in bits(cells, spec, seeds)], [m * 1e6 for s in seeds for m in cells[s, spec]["mflop"]]
        )
        for spec in pooled
    }
    prices = sorted(policy.mean(o.cost) for o in told.values())
    budgets = sorted({prices[len(prices) * i // BUDGETS] for i in range(1, BUDGETS)} | {prices[-1]})
    found = []
    for name in ("prompt", "pilot"):
        scores = [x for s in seeds for x in cells[s, DIFFICULTY][name]["scores"]]
        spent = [x * 1e6 for s in seeds for x in cells[s, DIFFICULTY][name]["mflop"]]
        for row in policy.judged(scores, spent, told, budgets):
            low, high = row["interval"]
            metrics = {k: round(row[k], 4) for k in ("table", "single", "oracle", "difference")}
            metrics |= {"low": round(low, 4), "high": round(high, 4)}
            metrics |= {f"{k}_gflop": round(row[f"{k}_cost"] / 1e9, 3) for k in ("table", "single")}
            label = f"policy table, {name}, {row['budget'] / 1e9:.3g} GFLOP"
            found.append(arm(label, {"seeds": len(seeds)}, metrics))
    return found


async def difficulty(engines: Engines, task: Any, drawn: list, seed: int) -> dict[str, Any]:
    """Predicted scores of all problems, from the prompt alone and from four pilot replies."""
    endpoints, found = await engines(["base", "outcome"]), {}
    for name, pilot in (("prompt", 0), ("pilot", 4)):
        scores, spent = await policy.difficulties(
            lab_problems(task, drawn), endpoints, "outcome", pilot, Sampling(MAX_TOKENS), seed
        )
        found[name] = {"scores": [round(s, 5) for s in scores], "mflop": [round(x / 1e6, 2) for x in spent]}
    return found


def load_cells(file: Path, problems: int) -> dict[tuple, dict]:
    """The cells of earlier runs. Raises ConfigError for those of other problems."""
    cells = read_cells(file)
    if any("right" in found and len(found["right"]) != problems for found in cells.values()):
        raise ConfigError(f"{file} has cells of another --problems: give the same, or another output")
    return cells


def missing(cells: dict[tuple, dict], planned: list[Arm], options: argparse.Namespace) -> list[tuple[int, Arm]]:
    """Seed and arm of each cell that is still to be filled, the predicted difficulty first."""
    wanted = [Arm(DIFFICULTY), *planned]
    return [(s, one) for one in wanted for s in range(options.seeds) if (s, one.spec) not in cells]


def outcome_of(cells: dict[tuple, dict], planned: list[Arm], options: argparse.Namespace) -> dict[str, Any]:
    """The result of the cells that are there."""
    found = result("reward-study", summed(cells, planned, options) + policies(cells, planned, options))
    kept, home = ("plan", "history", "before", "after", "seconds", "right"), options.output.with_suffix(".models")
    found["trained"] = {
        name: {k: v for k, v in json.loads((home / name / "reward.json").read_text()).items() if k in kept}
        for name in TRAINED
        if (home / name / "reward.json").exists()
    }
    return found | {"cells": {"done": len(cells), "left": len(missing(cells, planned, options))}}


async def run(
    cells: dict[tuple, dict],
    planned: list[Arm],
    ready: list[Arm],
    engines: Engines,
    options: argparse.Namespace,
    end: float,
    file: Path,
) -> None:
    """Fill the cells of the arms that are ``ready`` while there is time, and write the result now and then."""
    task, written = load_task(options.task), time.monotonic()
    left = missing(cells, ready, options)
    try:
        while left and time.monotonic() < end:
            seed, one = left.pop(0)
            drawn = task.problems("test", options.first_seed + seed, options.problems)
            if one.spec == DIFFICULTY:
                found = await difficulty(engines, task, drawn, seed)
            else:
                found = await cell(one.spec, await engines(one.models), task, drawn, seed)
                share = found["right"].count("1") / options.problems
                print(f"seed {seed} {one.spec}: {share:.3f}, {found['s']} s, {len(left)} left", flush=True)
            cells[seed, one.spec] = found
            keep_cell(file, (seed, one.spec), found)
            if one.spec != DIFFICULTY and (not left or time.monotonic() > written + WRITTEN):  # a result has an arm
                write_json(options.output, outcome_of(cells, planned, options))
                written = time.monotonic()
    finally:
        await engines.close()


@study("reward-study", needs_file=True)
def main(
    report: Report,
    *,
    minutes: float = 8.0,
    problems: int = 1000,
    seeds: int = 3,
    first_seed: int = 0,
    task: str = TASK,
    only: Annotated[str, "--arms", "only arms whose spec begins with one of these, separated by ; or commas"] = "",
    model: str = "base",
    replies: Annotated[int, "replies to train on, for all that is trained"] = 0,
    steps: int = 300,
    rows: int = 0,
    held_out: int = 2048,
    device: Literal["cuda", "cpu"] | None = None,
) -> None:
    options = report.options
    end, device = time.monotonic() + 60 * options.minutes, options.device or default_device()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    file, home = options.output.with_suffix(".cells.jsonl"), options.output.with_suffix(".models")
    cells = load_cells(file, options.problems)
    chosen = tuple(filter(None, options.only.split(";" if ";" in options.only else ",")))
    planned = [one for one in arms() if not chosen or one.spec.startswith(chosen)]
    needed = {"outcome"} | {name for one in planned for name in one.models}
    models = {"base": options.model} | {name: str(home / name) for name in TRAINED}
    for stage in STAGES:
        for name in stage:
            if name in needed and not (home / name / "reward.json").exists() and time.monotonic() < end:
                train(name, home / name, options, device)
        there = {"base"} | {name for name in TRAINED if (home / name / "reward.json").exists()}
        if "outcome" in there and time.monotonic() < end:  # it predicts the difficulty
            ready = [one for one in planned if set(one.models) <= there]
            asyncio.run(run(cells, planned, ready, Engines(models, device), options, end, file))
    outcome, left = outcome_of(cells, planned, options), len(missing(cells, planned, options))
    finish(outcome, options.output)
    print(f"{len(cells)} cells done, {left} left" + ("; run the same command again" if left else ""))
