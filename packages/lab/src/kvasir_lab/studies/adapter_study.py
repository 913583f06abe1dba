"""Train adapters by several methods at equal parameters, and measure them mixed in one batch.

    python -m kvasir_lab.studies adapter_study OUT.json [--model base --steps 300 --problems 300]
    python -m kvasir_lab.studies adapter_study OUT.json --merged [--device cpu --steps 60 --rows 2 --problems 20]

Each of METHODS is trained on each of TASKS, exported to plain LoRA, and served by one engine: every problem of every
adapter, and of the model alone, is in one call. Tasks are those that the model was not, or little, trained on.

``--merged`` trains one LoRA and merges it. The merged checkpoint, and the model alone as the control, then read the
greedy replies that the adapter wrote at run time: where each would write another token, and how far log-probabilities
are apart.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from kvasir import LLM, LoRARequest, SamplingParams
from kvasir.bench.result import arm
from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.models import checkpoint
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters.training import Plan, train
from kvasir_lab.drafters.training import default_device
from kvasir_lab.evaluation.statistics import wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.study import Report, study

TASKS = ("chain:modulus=499", "reflect", "schema")
METHODS = ("lora", "paca", "corda")
MAX_NEW = 400


def make(folder: Path, model: str, method: str, task: str, options: argparse.Namespace) -> tuple[str, dict]:
    """Train one adapter and export it. Returns its name and the record of its training."""
    name, source = f"{method}-{task.split(':')[0]}", checkpoint.resolve(model)
    plan = Plan(method, task, rank=options.rank, steps=options.steps, rows=options.rows, seed=options.seed)
    record = train(plan, source, folder / f"{name}-trained", device=options.device or default_device())
    spec = f"to_lora:method={method},trained={folder / f'{name}-trained'}"
    convert(load_converter(spec), spec, source, folder / name)
    return name, record


def measure(folder: Path, model: str, names: dict[str, tuple[str, str]], options: argparse.Namespace) -> list[dict]:
    """One arm for each adapter, and one for the model alone on each task."""
    asked: list[tuple[str, str, object]] = []  # adapter or "", task, problem
    for task in TASKS:
        problems = load_task(task).problems("test", options.seed, options.problems)
        for name in ["", *(name for name, (_, own) in names.items() if own == task)]:
            asked += [(name, task, problem) for problem in problems]
    asked.sort(key=lambda entry: entry[2].prompt)  # adapters mix in every step
    ranks = [json.loads((folder / name / "adapter_config.json").read_text())["r"] for name in names]
    settings = {"enable_lora": True, "max_loras": len(names), "max_lora_rank": max(ranks)}
    with LLM(model, **settings, **({"device": options.device} if options.device else {})) as llm:
        adapters = [LoRARequest(name, 0, str(folder / name)) if name else None for name, _, _ in asked]
        params = SamplingParams(temperature=0, max_tokens=MAX_NEW)
        tokenizer = lab_tokenizer.load(checkpoint.resolve(model))  # it reads the marks of turns in a prompt
        ids = [tokenizer.encode(problem.prompt, add_special_tokens=False).ids for _, _, problem in asked]
        done = llm.generate([{"prompt_token_ids": i} for i in ids], params, lora_request=adapters)
    right: dict[tuple[str, str], list[bool]] = {}
    for (name, task, problem), output in zip(asked, done):
        right.setdefault((name, task), []).append(load_task(task).check(problem, output.outputs[0].text))
    arms = []
    for (name, task), found in right.items():
        low, high = wilson(sum(found), len(found))
        metrics = {"right": sum(found), "total": len(found), "share": round(sum(found) / len(found), 4)}
        metrics |= {"low": round(low, 4), "high": round(high, 4)}
        method = names[name][0] if name else "none"
        arms.append(arm(f"{method} on {task}", {"method": method, "task": task}, metrics))
    return arms


def compare(folder: Path, model: str, name: str, options: argparse.Namespace) -> list[dict]:
    """Merge the adapter, and compare it with itself at run time. The control is the model without the adapter."""
    source, spec = checkpoint.resolve(model), f"merge_lora:adapter={folder / name}"
    convert(load_converter(spec), spec, source, folder / "merged")
    tokenizer = lab_tokenizer.load(source)
    problems = load_task(TASKS[0]).problems("test", options.seed, options.problems)
    prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False).ids for problem in problems]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_NEW)
    settings = {"device": options.device} if options.device else {}

    def read(llm: LLM, written: list[list[int]], adapter: LoRARequest | None = None) -> list[list]:
        """The entry of each token of the replies, given the prompt and the reply so far."""
        whole = [{"prompt_token_ids": prompt + reply} for prompt, reply in zip(prompts, written)]
        done = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), lora_request=adapter)
        rows = [output.prompt_logprobs[len(prompt) :] for output, prompt in zip(done, prompts)]
        return [[row[token] for row, token in zip(*pair, strict=True)] for pair in zip(rows, written, strict=True)]

    def write(llm: LLM, adapter: LoRARequest | None = None) -> list[list[int]]:
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, lora_request=adapter)
        return [list(output.outputs[0].token_ids) for output in done]

    adapter = LoRARequest(name, 1, str(folder / name))
    with LLM(model, enable_lora=True, max_loras=1, max_lora_rank=options.rank, **settings) as llm:
        written = write(llm, adapter)
        entries = {"adapter": read(llm, written, adapter), "without": read(llm, written)}
        replies = {"without": write(llm)}
    with LLM(str(folder / "merged"), **settings) as llm:
        replies["merged"], entries["merged"] = write(llm), read(llm, written)
    arms, wanted = [], [entry for reply in entries["adapter"] for entry in reply]
    for name in ("merged", "without"):
        read_ = [entry for reply in entries[name] for entry in reply]
        apart = [abs(a.logprob - b.logprob) for a, b in zip(read_, wanted, strict=True)]
        metrics = {
            "replies": len(written),
            "equal_replies": sum(a == b for a, b in zip(replies[name], written, strict=True)),
            "tokens": len(wanted),
            "equal_tokens": sum(entry.rank == 1 for entry in read_),
            "largest_logprob_difference": max(apart),
            "mean_logprob_difference": sum(apart) / len(apart),
        }
        arms.append(arm(name, {"model": model, "task": TASKS[0], "rank": options.rank}, metrics))
    return arms


@study("adapters-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    steps: int = 300,
    rows: int = 8,
    rank: int = 8,
    problems: int = 300,
    device: Literal["cuda", "cpu"] | None = None,
    seed: int = 0,
    merged: Annotated[bool, "compare one adapter with its merged checkpoint"] = False,
) -> None:
    options = report.options
    with tempfile.TemporaryDirectory() as home:
        folder, names, records = Path(home), {}, {}
        if merged:
            report.case = f"merged-{model}"
            name, record = make(folder, model, "lora", TASKS[0], options)
            report.arms = compare(folder, model, name, options)
            report.arms[0]["config"]["plan"] = record["plan"]
            return
        for task in TASKS:
            for method in METHODS:
                name, records[f"{method} on {task}"] = make(folder, model, method, task, options)
                names[name] = method, task
        report.arms = measure(folder, model, names, options)
    for entry in report.arms:
        record = records.get(entry["name"])
        if record is not None:
            entry["metrics"] |= {"numbers": record["numbers"], "train_s": record["seconds"]}
            entry["config"]["plan"] = record["plan"]
