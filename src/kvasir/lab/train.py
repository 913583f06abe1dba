"""Train a lab model from nothing: `python -m kvasir.lab.train --recipe embedded --out FOLDER --minutes 5`.

Writes an HF folder with weights, tokenizer, card and `training.json`. While it runs, `state.safetensors` in the same folder holds
everything an exact resume needs (`--resume`); it is removed at the end. The same code runs on a GPU and, for a dry run, on
a CPU (`--recipe smoke --device cpu`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.lab import export
from kvasir.lab import tokenizer as lab_tokenizer
from kvasir.lab.card import card
from kvasir.lab.data import Batch, Mixture
from kvasir.lab.evaluate import Score, evaluate, mean_loss
from kvasir.lab.model import Model, losses
from kvasir.lab.progress import Progress
from kvasir.lab.recipe import Recipe, find
from kvasir.lab.state import NAME, load_state, save_state

LOOK = 20  # steps between two looks at the device: each one waits for it
WARM = 8  # steps that compile and warm up, not counted as training time
VALIDATIONS = 10


class Trainer:
    """One run: model, optimizer, data and schedule, advanced by `step`."""

    def __init__(self, recipe: Recipe, tokenizer: Any, device: str, *, compiled: bool, workers: int) -> None:
        self.recipe, self.tokenizer, self.device, self.workers = recipe, tokenizer, torch.device(device), workers
        self.model = Model(recipe.shape, recipe.seed).to(self.device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=self.device.type == "cuda")
        self.losses = torch.compile(losses, dynamic=False) if compiled else losses
        self.mixture = Mixture(recipe.rows, tokenizer, recipe.seed, pool=recipe.pool)
        self.validation = Mixture(recipe.validate, tokenizer, recipe.seed, split="validation", pool=recipe.pool).batch(0)
        self.done, self.total, self.tokens, self.seconds = 0, recipe.steps, 0, 0.0
        self.history: list[dict[str, float]] = []

    def rate(self, step: int) -> float:
        """The learning rate of ``step``: linear warm-up, then a cosine to the end of the run as now planned."""
        r = self.recipe
        warm = min(r.warmup, max(1, self.total // 10))
        if step < warm:
            return r.lr * (step + 1) / warm
        fraction = min(1.0, (step - warm) / max(1, self.total - warm))
        return r.lr * (r.final + (1 - r.final) * 0.5 * (1 + math.cos(math.pi * fraction)))

    def step(self, batches: list[Batch]) -> torch.Tensor:
        """One update. Returns [3] on the device: mean cross-entropy, mean z term, share of guesses right."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.done)
        trained = sum(b.num_trained for b in batches)
        report = torch.zeros(3, device=self.device)
        for part, batch in zip(self.recipe.rows, batches, strict=True):
            ids, documents, mask = (self._move(a) for a in (batch.ids, batch.documents, batch.trained))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                sums = self.losses(self.model, ids.long(), None if part.whole else documents, mask)
            ((sums[0] + self.recipe.z_loss * sums[1]) / trained).backward()
            report += sums.detach() / trained
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += sum(b.num_tokens for b in batches)
        return report

    def _move(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def validate(self, report: list[float]) -> dict[str, float]:
        row = {"step": self.done, "seconds": self.seconds, "lr": self.rate(self.done), "train loss": report[0]}
        for part, batch in zip(self.recipe.validate, self.validation, strict=True):
            name = "+".join(spec.split(":")[0] for spec in part.mix)
            row[f"{name} loss"], row[f"{name} right"] = mean_loss(self.model, batch, whole=part.whole)
        self.history.append(row)
        return row

    def save(self, folder: Path) -> None:
        run = {"recipe": self.recipe.name, "fingerprint": self.recipe.fingerprint(), "step": self.done, "total": self.total, "tokens": self.tokens,
               "seconds": self.seconds, "history": self.history}
        tensors = {f"model.{name}": p for name, p in self.model.named_parameters()}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        save_state(folder, run, tensors)

    def restore(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called. Raises ConfigError for a state that does not fit this run."""
        run, tensors = load_state(folder, self.recipe)
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, i, name = key.split(".", 2)
                moments.setdefault(int(i), {})[name] = value
        try:
            self.model.load_state_dict({key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")})
            self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        except (RuntimeError, ValueError) as e:
            raise ConfigError(f"{folder / NAME} does not fit the model: {e}") from e
        self.done, self.total, self.tokens = run["step"], run["total"], run["tokens"]
        self.seconds, self.history = run["seconds"], run["history"]


def run(trainer: Trainer, out: Path, *, minutes: float | None, stop_after: float | None, save_every: float) -> bool:
    """Train to the planned end. Returns False when ``stop_after`` seconds or Ctrl-C ended it early (state saved).

    With ``minutes``, the number of steps is planned anew from the measured speed at every look, so that the cosine ends when
    the time does. Raises ConfigError when the loss is no longer a number.
    """
    begin = saved = time.monotonic()
    first, mark, mark_step = trainer.done, None, trainer.done
    base = trainer.seconds
    stream = trainer.mixture.stream(trainer.done, trainer.workers)
    with Progress(trainer.recipe.name) as progress:
        try:
            while trainer.done < trainer.total:
                report = trainer.step(next(stream))
                if mark is None and trainer.done - first >= min(WARM, LOOK):
                    float(report[0])  # waits for the device: compiling and warming up end here
                    mark, mark_step = time.monotonic(), trainer.done
                    progress.say(f"warm after {mark - begin:.1f} s")
                if trainer.done % LOOK and trainer.done != trainer.total:
                    continue
                values, now = report.tolist(), time.monotonic()
                if not all(map(math.isfinite, values)):
                    raise ConfigError(f"the loss is {values[0]} at step {trainer.done}: lower the recipe's lr")
                speed = 0.0
                if mark is not None and trainer.done > mark_step:
                    trainer.seconds = base + now - mark
                    speed = (trainer.done - mark_step) / (now - mark)
                    if minutes is not None:
                        trainer.total = trainer.done + max(0, int((minutes * 60 - trainer.seconds) * speed))
                progress.show(trainer.done, trainer.total, f"loss {values[0]:.3f} right {values[2]:.1%} lr {trainer.rate(trainer.done):.1e} "
                              f"{speed * trainer.tokens / trainer.done / 1e6:.3f}M tok/s {trainer.seconds:.0f} s")
                if trainer.done >= len(trainer.history) * trainer.total / VALIDATIONS or trainer.done >= trainer.total:
                    row = trainer.validate(values)
                    progress.say("  held out: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items() if k.endswith(("loss", "right"))))
                if now - saved > save_every:
                    trainer.save(out)
                    saved = now
                if stop_after is not None and now - begin > stop_after and trainer.done < trainer.total:
                    trainer.save(out)
                    return False
        except KeyboardInterrupt:
            trainer.save(out)
            return False
        finally:
            stream.close()
    return True


def finish(trainer: Trainer, out: Path, started: float, command: str, commit: str, date: str) -> list[Score]:
    """Export, then evaluate what was exported, then write the card: nothing that fails later loses the weights."""
    recipe = trainer.recipe
    export.export(trainer.model, trainer.tokenizer, out)
    print(f"weights written to {out} after {time.monotonic() - started:.0f} s", flush=True)
    model = export.load(out, trainer.device)
    scores = []
    for spec, count in recipe.evaluate:
        scores.append(evaluate(model, trainer.tokenizer, spec, count, seed=recipe.seed, max_new=recipe.reply_tokens))
        print(scores[-1], flush=True)
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    record = {"recipe": recipe.name, "parameters": trainer.model.num_parameters, "steps": trainer.done, "tokens": trainer.tokens,
              "train_seconds": trainer.seconds, "total_seconds": time.monotonic() - started, "device": device, "seed": recipe.seed,
              "scores": [{**dataclasses.asdict(s), "share": s.share, "low": s.interval[0], "high": s.interval[1]} for s in scores],
              "history": trainer.history, "command": command, "commit": commit, "date": date,
              "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors")}}}
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(card(recipe, record))
    (out / NAME).unlink(missing_ok=True)
    return scores


def duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``8m`` or ``1.5h``. Raises argparse's error for anything else."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"'{text}' is no duration: write 90s, 8m or 1h") from e
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' must be more than nothing")
    return seconds


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvasir.lab.train", description="Train a lab model from nothing.")
    parser.add_argument("--recipe", default="embedded", help="which model (default: embedded)")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--minutes", type=float, help="train for this long, compiling not counted; the schedule follows the measured speed")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of the recipe's")
    parser.add_argument("--stop-after", type=duration, help="stop and save after this much wall time, such as 8m; go on with --resume")
    parser.add_argument("--resume", action="store_true", help="go on from the state in the folder")
    parser.add_argument("--seed", type=int, help="another seed than the recipe's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, help="threads that make batches ahead (default: 4 on a GPU, 0 on a CPU)")
    parser.add_argument("--tokenizer", type=Path, help="folder with the lab's tokenizer.json (default: the shipped one, else trained anew)")
    parser.add_argument("--save-every", type=duration, default=60.0, help="between two saves of the state (default: 60s)")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile (it is used on a GPU only)")
    parser.add_argument("--commit", default="", help="the commit to name in the card (default: asked of git)")
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
    shipped = Path(str(files("kvasir").joinpath("assets/embedded")))
    return lab_tokenizer.load(shipped) if (shipped / "tokenizer.json").is_file() else lab_tokenizer.train()


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def main(argv: list[str] | None = None) -> None:
    """Run from the command line. Raises ConfigError for anything that cannot work, before any training."""
    options = arguments(argv)
    started, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    command = shlex.join(["python", "-m", "kvasir.lab.train", *(sys.argv[1:] if argv is None else argv)])
    recipe = find(options.recipe)
    recipe = recipe.replace(**{k: v for k, v in (("steps", options.steps), ("seed", options.seed)) if v is not None})
    cuda = options.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU: use --device cpu")
    out: Path = options.out
    if options.resume:
        load_state(out, recipe)  # refuse what cannot be resumed before the data is made
    elif (out / NAME).exists():
        raise ConfigError(f"{out / NAME} is an unfinished run: go on with --resume, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    workers = options.workers if options.workers is not None else (4 if cuda else 0)
    trainer = Trainer(recipe, _tokenizer(options.tokenizer), options.device, compiled=cuda and not options.no_compile, workers=workers)
    print(f"{recipe.name}: {trainer.model.num_parameters / 1e6:.2f}M parameters, {recipe.tokens_per_step:,} tokens a step, data ready after "
          f"{time.monotonic() - started:.1f} s", flush=True)
    if options.resume:
        trainer.restore(out)
        if options.steps is not None:
            trainer.total = options.steps
    if not run(trainer, out, minutes=options.minutes, stop_after=options.stop_after, save_every=options.save_every):
        print(f"stopped at step {trainer.done} of {trainer.total}; go on with --resume", flush=True)
        return
    finish(trainer, out, started, command, options.commit or _commit(), date)
    print(f"done: {out} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
