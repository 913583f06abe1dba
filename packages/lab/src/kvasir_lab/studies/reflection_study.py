"""Measure what logit processors do to accuracy and length: CyclicReflex, TIP, s1, their controls, and best of n.

    python -m kvasir_lab.studies reflection_study OUT.json [--minutes 6] [--problems 1000] [--seeds 3] [--twin FOLDER]

Two models answer the same problems of `reflect`, `chain` and `countdown`: ``base``, and a twin that re-checks right
steps half of the time. The twin is trained here (a LoRA of ``base`` on ``reflect:needless=0.5``, merged), unless --twin
names it. Answers are sampled at temperature 1. Thinking ends at the word "Answer".

Every cell (model, task, seed, arm) is written to OUT.cells.jsonl when it is done; the same command goes on with the
others. No cell begins after --minutes, so a run may be cut into several. Arms come in the order of their weight, and
OUT.json says which are complete.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kvasir import LLM, SamplingParams
from kvasir.bench.result import arm, finish, result
from kvasir.client.admission import admit
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.decoding.processor import PACKAGE, Processor
from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.technique import load
from kvasir.types import ProcessorParams, Thinking
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters.training import Plan, train
from kvasir_lab.cells import keep_cell, read_cells
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.statistics import bootstrap, wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.study import Report, study
from kvasir_lab.task import Problem, Task

TASKS = ("reflect", "chain", "countdown")
TWIN = "reflect:needless=0.5"
MAX_TOKENS = 400
BATCH = 512  # sequences at once on a GPU
POOL = 8  # replies to a problem for best of n
WORDS = "Wait|But|Alternatively"
GAP = {"reflect": "\n\n", "chain": "\n", "countdown": "\n"}  # what stands before "Answer"


@dataclass(frozen=True)
class Arm:
    """One way to answer. ``specs``: processors. ``control``: the arms of equal mean that it must beat. ``replies``: to
    each problem."""

    name: str
    specs: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    replies: int = 1


def arms(others: str) -> list[Arm]:
    """All arms, the most telling first. ``others``: random token ids, as many as there are words."""
    found = [Arm("plain")]
    for amplitude in (5, 3, 1):
        controls = []
        for sign in ("+", "-"):
            controls.append(f"constant {sign}{amplitude / 2:g}")
            found.append(Arm(controls[-1], (f"constant:value={sign}{amplitude / 2:g},words={WORDS}",)))
        found += [
            Arm(
                f"cyclic A={amplitude} T={period}",
                (f"cyclic_reflex:amplitude={amplitude},period={period},words={WORDS}",),
                tuple(controls),
            )
            for period in (80, 40)
        ]
    found.append(Arm("best of n", replies=POOL))
    found += [
        Arm(f"s1 budget={limit} ignore={ignored}", (f"budget:max_thinking={limit},num_ignore={ignored}",))
        for ignored in (1, 0, 2)
        for limit in (128, 64, 32, 256)
    ]
    found += [Arm(f"tip beta={beta}", (f"tip:beta={beta},words={WORDS}",), ("constant -2.5",)) for beta in (40, 600)]
    random_ids = (f"cyclic_reflex:amplitude={a},period=80,ids={others}" for a in (5, 3))
    found += [Arm(f"random ids A={a}", (spec,)) for a, spec in zip((5, 3), random_ids)]
    return found


class Answers:
    """Answers problems with one engine."""

    def __init__(self, model: str, device: str | None, share: float) -> None:
        options = {"device": device} if device else {}
        if (device or default_device()) != "cpu":
            options |= {"max_num_seqs": BATCH, "gpu_memory_utilization": share}
        self.llm = LLM(model, max_model_len=1024, **options)
        self.tokenizer = lab_tokenizer.load(checkpoint.resolve(model))
        self._count = 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def processors(self, specs: tuple[str, ...], gap: str) -> list[ProcessorParams]:
        """The processors of a request, for which thinking ends at "Answer"."""
        thinking = Thinking((), tuple(self.encode("Answer")), "inside", "Answer")
        found = []
        for spec in specs:
            made = load(PACKAGE, spec, Processor)
            ids = made.prepare(self.encode, thinking)
            if spec.startswith("budget"):  # texts with line breaks do not fit a spec
                ids |= {"first": tuple(self.encode(gap)), "wait": tuple(self.encode("Wait,"))}
            found.append(ProcessorParams(spec, ids, thinking))
        return found

    def __call__(self, problems: list[Problem], arm: Arm, seed: int, gap: str) -> list[list[list[int]]]:
        """The token ids of all replies: problem, reply."""
        engine, info = self.llm.engine, self.llm.engine.info
        processors, waiting, place = self.processors(arm.specs, gap), deque(), {}
        for i, problem in enumerate(problems):
            params = SamplingParams(
                n=arm.replies, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed * 1_000_003 + i, detokenize=False
            )
            self._count += 1
            request = admit(self.encode(problem.prompt), params, info, id=f"s{self._count}", arrival=time.monotonic())
            request.processors = processors
            place[request.id] = i
            waiting.append(request)
        replies: list[list[list[int]]] = [[[] for _ in range(arm.replies)] for _ in problems]
        most, running = 2 * engine.config.scheduler.max_num_seqs, 0
        while waiting or engine.has_work():
            while waiting and running + arm.replies <= max(most, arm.replies):
                running += arm.replies
                if bad := [e for e in engine.submit(waiting.popleft()) if e.kind == "error"]:
                    raise RuntimeError(bad[0].message)
            for event in engine.step():
                if event.kind == "error":
                    raise RuntimeError(event.message)
                if event.kind == "tokens":
                    replies[place[event.request_id]][event.branch] += event.token_ids
                    running -= event.finish_reason is not None
        return replies


def cell(answers: Answers, task: Task, problems: list[Problem], one: Arm, seed: int, gap: str) -> dict[str, Any]:
    """Answer all problems: right [N] as a string of 0 and 1 (of the vote of k replies by k), and tokens [N]."""
    began = time.monotonic()
    replies = answers(problems, one, seed, gap)
    texts = [[answers.tokenizer.decode(ids) for ids in row] for row in replies]
    right, spent = {}, {}
    for k in (1, 2, 4, 8) if one.replies > 1 else (1,):
        votes = [vote(task, row[:k]) for row in texts]
        right[k] = "".join(str(int(task.check(p, text))) for p, text in zip(problems, votes))
        spent[k] = [sum(map(len, row[:k])) for row in replies]
    tallies: dict[str, int] = {}
    if hasattr(task, "tally"):
        for problem, row in zip(problems, texts):
            for name, count in task.tally(problem, row[0]).items():
                tallies[name] = tallies.get(name, 0) + count
    cut = sum(len(ids) >= MAX_TOKENS for row in replies for ids in row)
    return {"right": right, "tokens": spent, "tally": tallies, "cut": cut, "s": round(time.monotonic() - began, 2)}


def vote(task: Task, texts: list[str]) -> str:
    """A reply with the most frequent answer, the first of its kind."""
    found = [task.answer(text) for text in texts]
    known = [answer for answer in found if answer is not None]
    return texts[found.index(max(known, key=known.count))] if known else texts[0]


def train_twin(folder: Path, options: argparse.Namespace) -> str:
    """Train the twin unless it is in ``folder`` already. Returns its folder."""
    done, source, device = folder / "twin", checkpoint.resolve(options.model), options.device or default_device()
    if not (done / "config.json").exists():
        plan = Plan("lora", TWIN, rank=16, steps=options.train_steps, rows=options.train_rows, seed=options.first_seed)
        train(plan, source, folder / "trained", device=device)
        spec = f"to_lora:method=lora,trained={folder / 'trained'}"
        convert(load_converter(spec), spec, source, folder / "adapter")
        spec = f"merge_lora:adapter={folder / 'adapter'}"
        convert(load_converter(spec), spec, source, done)
    return str(done)


# -------------------------------------------------------------------------------------------------------------- results


def summed(cells: dict[tuple, dict], planned: list[Arm], seeds: int) -> list[dict[str, Any]]:
    """One arm of the result for each model, task and way to answer, over the seeds that are there."""
    found = []
    for model, task in dict.fromkeys(key[:2] for key in cells):
        for one in planned:
            rows = [cells[model, task, s, one.name] for s in range(seeds) if (model, task, s, one.name) in cells]
            for k in rows[0]["right"] if rows else ():
                name = one.name if one.replies == 1 else f"best of {k}"
                metrics = scores(rows, k) | {"seeds": len(rows)}
                if one.replies == 1 and one.name != "plain":
                    metrics |= against(cells, (model, task), one.name, "plain", seeds)
                for control in one.control:
                    metrics |= against(cells, (model, task), one.name, control, seeds)
                beaten = [metrics.get(f"over {c}.low") for c in one.control]
                if beaten and None not in beaten:
                    metrics["beats_constant"] = all(low > 0 for low in beaten)
                config = {"model": model, "task": task, "processors": list(one.specs)}
                found.append(arm(f"{model} {task}: {name}", config, metrics))
    return found


def scores(rows: list[dict], k: str) -> dict[str, Any]:
    right = sum(row["right"][k].count("1") for row in rows)
    tokens = [t for row in rows for t in row["tokens"][k]]
    low, high = wilson(right, len(tokens))
    accuracy, mean = right / len(tokens), sum(tokens) / len(tokens)
    found = {"accuracy": round(accuracy, 4), "low": round(low, 4), "high": round(high, 4), "tokens": round(mean, 2)}
    tally = {name: sum(row["tally"].get(name, 0) for row in rows) for name in rows[0]["tally"]}
    return found | {"cut": sum(row["cut"] for row in rows), "E3": round(accuracy**2 / mean, 6)} | tally


def against(cells: dict, where: tuple, name: str, control: str, seeds: int) -> dict[str, float]:
    """The paired difference of accuracy to another arm, with its 95 % interval; empty where there is none to pair."""
    pairs = [(cells.get((*where, s, name)), cells.get((*where, s, control))) for s in range(seeds)]
    bits = [[np.array(list(c["right"]["1"]), int) for c in pair] for pair in pairs if None not in pair]
    if not bits:
        return {}
    difference = np.concatenate([a - b for a, b in bits])
    low, high = bootstrap(difference, resamples=2000)
    named = {"": difference.mean(), ".low": low, ".high": high}
    return {f"over {control}{part}": round(float(value), 4) for part, value in named.items()}


@study("reflection-study", needs_file=True)
def main(
    report: Report,
    *,
    minutes: float = 6.0,
    problems: int = 1000,
    seeds: int = 3,
    first_seed: int = 0,
    tasks: str = ",".join(TASKS),
    only: Annotated[str, "--arms", "only arms whose name begins with one of these, comma-separated"] = "",
    model: str = "base",
    twin: Annotated[str, "folder of the twin, or 'none'"] = "",
    train_steps: int = 300,
    train_rows: int = 32,
    device: Literal["cuda", "cpu"] | None = None,
) -> None:
    options = report.options
    end = time.monotonic() + 60 * options.minutes
    file = options.output.with_suffix(".cells.jsonl")
    cells = read_cells(file)
    if any(len(next(iter(found["tokens"].values()))) != options.problems for found in cells.values()):
        raise ConfigError(f"{file} has cells of another --problems: give the same, or another output")
    models = {"base": options.model}
    if options.twin != "none":
        models["twin"] = options.twin or train_twin(options.output.with_suffix(".models"), options)
    answers = {
        name: Answers(model, options.device, 0.8 / (len(models) - i)) for i, (name, model) in enumerate(models.items())
    }
    first = next(iter(answers.values()))
    words = {i for word in WORDS.split("|") for s in ("", " ") if len(ids := first.encode(s + word)) == 1 for i in ids}
    free = [i for i in range(first.llm.engine.info.tokenizer_size) if i > 64 and i not in words]
    planned = arms("|".join(map(str, random.Random(0).sample(free, len(words)))))
    chosen = tuple(filter(None, options.only.split(",")))
    wanted = [one for one in planned if not chosen or one.name.startswith(chosen)]
    left = [
        (model, task, seed, one)
        for seed in range(options.seeds)
        for one in wanted
        for model in models
        for task in options.tasks.split(",")
        if (model, task, seed, one.name) not in cells
    ]
    drawn: dict[tuple, list[Problem]] = {}
    while left and time.monotonic() < end:
        model, name, seed, one = left.pop(0)
        task = load_task(name)
        if (name, seed) not in drawn:
            drawn[name, seed] = task.problems("test", options.first_seed + seed, options.problems)
        found = cell(answers[model], task, drawn[name, seed], one, seed, GAP.get(name, "\n"))
        found = json.loads(json.dumps(found))
        cells[model, name, seed, one.name] = found
        keep_cell(file, (model, name, seed, one.name), found)
        share = found["right"]["1"].count("1") / options.problems
        print(f"{model} {name} seed {seed} {one.name}: {share:.3f}, {found['s']} s, {len(left)} left", flush=True)
    outcome = result("reflection-study", summed(cells, planned, options.seeds))
    outcome["cells"] = {"done": len(cells), "left": len(left)}
    finish(outcome, options.output)
    print(f"{len(cells)} cells done, {len(left)} left" + ("; run the same command again" if left else ""))
