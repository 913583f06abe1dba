"""Measure two models on one problem: SpecReason's latency and quality, and routing by predicted cost.

    python -m kvasir_lab.studies tier_study OUT.json [--minutes 9] [--problems 1000] [--seeds 3] [--tasks countdown]
        [--parts timed]

``nano`` is the small model and ``base`` the large one. Two more are trained for each task, after the arms that need
neither: ``easy`` (nano's reward model, the router's classifier) and ``rater`` (base, taught to rate its steps with a
digit and with Yes or No). There are two parts:

- quality: every arm answers the same problems, hundreds at once. A cell has accuracy and the tokens of each model.
- timed: a few problems, one and 16 at a time, where nano costs what a 1B model does and base what an 8B model does
  (`kvasir_lab/studies/widen_checkpoint.py`; --own: at their own cost). A cell has the median seconds of a problem.

Every cell is written to OUT.cells.jsonl when it is done; the same command goes on with the others. Nothing begins after
--minutes. Widened models (25 GB) lie in --scratch. A router is held against its control without chance: the mean of the
two models' accuracies with the router's own shares, on the same problems.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from kvasir.bench.result import arm, result, write_json
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.scaling.endpoint import Sampling
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from kvasir_lab.cells import keep_cell, read_cells
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.statistics import bootstrap, wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.rewards import score, self_evaluation
from kvasir_lab.solving.job import checker, lab_problems
from kvasir_lab.studies.reward_study import Engines
from kvasir_lab.studies.widen_checkpoint import SIZES, widen
from kvasir_lab.study import Report, study

TASKS = {
    "chain": "chain:modulus=499,max_factor=30,max_steps=10",  # nano does most steps and few chains
    "countdown": "countdown:min_numbers=4",
    "path": "path",
}
STEPPED = ("chain", "countdown")  # Tasks whose replies have steps; path's are one line.
AT_ONCE = 256  # Problems at once in the quality part.
TIMED = (1, 16)  # Problems at once in the timed part.
MAX_TOKENS = 256
SMALL, LARGE = "nano", "base"
# Folder that keeps widened models for the next run.
SCRATCH = Path(tempfile.gettempdir()) / "kvasir-tiers"
QUALITY = "quality"
TRAINED = ("easy", "rater")  # What is trained for a task; a rater takes far longer.
KEPT = ("plan", "before", "after", "seconds")  # What a result says of a training.
RATED = 4096  # Replies that a rater learns from; each line of them is continued four times.


@dataclass(frozen=True)
class Arm:
    """A strategy. ``large``: the large model, base or the task's rater. ``timed``: in the timed part, too. ``routes``:
    its control is the mean of both models with its own shares."""

    spec: str
    large: str = LARGE
    timed: bool = False
    routes: bool = False

    def models(self, task: str) -> list[str]:
        """The engines that it needs, the small model first."""
        large = self.large if self.large == LARGE else f"{self.large}-{task}"
        return [SMALL, large, *([f"easy-{task}"] if "prm=easy" in self.spec else [])]

    @property
    def name(self) -> str:
        return self.spec if self.large == LARGE else f"{self.spec} ({self.large})"


def arms(task: str) -> list[Arm]:
    """All arms of a task, the most telling first."""
    found = [Arm(f"majority:n=1,model={LARGE}", timed=True), Arm(f"majority:n=1,model={SMALL}", timed=True)]
    if task in STEPPED:
        found += [Arm("specreason:threshold=0.7", timed=True)]
        found += [Arm(f"specreason:threshold=0.7,score={how}", "rater", timed=True) for how in ("digit", "mean", "yes")]
        found += [Arm("specreason:threshold=0.3,score=mean", "rater", timed=True)]
        found += [Arm("majority:n=1", "rater")]
    found += [Arm(f"cost_router:prm=easy,threshold={t}", routes=True) for t in (0.5, 0.3, 0.7)]
    found += [Arm("cost_router:by=random,share=0.5", routes=True)]
    found += [Arm(f"cascade:n={n},agree={m},last=1") for n, m in ((2, 2), (4, 3), (4, 2))]
    if task in STEPPED:
        found += [
            Arm(f"specreason:threshold={t},score={how}", "rater")
            for how in ("mean", "digit", "yes")
            for t in (0.5, 0.3, 0.9)
            if (how, t) != ("mean", 0.3)
        ]
        found += [Arm(f"specreason:threshold={t}") for t in (0.5, 0.9, 0, 1.1)]
        found += [Arm("specreason:threshold=0.7,score=digit", timed=True)]  # base was not taught to rate
        found += [Arm("specreason:threshold=0.7,score=mean,first=1", "rater")]
    found += [Arm(f"cost_router:prm=easy,threshold={t},n=8", routes=False) for t in (0.5,)]
    return found + [Arm("cascade:n=4,agree=3,last=8")]


def train(name: str, folder: Path, options: argparse.Namespace, device: str) -> None:
    """Train what is called ``name`` into ``folder``."""
    kind, _, task = name.partition("-")
    if kind == "rater":
        plan = self_evaluation.Plan(
            TASKS[task],
            replies=options.replies or RATED,
            steps=options.steps,
            held_out=options.held_out,
            digits=True,
        )
        if device == "cpu":
            plan = self_evaluation.Plan(**{**vars(plan), "rows": 2})
        self_evaluation.train(plan, LARGE, folder, device=device)
    else:
        classifier = score.Plan(TASKS[task], replies=options.replies or 32768, held_out=options.held_out)
        score.train(classifier, SMALL, folder, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines are other processes


def widened(models: dict[str, str], task: str, scratch: Path, device: str) -> dict[str, str]:
    """The ``models`` of a task at the cost of large ones: nano as 1B, and base and the rater as 8B. They are made if
    missing."""
    found = dict(models)
    for name, size in ((SMALL, "1b"), (LARGE, "8b"), (f"rater-{task}", "8b")):
        if name not in models:
            continue
        out, source = scratch / f"{name}-{size}", checkpoint.resolve(models[name])
        record = source / "reward.json"
        told, note = record.read_text() if record.exists() else name, out / "widened-from"
        if not note.exists() or note.read_text() != told:  # a rater that was trained again is widened again
            like = scratch / f"{LARGE}-8b" if name.startswith("rater") else None
            widen(source, out, SIZES[size], like=like, device=device)
            note.write_text(told)
        found[name] = str(out)
    return found


async def cell(
    one: Arm, endpoints: Sequence[EngineEndpoint], name: str, count: int, seed: int, at_once: int
) -> dict[str, Any]:
    """One arm on one seed's problems: right [N] as 0 and 1, seconds of each, tokens by model, and what it decided."""
    for endpoint in endpoints:
        endpoint.forget()
    task = load_task(TASKS[name])
    drawn = task.problems("test", seed, count)
    check, began = checker(task, drawn), time.monotonic()
    spec = one.spec.replace("prm=easy", f"prm=easy-{name}")
    done = await solve(
        load_strategy(spec),
        lab_problems(task, drawn),
        endpoints,
        seed=seed,
        name=spec,
        sampling=Sampling(MAX_TOKENS),
        at_once=at_once,
    )
    stats = [s.result.stats for s in done.solved]
    each = sorted(s.seconds for s in done.solved)
    found: dict[str, Any] = {
        "right": "".join(str(int(check(i, s.result.text))) for i, s in enumerate(done.solved)),
        "s": round(time.monotonic() - began, 2),
        "median_ms": round(1e3 * statistics.median(each), 1),
        "p90_ms": round(1e3 * each[int(0.9 * (len(each) - 1))], 1),
        "models": {
            model: {
                "output": sums["generated"] + sums["discarded"],
                "discarded": sums["discarded"],
                "prompt": sums["uncached"],
                "gflop": round(sums["flops"] / 1e9, 2),
            }
            for model, sums in done.ledger.by_endpoint().items()
        },
    }
    if "accepted" in stats[0]:
        found["steps"], found["accepted"] = (sum(s.get(k, 0) for s in stats) for k in ("steps", "accepted"))
    if "tier" in stats[0]:
        found["large"] = "".join(str(int(s["tier"] > 0)) for s in stats)
    return found


# -------------------------------------------------------------------------------------------------------------- results


def bits(rows: Sequence[dict[str, Any]], key: str = "right") -> list[int]:
    return [int(c) for row in rows for c in row[key]]


def change(told: Sequence[float], label: str) -> dict[str, float]:
    """A paired difference in points, with the interval of a bootstrap over problems."""
    low, high = bootstrap(list(told), resamples=2000)
    return {
        label: round(sum(told) / len(told), 4), f"{label}.low": round(float(low), 4),
        f"{label}.high": round(float(high), 4),
    }  # fmt: skip


def summed(cells: dict[tuple, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One arm of the result for each part, task and strategy, over the seeds that are there."""
    found = []
    for part in dict.fromkeys(key[0] for key in cells):
        for name in options.tasks:
            of = {
                one.name: {
                    key[2]: told for key, told in cells.items() if key[:2] == (part, name) and key[3] == one.name
                }
                for one in arms(name)
            }
            for one in arms(name):
                if of[one.name]:
                    metrics = metrics_of(one, of)
                    found.append(arm(f"{part}, {name}, {one.name}", {"task": TASKS[name], "part": part}, metrics))
    return found


def metrics_of(one: Arm, of: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """The figures of one arm; ``of``: cells of all arms by seed."""
    rows = list(of[one.name].values())
    right = bits(rows)
    low, high = wilson(sum(right), len(right))
    found: dict[str, Any] = {"exact": round(sum(right) / len(right), 4), "low": round(low, 4), "high": round(high, 4)}
    found |= {"problems": len(right), "s": round(sum(row["s"] for row in rows), 2)}
    found |= {k: round(statistics.median(row[k] for row in rows), 1) for k in ("median_ms", "p90_ms")}
    for model in dict.fromkeys(model for row in rows for model in row["models"]):
        for kind in ("output", "discarded", "prompt", "gflop"):
            amount = sum(row["models"].get(model, {}).get(kind, 0) for row in rows) / len(right)
            found[f"{model}.{kind}"] = round(amount, 3)
    if "steps" in rows[0]:
        found["accepted"] = round(sum(r["accepted"] for r in rows) / max(1, sum(r["steps"] for r in rows)), 4)
    small, large = (of.get(f"majority:n=1,model={m}", {}) for m in (SMALL, LARGE))
    seeds = [s for s in of[one.name] if s in small and s in large]
    if not seeds or one.name.startswith("majority:n=1,model="):
        return found
    own, a, b = (bits([told[s] for s in seeds]) for told in (of[one.name], small, large))
    found |= change([x - y for x, y in zip(own, b)], f"over {LARGE}")
    found["speedup"] = round(
        statistics.median(large[s]["median_ms"] for s in seeds) / statistics.median(r["median_ms"] for r in rows), 3
    )
    if "large" in rows[0]:
        up = bits(rows, "large")
        found["share"] = share = round(sum(up) / len(up), 4)
        if one.routes:
            found |= change([x - (1 - share) * y - share * z for x, y, z in zip(own, a, b)], "over chance")
    return found


def missing(
    cells: dict[tuple, dict[str, Any]], kind: str, name: str, options: argparse.Namespace
) -> list[tuple[str, str, int, Arm]]:
    """Part, task, seed and arm of each cell of one kind of part and one task that is still to be filled."""
    parts = [QUALITY] if kind == QUALITY else [f"{'own' if options.own else '8b'}@{n}" for n in TIMED]
    return [
        (part, name, seed, one)
        for one in arms(name)
        for seed in range(options.seeds)
        for part in parts
        if (part == QUALITY or (one.timed and name in STEPPED)) and (part, name, seed, one.name) not in cells
    ]


def store(cells: dict[tuple, dict[str, Any]], options: argparse.Namespace) -> int:
    """Write the result of the cells that are there. Returns the number of those left."""
    left = sum(len(missing(cells, kind, name, options)) for kind in options.parts.split(",") for name in options.tasks)
    outcome = result("tier-study", summed(cells, options))
    outcome["trained"] = {
        file.parent.name: {k: v for k, v in json.loads(file.read_text()).items() if k in KEPT}
        for file in sorted(options.output.with_suffix(".models").glob("*/reward.json"))
    }
    outcome["cells"] = {"done": len(cells), "left": left}
    write_json(options.output, outcome)
    return left


async def run(
    cells: dict[tuple, dict[str, Any]],
    wanted: list[tuple[str, str, int, Arm]],
    engines: Engines,
    options: argparse.Namespace,
    end: float,
) -> None:
    """Fill the cells of ``wanted`` while there is time, and write the result after each."""
    file, left = options.output.with_suffix(".cells.jsonl"), list(wanted)
    try:
        while left and time.monotonic() < end:
            part, name, seed, one = left.pop(0)
            at_once = AT_ONCE if part == QUALITY else int(part.rpartition("@")[2])
            count = options.problems if part == QUALITY else options.timed * (1 if at_once == 1 else 4)
            endpoints = await engines(one.models(name))
            if part != QUALITY and (part, one.models(name)[1]) not in engines.warm:  # graphs are captured when used
                await cell(one, endpoints, name, min(count, 4 * at_once), 90 + seed, at_once)
                engines.warm.add((part, one.models(name)[1]))
            found = await cell(one, endpoints, name, count, options.first_seed + seed, at_once)
            share = found["right"].count("1") / count
            told = f"{share:.3f}, {found['median_ms']} ms, {found['s']} s"
            print(f"{part}, {name}, seed {seed}, {one.name}: {told}, {len(left)} left", flush=True)
            cells[part, name, seed, one.name] = found
            keep_cell(file, (part, name, seed, one.name), found)
            store(cells, options)
    finally:
        await engines.close()


@study("tier-study", needs_file=True)
def main(
    report: Report,
    *,
    minutes: float = 9.0,
    problems: int = 1000,
    timed: Annotated[int, "problems of a timed cell; four times as many at 16"] = 32,
    seeds: int = 3,
    first_seed: int = 0,
    tasks: Annotated[str, f"comma-separated: {', '.join(TASKS)}"] = ",".join(TASKS),
    parts: str = "timed,quality",
    own: Annotated[bool, "time the models at their own cost"] = False,
    steps: int = 300,
    replies: Annotated[int, "replies to train on"] = 0,
    held_out: int = 1024,
    scratch: Path = SCRATCH,
    device: Literal["cuda", "cpu"] | None = None,
) -> None:
    options = report.options
    options.tasks = options.tasks.split(",")
    if unknown := set(options.tasks) - set(TASKS):
        raise ConfigError(f"--tasks {', '.join(sorted(unknown))}: the tasks are {', '.join(TASKS)}")
    if unknown := set(options.parts.split(",")) - {"timed", QUALITY}:
        raise ConfigError(f"--parts {', '.join(sorted(unknown))}: the parts are timed and {QUALITY}")
    end, device = time.monotonic() + 60 * options.minutes, options.device or default_device()
    home = options.output.with_suffix(".models")
    home.mkdir(parents=True, exist_ok=True)
    cells = read_cells(options.output.with_suffix(".cells.jsonl"))
    for kind, name in ((kind, name) for kind in options.parts.split(",") for name in options.tasks):
        for made in ("", *TRAINED):
            wanted = missing(cells, kind, name, options)
            needed = any(f"{made}-{name}" in one.models(name) for *_, one in wanted)
            if needed and not (home / f"{made}-{name}" / "reward.json").exists() and time.monotonic() < end:
                train(f"{made}-{name}", home / f"{made}-{name}", options, device)
            models = {SMALL: SMALL, LARGE: LARGE}
            models |= {file.parent.name: str(file.parent) for file in home.glob(f"*-{name}/reward.json")}
            ready = [cell for cell in wanted if set(cell[-1].models(name)) <= set(models)]
            if not ready or time.monotonic() > end:
                continue
            wide = kind != QUALITY and not options.own
            engines = Engines(widened(models, name, options.scratch, device) if wide else models, device)
            if wide:  # shares of what is free when an engine starts
                engines.memory = {SMALL: 0.1, LARGE: 0.4, f"rater-{name}": 0.5}
            asyncio.run(run(cells, ready, engines, options, end))
    left = store(cells, options)
    print(f"{left} cells left" + ("; run the same command again" if left else ""))
