"""Train a process reward model: a lab model that says Yes or No to the first lines of a solution.

It learns the form ``judge_step`` on one task, as a LoRA that is merged into a copy of the model. Searches ask it as
they ask any judge (``beam:judge=NAME``): P(Yes) as the next token. Labels are the task's own: lines are right while
they are those of its solution. Published reward models learn from the outcomes of rollouts or from people instead
(Lightman et al. 2023, arXiv 2305.20050).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters import training
from kvasir_lab.forms import YES_NO, FormProblem
from kvasir_lab.lookup import load_task

BATCH = 32  # prompts of a forward while measuring


@dataclass(frozen=True)
class Plan:
    """A training run. ``rows``: of a batch, of 512 tokens. ``count``: unseen beginnings to measure on."""

    task: str = "chain"
    rank: int = 16
    steps: int = 300
    rows: int = 32
    count: int = 1000
    seed: int = 0
    length: int = 512


def train(
    plan: Plan, source: Path, out: Path, say: Callable[[str], None] = print, device: str = "cpu"
) -> dict[str, Any]:
    """Train the judge and write it to ``out``, a model of its own. Returns the record, also in ``reward.json``.

    The record has the area under the curve before and after, on beginnings of unseen problems, and by depth.
    """
    form = f"judge_step/{plan.task}"
    how = training.Plan(
        "lora", form, rank=plan.rank, steps=plan.steps, rows=plan.rows, length=plan.length, seed=plan.seed
    )
    with tempfile.TemporaryDirectory() as home:
        record = training.train(how, source, Path(home) / "trained", say, device)
        for spec, target in (
            (f"to_lora:method=lora,trained={home}/trained", Path(home) / "adapter"),
            (f"merge_lora:adapter={home}/adapter", out),
        ):
            convert(load_converter(spec), spec, source, target)
    cases = load_task(form).problems("test", plan.seed, plan.count)
    record["before"], record["after"] = (measure(folder, cases, device) for folder in (source, out))
    say(f"area under the curve: {record['before']['all']} before, {record['after']['all']} after")
    (out / "reward.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


@torch.no_grad()
def beliefs(folder: Path, cases: Sequence[FormProblem], device: str = "cpu") -> list[float]:
    """P(Yes), of Yes and No, as the model's next token after each case."""
    model, tokenizer = export.load(folder, device).eval(), lab_tokenizer.load(folder)
    yes, no = (tokenizer.encode(word, add_special_tokens=False).ids[0] for word in YES_NO[::-1])
    prompts = [tokenizer.encode(case.prompt, add_special_tokens=False).ids for case in cases]
    found = [0.0] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), BATCH):
        part = order[first : first + BATCH]
        wide = max(len(prompts[i]) for i in part)
        ids = torch.tensor([prompts[i] + [0] * (wide - len(prompts[i])) for i in part], device=device)
        logits = model(ids)[torch.arange(len(part)), [len(prompts[i]) - 1 for i in part]].float()
        for i, p in zip(part, (logits[:, yes] - logits[:, no]).sigmoid().tolist()):
            found[i] = p
    return found


def measure(folder: Path, cases: Sequence[FormProblem], device: str = "cpu") -> dict[str, float | None]:
    """The area under the curve of all cases, and by number of lines (4 and more together)."""
    scores = np.array(beliefs(folder, cases, device))
    right = np.array([case.right[0] for case in cases])
    lines = np.array([min(4, case.candidates[0].count("\n")) for case in cases])
    return {"all": area(scores, right)} | {
        f"{depth} lines": area(scores[lines == depth], right[lines == depth]) for depth in range(5)
    }


def area(scores: np.ndarray, right: np.ndarray) -> float | None:
    """Chance that a right case has the higher score than a wrong one, ties half; None where one kind is missing."""
    good, bad = scores[right], scores[~right]
    if not len(good) or not len(bad):
        return None
    above = (good[:, None] > bad).mean() + 0.5 * (good[:, None] == bad).mean()
    return round(float(above), 4)
