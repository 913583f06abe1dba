"""Measure a trained judge of pairs (V1-PairRL): tournaments with and without it, beside written checks and votes.

    python -m kvasir_lab.studies judge_study OUT.json [--minutes 9] [--problems 1000] [--seeds 3]
        [--tasks path,countdown] [--check]

What is missing in OUT.models is trained first, on all tasks together, as far as there is time: ``pair`` (solutions and
judgements of pairs), ``one`` (solutions and judgements of single replies, PointRL), and ``none`` (solutions alone).
Then every arm answers the same problems of each task. ``v1:judge=pair,model=base`` shows the judge alone,
``v1:model=pair`` the whole method.

Every cell (task, seed, arm) is written to OUT.TASK.cells.jsonl when it is done; the same command goes on with the
others. Nothing begins after --minutes. Each arm is compared in pairs with its control, and with the cheapest vote and
the cheapest written check of base that take at least as many output tokens. --check first holds the engine's
log-probabilities of judgements against the trainer's; where they differ too much, the exit status is 1 at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from kvasir.bench.result import arm, result, write_json
from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context, Run
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.cells import keep_cell
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.statistics import wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.rewards import pair
from kvasir_lab.studies.reward_study import Arm, Engines, cell, difference, load_cells
from kvasir_lab.study import Report, study

TASKS = {
    "path": "path:min_depth=4,max_depth=5",
    "countdown": "countdown:min_numbers=4",
    "state": "state:min_steps=14,min_every=4",
}
TRAINED: tuple[pair.Judge, ...] = ("pair", "one", "none")
TRAINING = 240.0  # Seconds that must be left for the second and the third model to be trained in this run.
MAX_TOKENS = 256  # The longest check of a pair is that of state.
BOUND = {"cpu": 2e-3, "cuda": 3e-2}  # Nats a token between engine and trainer; the engine rounds to bf16 on a GPU.


def arms() -> list[Arm]:
    """All arms, the most telling first."""
    vote, check, games = "majority:n=8", "best_of_n:n=8,by=judge", "v1:N=8"
    found = [Arm(f"{vote},model=base"), Arm(f"{check},model=base", f"{vote},model=base")]
    found.append(Arm(f"{games},model=base", f"{check},model=base"))
    found.append(Arm(f"{games},judge=pair,model=base", f"{games},model=base"))
    found += [Arm(f"best_of_n:n={n},by=judge,model=base") for n in (20, 32)]
    found.append(Arm(f"{games},model=pair", f"{games},model=base"))
    found.append(Arm(f"{check},model=pair", f"{games},model=pair"))
    found.append(Arm(f"{vote},model=pair", f"{vote},model=base"))
    found += [Arm(f"majority:n={n},model=base") for n in (40, 1, 16)]
    found.append(Arm(f"{games},judge=one,model=base", f"{games},judge=pair,model=base"))
    found.append(Arm(f"{check},model=one", f"{games},model=pair"))
    found.append(Arm(f"{games},model=one", f"{games},model=pair"))
    found += [Arm(f"{games},model=none", f"{games},model=pair"), Arm(f"{check},model=none", f"{check},model=pair")]
    found += [Arm(f"majority:n=1,model={name}", "majority:n=1,model=base") for name in TRAINED]
    found.append(Arm("v1:N=8,calls=1,judge=pair,model=base", f"{games},judge=pair,model=base"))
    return found


def train(name: pair.Judge, folder: Path, options: argparse.Namespace, device: str, minutes: float) -> None:
    """Train the model called ``name`` into ``folder`` in at most ``minutes`` of steps."""
    count = options.train_problems or pair.PROBLEMS[device]
    plan = pair.Plan(
        tuple(TASKS[task] for task in options.tasks),
        name,
        options.steps,
        max(count, len(options.tasks)),
        options.group,
        lr=options.lr,
        held_out=options.held_out,
        minutes=round(minutes, 2),
    )
    pair.train(plan, options.model, folder, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines are other processes


async def parity(engines: Engines, folder: Path, options: argparse.Namespace, device: str) -> float:
    """The largest distance in nats a token between engine and trainer, over judgements of the pair model's replies.

    Raises ConfigError where the model has no pair to judge.
    """
    (endpoint,), plan = await engines(["pair"]), pair.Plan((TASKS[options.tasks[0]],), held_out=8)
    net, tokenizer, worst = export.load(folder, device), lab_tokenizer.load(folder), 0.0
    held = pair.held_out(net, tokenizer, plan)
    if not held.judged:
        raise ConfigError(f"{plan.tasks[0]}: the model solves none of {plan.held_out} problems, so --check has no pair")
    told, context = pair.rollouts(net, tokenizer, held.judged, 1, 0), Context(Run([endpoint]), "parity")
    expected = pair.likelihoods(net, told)
    for number, ids, nats in zip(told.group, told.replies, expected, strict=True):
        reply = Sample(0, "", len(ids), "stop", "pair", endpoint.vocabulary, tuple(ids))
        found = await context.score(endpoint, held.judged[number].problem.messages, reply)
        assert found is not None
        worst = max(worst, abs(found.logprob - nats) / len(ids))
    return worst


# -------------------------------------------------------------------------------------------------------------- results


def summed(cells: dict[tuple, dict], name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One arm of the result for each strategy on the task ``name``, over the seeds that are there."""
    planned, found, price = arms(), [], {}
    rows_of = {
        one.spec: [cells[s, one.spec] for s in range(options.seeds) if (s, one.spec) in cells] for one in planned
    }
    for spec, rows in rows_of.items():
        if rows:
            price[spec] = sum(row["output"] for row in rows) / (options.problems * len(rows))
    for one in planned:
        if not (rows := rows_of[one.spec]):
            continue
        count, right = options.problems * len(rows), sum(row["right"].count("1") for row in rows)
        low, high = wilson(right, count)
        metrics: dict[str, Any] = {
            "exact": round(right / count, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "output": round(price[one.spec], 2),
            "gflop": round(sum(sum(row["mflop"]) for row in rows) / (1e3 * count), 3),
            "calls": round(sum(row["calls"] for row in rows) / count, 2),
            "s": round(sum(row["s"] for row in rows), 1),
            "seeds": len(rows),
        }
        if one.control:
            metrics |= difference(cells, one.spec, one.control, options)
        for label, begins in (("equal_vote", "majority"), ("equal_check", "best_of_n")):
            peers = sorted((s for s in price if s.startswith(begins) and "model=base" in s), key=price.__getitem__)
            if peers and one.spec not in peers:
                equal = next((s for s in peers if price[s] >= price[one.spec]), peers[-1])
                metrics |= {label: equal, **difference(cells, one.spec, equal, options)}
        found.append(arm(f"{name}, {one.spec}", {"task": TASKS[name], "problems": options.problems}, metrics))
    return found


async def run(
    cells: dict[str, dict[tuple, dict]],
    planned: list[Arm],
    files: dict[str, Path],
    engines: Engines,
    options: argparse.Namespace,
    end: float,
    folder: Path,
    device: str,
) -> tuple[int, float | None]:
    """Fill the cells that are missing while there is time. Returns the number of those left, and the parity."""
    left = [
        (s, one, name) for one in planned for s in range(options.seeds) for name in options.tasks
        if (s, one.spec) not in cells[name]
    ]  # fmt: skip
    worst = None
    try:
        if options.check:
            worst = await parity(engines, folder, options, device)
            bound = f"allowed are {BOUND[device]:.0e}"
            print(f"largest distance between engine and trainer: {worst:.2e} nats a token ({bound})", flush=True)
        while left and time.monotonic() < end:
            seed, one, name = left.pop(0)
            task = load_task(TASKS[name])
            drawn = task.problems("test", options.first_seed + seed, options.problems)
            found = await cell(one.spec, await engines(one.models), task, drawn, seed, MAX_TOKENS)
            share = found["right"].count("1") / options.problems
            print(f"{name}, seed {seed}, {one.spec}: {share:.3f}, {found['s']} s, {len(left)} left", flush=True)
            cells[name][seed, one.spec] = found
            keep_cell(files[name], (seed, one.spec), found)
            store(cells, options, len(left), worst)
    finally:
        await engines.close()
    return len(left), worst


def store(cells: dict[str, dict[tuple, dict]], options: argparse.Namespace, left: int, worst: float | None) -> None:
    """Write the result of the cells that are there."""
    outcome = result("judge-study", [entry for name in options.tasks for entry in summed(cells[name], name, options)])
    records = {name: options.output.with_suffix(".models") / name / "reward.json" for name in TRAINED}
    outcome["trained"] = {
        name: {k: v for k, v in json.loads(file.read_text()).items() if k != "kind"}
        for name, file in records.items()
        if file.exists()
    }
    outcome["cells"] = {"done": sum(map(len, cells.values())), "left": left}
    if worst is not None and math.isfinite(worst):
        outcome["parity"] = {"nats_a_token": worst}
    write_json(options.output, outcome)


@study("judge-study", needs_file=True)
def main(
    report: Report,
    *,
    minutes: float = 9.0,
    problems: int = 1000,
    seeds: int = 3,
    first_seed: int = 0,
    tasks: Annotated[str, f"comma-separated: {', '.join(TASKS)}"] = ",".join(TASKS),
    model: str = "base",
    steps: int = 100,
    group: int = 8,
    lr: float = 2e-5,
    train_problems: Annotated[int, "problems of a training step"] = 0,
    held_out: int = 512,
    check: bool = False,
    device: Literal["cuda", "cpu"] | None = None,
) -> int:
    options = report.options
    options.tasks = options.tasks.split(",")
    if unknown := set(options.tasks) - set(TASKS):
        raise ConfigError(f"--tasks {', '.join(sorted(unknown))}: the tasks are {', '.join(TASKS)}")
    end, device = time.monotonic() + 60 * options.minutes, options.device or default_device()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    home = options.output.with_suffix(".models")
    files = {name: options.output.with_suffix(f".{name}.cells.jsonl") for name in options.tasks}
    cells = {name: load_cells(file, options.problems) for name, file in files.items()}
    for i, name in enumerate(TRAINED):
        if not (home / name / "reward.json").exists() and (not i or end - time.monotonic() > TRAINING):
            # Half of what is left, so that a slow machine leaves time to play.
            train(name, home / name, options, device, max(0.1, (end - time.monotonic()) / 120))
    trained = {name for name in TRAINED if (home / name / "reward.json").exists()}
    models = {"base": options.model} | {name: str(home / name) for name in TRAINED}
    planned = [one for one in arms() if set(one.models) <= {"base", *trained}]
    left, worst = asyncio.run(run(cells, planned, files, Engines(models, device), options, end, home / "pair", device))
    left += (len(arms()) - len(planned)) * options.seeds * len(options.tasks)
    store(cells, options, left, worst)
    print(f"{left} cells left" + ("; run the same command again" if left else ""))
    return int(worst is not None and not worst < BOUND[device])
