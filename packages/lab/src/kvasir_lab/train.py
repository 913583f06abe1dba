"""Train a lab model from nothing: `python -m kvasir_lab.train --recipe nano --out FOLDER`, or `kvasir lab train nano`.

This file is the command; the work is in `kvasir_lab.training`. It writes an HF folder with weights, tokenizer, card and
`training.json`. During the run, `state.safetensors` and `own.safetensors` (the documents made of the model's own
replies) in that folder hold what an exact `--resume` needs; both are removed at the end. The same code runs on a GPU
and, for a dry run, on a CPU (`--recipe smoke --device cpu`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.fused import why_no_chunks, why_not
from kvasir_lab.model import PLAIN, Compute, Model, compiled
from kvasir_lab.training.finish import finish
from kvasir_lab.training.loop import run
from kvasir_lab.training.recipe import Recipe, find
from kvasir_lab.training.state import NAME, load_state
from kvasir_lab.training.train_tokenizer import train as train_tokenizer
from kvasir_lab.training.trainer import Trainer


def duration(text: str) -> float:
    """Seconds in ``90``, ``90s``, ``8m`` or ``1.5h``. Raises argparse's error for anything else."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration: write 90s, 8m or 1h") from e
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' must be more than 0")
    return seconds


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvasir_lab.train", description="Train a lab model from nothing.")
    parser.add_argument("--recipe", default="nano", help="which model (default: nano)")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--minutes",
        type=float,
        help="train for this many minutes; compiling, sampling and the evaluation are not counted "
        "(default: the recipe's)",
    )
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument(
        "--stop-after",
        type=duration,
        help="stop and save after this much wall time, for example 8m; continue with --resume",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the state in the folder")
    parser.add_argument(
        "--continue-from",
        type=Path,
        help="continue a finished model: the last phase alone, on new replies of its own",
    )
    parser.add_argument("--also", type=Path, help="another finished model; its replies are judged and combined too")
    parser.add_argument("--seed", type=int, help="replaces the recipe's seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that make batches (default with a GPU: all cores but two; on a CPU: 0)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder with the lab's tokenizer.json (default: the shipped one, otherwise train one)",
    )
    parser.add_argument(
        "--save-every", type=duration, default=60.0, help="time between two saves of the state (default: 60s)"
    )
    parser.add_argument(
        "--attention",
        choices=("auto", "fused", "dense"),
        default="auto",
        help="how documents in packed rows are separated on a GPU",
    )
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile (it is used on a GPU only)")
    parser.add_argument("--commit", default="", help="the commit that the card names (default: git's HEAD)")
    options = parser.parse_args(argv)
    for name in ("minutes", "steps"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name} must be more than 0")
    if options.minutes is not None and options.steps is not None:
        parser.error("give --minutes or --steps, not both")
    return options


def _tokenizer(folder: Path | None) -> Any:
    if folder is not None:
        return lab_tokenizer.load(folder)
    try:
        return lab_tokenizer.shipped_tokenizer()
    except ConfigError:
        return train_tokenizer()


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _compute(options: argparse.Namespace, recipe: Recipe) -> Compute:
    """The compiled functions on a GPU, with the fused kernel when it works there; the plain ones otherwise."""
    if not options.device.startswith("cuda") or options.no_compile:
        return PLAIN
    if options.attention == "auto":
        reason = why_not(recipe.shape, options.device)
        print(
            "attention: "
            + ("fused" if reason is None else f"dense masks (slower), because the fused kernel fails here: {reason}"),
            flush=True,
        )
        return compiled(fused=reason is None)
    return compiled(fused=options.attention == "fused")


def _choose_recurrence(model: Model, device: str) -> None:
    """Compute recurrent layers by fla-core's chunks on a GPU where they work, and say so."""
    if not model.shape.recurrent or not device.startswith("cuda"):
        return
    reason = why_no_chunks(model.shape, device)
    if reason is None:
        model.train_by_chunks(torch.bfloat16)
    print("recurrence: " + ("fla-core" if reason is None else f"plain (slower): {reason}"), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Raises ConfigError for anything that cannot work, before any training."""
    options = arguments(argv)
    started, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    # Name folders without their path, which means nothing in a card.
    command = shlex.join(
        ["python", "-m", "kvasir_lab.train", *(Path(a).name if a.startswith("/") else a for a in argv or sys.argv[1:])]
    )
    recipe = find(options.recipe)
    if options.continue_from is not None:
        recipe = recipe.continued()
    recipe = recipe.replace(**{k: v for k, v in (("steps", options.steps), ("seed", options.seed)) if v is not None})
    cuda = options.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU: use --device cpu")
    out: Path = options.out
    if options.resume:
        load_state(out, recipe)  # refuse a bad state before the data is made
    elif (out / NAME).exists():
        raise ConfigError(f"{out / NAME} is an unfinished run: continue with --resume, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    workers = options.workers if options.workers is not None else (max(1, (os.cpu_count() or 4) - 2) if cuda else 0)
    # Make the data first: workers are forked from a process that has not touched the GPU yet.
    trainer = Trainer(recipe, _tokenizer(options.tokenizer), options.device, workers=workers)
    print(
        f"{recipe.name}: {trainer.model.num_parameters / 1e6:.2f}M parameters, "
        f"{recipe.tokens_per_step:,} tokens a step, {workers} data workers, "
        f"data ready after {time.monotonic() - started:.1f} s",
        flush=True,
    )
    trainer.compute = _compute(options, recipe)
    _choose_recurrence(trainer.model, options.device)
    if options.also is not None:
        trainer.others = [export.load(options.also, trainer.device)]
    if options.continue_from is not None:
        trainer.begin_with(options.continue_from)
    if options.resume:
        trainer.restore(out)
        if options.steps is not None:
            trainer.total = options.steps
    minutes = None if options.steps is not None else options.minutes or recipe.minutes
    if not run(trainer, out, minutes=minutes, stop_after=options.stop_after, save_every=options.save_every):
        print(f"stopped at step {trainer.done} of {trainer.total}; continue with --resume", flush=True)
        return
    trainer.save(out)  # if the evaluation is cut off, --resume goes straight to it
    finish(trainer, out, started, command, options.commit or _commit(), date)
    print(f"done: {out} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
