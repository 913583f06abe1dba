"""Train successive checkpoints of a lab model, for `kvasir bench rollouts --checkpoint`.

    python -m kvasir_lab.studies successive_checkpoints OUT [options]

Rounds of reinforcement learning sample the same problems from a policy that moves between them. Here it moves by
training: OUT/0 is the model as it is; OUT/1 and later ones are the same model some steps on, trained on problems of the
rollouts' tasks (of the training split: rollouts use the test split). OUT/report.json says how far the weights moved,
how many samples of the test problems differ from those of the checkpoint before (temperature 1, the same noise for
all), and how many are right. Four times 20 steps of `base` take five minutes of one CPU core, and seconds on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import torch

from kvasir.api.offline.llm import LLM
from kvasir.config import EngineConfig
from kvasir.models.checkpoint import resolve
from kvasir.types import SamplingParams
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.bench.rollouts import VERIFIABLE
from kvasir_lab.lookup import load_task
from kvasir_lab.study import Arms, Report, study
from kvasir_lab.training.data import Rows
from kvasir_lab.training.recipe import Recipe, find
from kvasir_lab.training.trainer import Trainer


def recipe_of(name: str, options: argparse.Namespace) -> Recipe:
    """The model's recipe on the rollouts' tasks alone, at a small rate that does not fall."""
    mix = dict.fromkeys(VERIFIABLE, 1.0)
    return find(name).replace(
        rows=(Rows(options.rows, 512, mix),),
        validate=(Rows(1, 512, mix),),
        phases=(),
        own=None,
        lr=options.lr,
        final=1.0,
        warmup=options.steps // 4,
        steps=options.steps * (options.count - 1),
        seed=options.seed,
        pool=256,
    )


def moved(before: list[torch.Tensor], trainer: Trainer) -> float:
    """Distance that the weights moved, as a share of their size."""
    now = [p.detach() for p in trainer.model.parameters()]
    return math.sqrt(
        sum(float((a - b).square().sum()) for a, b in zip(now, before)) / sum(float(b.square().sum()) for b in before)
    )


def train(folder: Path, options: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Write the checkpoints. Returns a row for each."""
    shutil.copytree(folder, options.out / "0", dirs_exist_ok=True)
    trainer = Trainer(recipe_of(options.recipe, options), tokenizer, options.device, workers=0)
    trainer.begin_with(folder)
    stream, rows = trainer.mixture.stream(0, 0), [{"checkpoint": 0, "steps": 0}]
    for number in range(1, options.count):
        began, before, loss = time.monotonic(), [p.detach().clone() for p in trainer.model.parameters()], 0.0
        for batches in itertools.islice(stream, options.steps):
            loss += float(trainer.step(batches)[0]) / options.steps
        export.export(trainer.model, tokenizer, options.out / str(number))
        rows.append(
            {
                "checkpoint": number,
                "steps": trainer.done,
                "tokens": trainer.tokens,
                "loss": round(loss, 4),
                "weights_moved": round(moved(before, trainer), 5),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def judge(rows: list[dict[str, Any]], options: argparse.Namespace, tokenizer: Any) -> None:
    """Add to each row what its checkpoint says to the test problems, and how much of it is new."""
    tasks = [load_task(spec) for spec in VERIFIABLE]
    asked = [(task, problem) for task in tasks for problem in task.problems("test", 0, options.problems)]
    prompts = [{"prompt_token_ids": tokenizer.encode(p.prompt, add_special_tokens=False).ids} for _, p in asked]
    stop = tokenizer.token_to_id("<|im_end|>")
    params = [
        SamplingParams(temperature=1.0, max_tokens=384, stop_token_ids=(stop,), seed=i, detokenize=False)
        for i in range(len(asked))
    ]
    settings = {"device": options.device, "max_num_seqs": 64, "enable_prefix_caching": False}
    before: list[list[int]] | None = None
    with LLM(config=EngineConfig.of(model=str(options.out / "0"), **settings)) as llm:
        for row in rows:
            llm.engine.update_weights(str(options.out / str(row["checkpoint"])))
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
            right = [
                task.check(problem, tokenizer.decode(ids, skip_special_tokens=True))
                for (task, problem), ids in zip(asked, found)
            ]
            row |= {"right": round(sum(right) / len(right), 4), "samples": len(found)}
            if before is not None:
                row["changed"] = round(sum(a != b for a, b in zip(found, before)) / len(found), 4)
            before = found
            print(json.dumps(row), flush=True)


@study("successive-checkpoints-{recipe}")
def main(
    report: Report,
    *,
    recipe: Annotated[str, "which lab model"] = "base",
    model: Annotated[str, "a folder or name with its weights (default: the shipped ones)"] = "",
    count: Annotated[int, "checkpoints, the first of which is the model as it is"] = 5,
    steps: Annotated[int, "training steps between two"] = 20,
    rows: Annotated[int, "rows of 512 tokens a step"] = 4,
    lr: float = 1e-4,
    problems: Annotated[int, "test problems of each task for the report"] = 16,
    seed: int = 1,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> Arms:
    options, folder = report.options, resolve(model or recipe)
    options.out, report.output = report.output, report.output / "report.json"
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = lab_tokenizer.load(folder)
    found = train(folder, options, tokenizer)
    judge(found, options, tokenizer)
    apart = ("out", "output", "model", "commit")
    setting = {name: value for name, value in vars(options).items() if name not in apart}
    for row in found:
        number = row.pop("checkpoint")
        yield f"checkpoint {number}", setting | {"tasks": list(VERIFIABLE)}, row
