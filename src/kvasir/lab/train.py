"""Train a lab model from nothing: `python -m kvasir.lab.train --recipe nano --out FOLDER`, or `kvasir lab train nano`.

Writes an HF folder with weights, tokenizer, card and `training.json`. While it runs, `state.safetensors` in the same folder (and
`own.safetensors`, the documents made of the model's own replies) hold everything an exact resume needs (`--resume`); both are removed
at the end. The same code runs on a GPU and, for a dry run, on a CPU (`--recipe smoke --device cpu`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir.lab import export
from kvasir.lab import tokenizer as lab_tokenizer
from kvasir.lab.card import card
from kvasir.lab.data import Batch, Mixture
from kvasir.lab.evaluate import Score, evaluate, mean_loss
from kvasir.lab.fused import why_not
from kvasir.lab.model import PLAIN, Compute, Model, compiled, losses
from kvasir.lab.own import own_documents
from kvasir.lab.progress import Progress
from kvasir.lab.recipe import Recipe, find
from kvasir.lab.report import curves
from kvasir.lab.sample import serving_copy
from kvasir.lab.sheet import shipped_tokenizer
from kvasir.lab.state import NAME, OWN_NAME, load_own, load_state, save_own, save_state

LOOK = 20  # steps between two looks at the device: each one waits for it
WARM = 8  # steps that compile and warm up, not counted as training time
VALIDATIONS = 10
VALIDATED = 256  # ready documents of a source for the held-out rows


class Trainer:
    """One run: model, optimizer, data and schedule, advanced by `step`."""

    def __init__(self, recipe: Recipe, tokenizer: Any, device: str, *, workers: int) -> None:
        self.recipe, self.tokenizer, self.device, self.workers = recipe, tokenizer, torch.device(device), workers
        self.mixture = Mixture(
            recipe.rows,
            tokenizer,
            recipe.seed,
            later=[p.rows for p in recipe.phases],
            pool=recipe.pool,
            workers=workers,
        )
        self.validation = Mixture(
            recipe.validate,
            tokenizer,
            recipe.seed,
            split="validation",
            pool=min(recipe.pool or VALIDATED, VALIDATED),
            workers=workers,
        ).batch(0)
        self.model = Model(recipe.shape, recipe.seed).to(self.device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=self.device.type == "cuda")
        self.compute: Compute = PLAIN
        self.done, self.total, self.tokens, self.seconds, self.own_seconds, self.phase = 0, recipe.steps, 0, 0.0, 0.0, 0
        self.history: list[dict[str, float]] = []
        self.before: dict[str, Any] = {}
        self.others: list[Model] = []

    def begin_with(self, folder: Path) -> None:
        """Take the weights of a finished model. Raises ConfigError when they are another shape's."""
        before = export.load(folder)
        if before.shape != self.recipe.shape:
            raise ConfigError(
                f"{folder} holds a model of another shape than the recipe '{self.recipe.name}': {before.shape}"
            )
        self.model.load_state_dict(before.state_dict())
        record = folder / "training.json"
        if record.is_file():
            told = json.loads(record.read_text())
            self.before = {
                key: told[key]
                for key in ("command", "commit", "steps", "tokens", "train_seconds", "own_seconds")
                if key in told
            }

    def advance(self, out: Path, say: Any) -> bool:
        """Enter the next phase when its time has come; sample the model's own candidates when it wants them. Returns whether it did."""
        if self.phase == len(self.recipe.phases) or self.done < self.recipe.phases[self.phase].start * self.total:
            return False
        begin = time.monotonic()
        phase = self.recipe.phases[self.phase]
        self.phase += 1
        if phase.own:
            assert self.recipe.own is not None
            made = own_documents(
                serving_copy(self.model),
                self.tokenizer,
                self.recipe.own,
                self.recipe.seed + self.phase,
                self.workers,
                say,
                others=[serving_copy(other) for other in self.others],
            )
            for name, documents in made.items():
                self.mixture.add(name, documents)
            save_own(out, self.phase, made)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.own_seconds += time.monotonic() - begin
        say(f"  phase {self.phase + 1} from step {self.done}, after {time.monotonic() - begin:.1f} s")
        self.save(out)
        return True

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
        for part, batch in zip(self.mixture.phases[self.phase], batches, strict=True):
            ids, documents, mask, chosen = (
                self._move(a) for a in (batch.ids, batch.documents, batch.trained, batch.chosen)
            )
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                sums = losses(
                    self.model, ids.long(), None if part.whole else documents, mask, self.compute, chosen.long()
                )
            ((sums[0] + self.recipe.z_loss * sums[1]) / trained).backward()
            report += sums.detach() / trained
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += sum(b.num_tokens for b in batches)
        return report

    def first_step(self, batches: list[Batch], say: Any) -> torch.Tensor:
        """The step that compiles. Should the fused kernel fail to, dense masks take its place: a slow run is better than none."""
        try:
            return self.step(batches)
        except RuntimeError as e:
            if not self.compute.fused:
                raise
            say(f"the fused kernel failed ({str(e).strip().splitlines()[0]}): dense masks from here on, slower")
            self.optimizer.zero_grad(set_to_none=True)
            self.compute = compiled(fused=False)
            return self.step(batches)

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
        run = {
            "recipe": self.recipe.name,
            "fingerprint": self.recipe.fingerprint(),
            "step": self.done,
            "total": self.total,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "phase": self.phase,
            "own_seconds": self.own_seconds,
        }
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
            self.model.load_state_dict(
                {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
            )
            self.optimizer.load_state_dict(
                {"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]}
            )
        except (RuntimeError, ValueError) as e:
            raise ConfigError(f"{folder / NAME} does not fit the model: {e}") from e
        self.done, self.total, self.tokens = run["step"], run["total"], run["tokens"]
        self.seconds, self.history = run["seconds"], run["history"]
        self.phase, self.own_seconds = run["phase"], run["own_seconds"]
        sampled = [i for i, phase in enumerate(self.recipe.phases[: self.phase], 1) if phase.own]
        if sampled:
            for name, documents in load_own(folder, sampled[-1]).items():
                self.mixture.add(name, documents)


def run(trainer: Trainer, out: Path, *, minutes: float | None, stop_after: float | None, save_every: float) -> bool:
    """Train to the planned end. Returns False when ``stop_after`` seconds or Ctrl-C ended it early (state saved).

    With ``minutes``, the number of steps is planned anew from the measured speed at every look, so that the cosine ends when
    the time does. Raises ConfigError when the loss is no longer a number.
    """
    begin = saved = time.monotonic()
    clock = _Clock(trainer)
    with Progress(trainer.recipe.name) as progress:
        trainer.advance(out, progress.say)
        stream = trainer.mixture.stream(trainer.done, trainer.workers, trainer.phase)
        try:
            while trainer.done < trainer.total:
                batches = clock.wait(stream)
                report = (
                    trainer.first_step(batches, progress.say) if trainer.done == clock.first else trainer.step(batches)
                )
                if clock.warming():
                    float(report[0])  # waits for the device: compiling and warming up end here
                    progress.say(f"warm after {clock.start():.1f} s")
                if trainer.done % LOOK and trainer.done != trainer.total:
                    continue
                values = clock.device(report)
                if not all(map(math.isfinite, values)):
                    raise ConfigError(f"the loss is {values[0]} at step {trainer.done}: lower the recipe's lr")
                speed = clock.look()
                if minutes is not None and speed:
                    trainer.total = trainer.done + max(0, int((minutes * 60 - trainer.seconds) * speed))
                million = speed * trainer.tokens / trainer.done / 1e6
                progress.show(
                    trainer.done,
                    trainer.total,
                    f"loss {values[0]:.3f} right {values[2]:.1%} lr {trainer.rate(trainer.done):.1e} "
                    f"{million:.3f}M tok/s, waits: {clock.waited:.0%} for data, {clock.waited_device:.0%} for the device, "
                    f"{trainer.seconds:.0f} s",
                )
                if trainer.done >= len(trainer.history) * trainer.total / VALIDATIONS or trainer.done >= trainer.total:
                    row = trainer.validate(values)
                    progress.say(
                        "  held out: "
                        + ", ".join(f"{k} {v:.4f}" for k, v in row.items() if k.endswith(("loss", "right")))
                    )
                now = time.monotonic()
                if stop_after is not None and now - begin > stop_after and trainer.done < trainer.total:
                    trainer.save(out)
                    return False
                if now - saved > save_every:
                    trainer.save(out)
                    saved = now
                if trainer.done < trainer.total and trainer.advance(out, progress.say):
                    clock.skip()
                    stream.close()
                    stream = trainer.mixture.stream(trainer.done, trainer.workers, trainer.phase)
        except KeyboardInterrupt:
            # Ctrl-C may strike between two updates of one step; the state of the last look is whole, so that one stays when there is one.
            if not (out / NAME).exists():
                raise
            return False
        finally:
            stream.close()
    return True


class _Clock:
    """Training time, measured from the end of warming up to the last look, without what happens between phases."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.begin, self.base = trainer, time.monotonic(), trainer.seconds
        self.first, self.mark, self.mark_step = trainer.done, None, trainer.done
        self.last, self.idle, self.blocked, self.waited, self.waited_device = self.begin, 0.0, 0.0, 0.0, 0.0

    def wait(self, stream: Any) -> list[Batch]:
        before = time.monotonic()
        batches = next(stream)
        self.idle += time.monotonic() - before
        return batches

    def device(self, report: torch.Tensor) -> list[float]:
        """The report's values. Where this waits long, the device is what limits the run; where it does not, Python is, or the data."""
        before = time.monotonic()
        values = report.tolist()
        self.blocked += time.monotonic() - before
        return values

    def warming(self) -> bool:
        return self.mark is None and self.trainer.done - self.first >= min(WARM, LOOK)

    def start(self) -> float:
        self.last = self.mark = time.monotonic()
        self.mark_step, self.idle, self.blocked = self.trainer.done, 0.0, 0.0
        return self.mark - self.begin

    def look(self) -> float:
        """Bring the trainer's time up to date. Returns steps a second since warming up (0: unknown)."""
        now = time.monotonic()
        if self.mark is None or self.trainer.done == self.mark_step:
            return 0.0
        spent = max(now - self.last, 1e-9)
        self.waited, self.waited_device, self.idle, self.blocked, self.last = (
            self.idle / spent,
            self.blocked / spent,
            0.0,
            0.0,
            now,
        )
        self.trainer.seconds = self.base + now - self.mark
        return (self.trainer.done - self.mark_step) / (now - self.mark)

    def skip(self) -> None:
        """What happened since the last look is no training."""
        now = time.monotonic()
        if self.mark is not None:
            self.mark += now - self.last
        self.last = now


def finish(trainer: Trainer, out: Path, started: float, command: str, commit: str, date: str) -> list[Score]:
    """Export, then evaluate what was exported, then write the card: nothing that fails later loses the weights."""
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

    write()  # a card without scores, should the command be cut off during the evaluation
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
    parser.add_argument("--recipe", default="nano", help="which model (default: nano)")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--minutes",
        type=float,
        help="train for this long; the schedule follows the measured speed, and compiling, "
        "sampling and the evaluation are not counted (default: the recipe's)",
    )
    parser.add_argument("--steps", type=int, help="train for so many steps instead of the recipe's")
    parser.add_argument(
        "--stop-after", type=duration, help="stop and save after this much wall time, such as 8m; go on with --resume"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the state in the folder")
    parser.add_argument(
        "--continue-from",
        type=Path,
        help="go on with a finished model: the last phase alone, from new replies of its own",
    )
    parser.add_argument("--also", type=Path, help="another finished model, whose mistakes are judged and combined, too")
    parser.add_argument("--seed", type=int, help="another seed than the recipe's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that make batches ahead (default: all cores but two with a GPU, 0 on a CPU)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder with the lab's tokenizer.json (default: the shipped one, else trained anew)",
    )
    parser.add_argument(
        "--save-every", type=duration, default=60.0, help="between two saves of the state (default: 60s)"
    )
    parser.add_argument(
        "--attention",
        choices=("auto", "fused", "dense"),
        default="auto",
        help="how packed rows keep documents apart on a GPU",
    )
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
    try:
        return shipped_tokenizer()
    except ConfigError:
        return lab_tokenizer.train()


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
    """Compiled on a GPU, with the fused kernel when it works there: a slow run is better than none."""
    if not options.device.startswith("cuda") or options.no_compile:
        return PLAIN
    if options.attention == "auto":
        reason = why_not(recipe.shape, options.device)
        print(
            f"attention: {'fused' if reason is None else f'dense masks, slower, since the fused kernel fails here: {reason}'}",
            flush=True,
        )
        return compiled(fused=reason is None)
    return compiled(fused=options.attention == "fused")


def main(argv: list[str] | None = None) -> None:
    """Run from the command line. Raises ConfigError for anything that cannot work, before any training."""
    options = arguments(argv)
    started, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    # A folder by its name: where it lay on one machine says nothing in a card.
    command = shlex.join(
        ["python", "-m", "kvasir.lab.train", *(Path(a).name if a.startswith("/") else a for a in argv or sys.argv[1:])]
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
        load_state(out, recipe)  # refuse what cannot be resumed before the data is made
    elif (out / NAME).exists():
        raise ConfigError(f"{out / NAME} is an unfinished run: go on with --resume, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    workers = options.workers if options.workers is not None else (max(1, (os.cpu_count() or 4) - 2) if cuda else 0)
    # Data first: workers are forked from a process that has not touched the GPU yet.
    trainer = Trainer(recipe, _tokenizer(options.tokenizer), options.device, workers=workers)
    print(
        f"{recipe.name}: {trainer.model.num_parameters / 1e6:.2f}M parameters, {recipe.tokens_per_step:,} tokens a step, {workers} data workers, "
        f"data ready after {time.monotonic() - started:.1f} s",
        flush=True,
    )
    trainer.compute = _compute(options, recipe)
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
        print(f"stopped at step {trainer.done} of {trainer.total}; go on with --resume", flush=True)
        return
    trainer.save(out)  # should the evaluation be cut off, --resume goes straight to it
    finish(trainer, out, started, command, options.commit or _commit(), date)
    print(f"done: {out} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
