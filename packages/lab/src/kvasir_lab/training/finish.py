"""The end of a run: export the weights, evaluate them, and write ``training.json`` and the card."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvasir_lab import export
from kvasir_lab.evaluation.evaluate import Score, evaluate
from kvasir_lab.sample import serving_copy
from kvasir_lab.training.card import card
from kvasir_lab.training.report import curves
from kvasir_lab.training.state import NAME, OWN_NAME
from kvasir_lab.training.trainer import Trainer


def finish(trainer: Trainer, out: Path, started: float, command: str, commit: str, date: str) -> list[Score]:
    """Export the weights, evaluate the exported folder, then write the card. Returns the scores.

    In this order, no later failure loses the weights.
    """
    recipe = trainer.recipe
    export.export(trainer.model, trainer.tokenizer, out)
    print(f"weights written to {out} after {time.monotonic() - started:.0f} s", flush=True)
    device = (
        torch.cuda.get_device_name()
        if trainer.device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    record: dict[str, Any] = {
        "recipe": recipe.name,
        "parameters": trainer.model.num_parameters,
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "train_seconds": trainer.seconds,
        "own_seconds": trainer.own_seconds,
        "device": device,
        "seed": recipe.seed,
        "scores": [],
        "curves": [],
        "history": trainer.history,
        "before": trainer.before,
        "attention": "fused" if trainer.compute.fused else "dense",
        "command": command,
        "commit": commit,
        "date": date,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors")},
        },
    }

    def write() -> None:
        record["total_seconds"] = time.monotonic() - started
        (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
        (out / "README.md").write_text(card(recipe, record))

    write()  # a card without scores, in case the command is cut off during the evaluation
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    model = serving_copy(export.load(out, trainer.device))
    scores = []
    for spec, count in recipe.evaluate:
        begin = time.monotonic()
        scores.append(evaluate(model, trainer.tokenizer, spec, count, seed=recipe.seed, max_new=recipe.reply_tokens))
        print(f"{scores[-1]} after {time.monotonic() - begin:.1f} s", flush=True)
        record["scores"].append(
            {
                **dataclasses.asdict(scores[-1]),
                "share": scores[-1].share,
                "low": scores[-1].interval[0],
                "high": scores[-1].interval[1],
            }
        )
    write()
    for row in curves(model, trainer.tokenizer, recipe):
        print(
            "  " + ", ".join(f"{k} {v:.1%}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
        )
        record["curves"].append(row)
    write()
    for name in (NAME, OWN_NAME):
        (out / name).unlink(missing_ok=True)
    return scores
