"""Train weights on a lab model's own replies: sample them, run the steps, resume, measure, and write the card.

What is trained is a `Kind`: a drafter, or a model that drafts for itself.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.plain_files import refuse_special
from kvasir.progress import Progress
from kvasir.technique import load
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.card import card
from kvasir_lab.drafters.data import BATCH_TOKENS, Batch, Texts
from kvasir_lab.drafters.kind import DRAFTERS, Kind
from kvasir_lab.drafters.target import Target
from kvasir_lab.model import Model

LOOK = 20  # Steps between two looks at the device, each of which waits for it.
REPLIES = {"cuda": 32768, "cpu": 1024}  # Replies to train on by default; sampling them takes minutes at most.
REPLY_TOKENS = 320
WARMUP = 100
STATE, SAMPLES = "state.safetensors", "samples.safetensors"


@dataclass(frozen=True)
class Plan:
    """One run: what to train (``kind``: a name with options, of ``package``) and for how long.

    The run lasts ``minutes``, or ``steps`` when given. ``replies``: number to train on. ``held_out``: number to measure
    acceptance on. ``lr`` 0 means the learning rate of the kind.
    """

    kind: str
    package: str = DRAFTERS
    minutes: float = 2.0
    steps: int | None = None
    replies: int = REPLIES["cpu"]
    held_out: int = REPLIES["cpu"] // 32
    reply_tokens: int = REPLY_TOKENS
    lr: float = 0.0
    seed: int = 0
    mix: dict[str, float] = field(default_factory=drafter_data.mixture)

    def load(self) -> Kind:
        """The kind, with its options. Raises ConfigError for an unknown one."""
        return load(self.package, self.kind, Kind)


class Trainer:
    """One run: what is trained, optimizer and schedule, advanced by ``step``."""

    def __init__(self, target: Target, texts: Texts, plan: Plan) -> None:
        self.target, self.texts, self.plan = target, texts, plan
        self.kind = plan.load()
        self.kind.begin(target, plan.seed)
        self.optimizer = torch.optim.AdamW(self.kind.groups(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
        self.done, self.seconds, self.tokens = 0, 0.0, 0
        self.history: list[dict[str, float]] = []

    def share(self) -> float:
        """The share of the run that is done."""
        return self.done / self.plan.steps if self.plan.steps else self.seconds / (60 * self.plan.minutes)

    def _rate(self) -> float:
        peak = self.plan.lr or self.kind.rate
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.share())))
        warm = min(WARMUP, self.plan.steps // 10 + 1) if self.plan.steps else WARMUP
        return peak * min(1.0, (self.done + 1) / warm) * max(0.02, cosine)

    def stream(self) -> Iterator[Batch]:
        """Yield batches from step ``done`` on. A resumed run gets the same batches."""
        tokens, left, epoch = BATCH_TOKENS[self.target.device.type] // self.kind.places, self.done, 0
        while True:
            for batch in drafter_data.batches(self.texts, tokens, self.plan.seed, epoch):
                if left:
                    left -= 1
                else:
                    yield batch
            epoch += 1

    def step(self, batch: Batch) -> torch.Tensor:
        """Do one update. Returns the losses by depth, on the device."""
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        total, found = self.losses(batch)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.kind.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += int(batch.lengths.sum())
        return found

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The number to minimise and what is shown of it, see `Kind.losses`."""
        return self.kind.losses(batch, self.done, self.share())

    # ------------------------------------------------------------------------------------------------------------ state

    def save(self, out: Path) -> None:
        """Write the state of the run through a temporary file."""
        tensors = {f"head.{name}": p for name, p in self.kind.module.named_parameters()}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        run = {
            "kind": self.plan.kind,
            "weights": self.target.facts["weights"],
            "done": self.done,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "history": self.history,
        }
        temporary = out / (STATE + ".tmp")
        temporary.write_bytes(
            save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, metadata={"run": json.dumps(run)})
        )
        os.replace(temporary, out / STATE)

    def restore(self, out: Path) -> None:
        """Continue where ``save`` was called.

        Raises ConfigError for a state that is missing, broken or of another run.
        """
        refuse_special(out)
        try:
            with safe_open(out / STATE, "pt") as f:
                run = json.loads((f.metadata() or {})["run"])
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
            if (run["kind"], run["weights"]) != (self.plan.kind, self.target.facts["weights"]):
                raise ConfigError(
                    f"{out / STATE} is a run of '{run['kind']}' or for another model: delete it, or give another --out"
                )
            self.kind.module.load_state_dict(
                {k.removeprefix("head."): t for k, t in tensors.items() if k.startswith("head.")}
            )
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith("optimizer."):
                    _, i, name = key.split(".", 2)
                    moments.setdefault(int(i), {})[name] = value
            self.optimizer.load_state_dict(
                {"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]}
            )
            self.done, self.seconds = run["done"], run["seconds"]
            self.tokens, self.history = run["tokens"], run["history"]
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as e:
            raise ConfigError(f"cannot resume: {out / STATE}: {e}. Delete it and start again.") from e


def run(trainer: Trainer, out: Path, *, save_every: float = 30.0) -> bool:
    """Train to the end. Returns False when Ctrl-C ended the run; the last saved state is there to resume.

    Raises ConfigError when the loss is no longer a number.
    """
    mark = saved = time.monotonic()
    base, stream = trainer.seconds, trainer.stream()
    with Progress(trainer.plan.kind) as progress:
        try:
            while trainer.share() < 1:
                found = trainer.step(next(stream))
                trainer.seconds = base + time.monotonic() - mark
                if trainer.done % LOOK and trainer.share() < 1:
                    continue
                losses = found.tolist()
                trainer.seconds = base + time.monotonic() - mark
                if not all(map(math.isfinite, losses)):
                    raise ConfigError(f"the loss is {losses} at step {trainer.done}: lower the learning rate")
                row = {"step": trainer.done, "seconds": trainer.seconds, trainer.kind.loss_name.lower(): losses}
                trainer.history.append(row)
                total = trainer.plan.steps or round(trainer.done / max(1e-6, min(1.0, trainer.share())))
                progress.show(
                    trainer.done,
                    total,
                    f"{trainer.kind.loss_name} {' '.join(f'{x:.3f}' for x in losses)}, "
                    f"{trainer.tokens / trainer.seconds / 1e6:.2f}M tok/s, "
                    f"{trainer.seconds:.0f} s",
                )
                if time.monotonic() - saved > save_every and trainer.share() < 1:
                    trainer.save(out)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            if not (out / STATE).exists():
                raise
            return False
    return True


# ---------------------------------------------------------------------------------------------------------- the command


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(name: str, device: str) -> tuple[Target, Any]:
    """The target and its tokenizer. Raises ConfigError for a checkpoint that the lab did not make."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # streams are made and Triton's kernels launched on the present GPU
    folder = resolve(name)
    return Target(export.load(folder, device), Path(name or folder).name), lab_tokenizer.load(folder)


def main(
    plan: Plan,
    target_name: str,
    out: Path,
    *,
    samples: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    command: str = "",
) -> None:
    """Sample (or read) the target's replies, train, write the drafter, measure it and write its card.

    Raises ConfigError for anything that cannot work, before any training.
    """
    started, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    device = device or default_device()
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ConfigError(f"--device {device}: drafters are trained on cuda or cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU: use --device cpu")
    if not resume and (out / STATE).exists():
        raise ConfigError(f"{out / STATE} is an unfinished run: continue with --resume, or delete it")
    if resume and not (out / STATE).exists():
        raise ConfigError(f"nothing to resume: {out / STATE} does not exist")
    target, tokenizer = load_target(target_name, device)
    out.mkdir(parents=True, exist_ok=True)
    texts = _texts(plan, target, tokenizer, samples or out / SAMPLES, lambda line: print(line, flush=True))
    trainer = Trainer(target, texts["train"], plan)
    if resume:
        trainer.restore(out)
    print(f"{plan.kind} for {target.facts['name']}: {trainer.kind.about()}", flush=True)
    if not run(trainer, out):
        print(f"stopped at step {trainer.done}; continue with --resume", flush=True)
        return
    trainer.kind.write(out, tokenizer)
    print(f"weights written to {out} after {time.monotonic() - started:.0f} s", flush=True)
    if (own := trainer.kind.whole_model()) is not None:  # it drafts for what it writes itself
        texts["held out"] = _held_out(plan, own, tokenizer, lambda line: print(line, flush=True))
    found = trainer.kind.measure(texts["held out"])
    print(
        f"  held out: {found['tokens_per_forward']:.2f} tokens a forward, accepted by depth "
        + ", ".join(f"{x:.2f}" for x in found["by_depth"]),
        flush=True,
    )
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    record = {
        "kind": trainer.kind.name,
        "spec": plan.kind,
        "package": plan.package,
        "data": trainer.kind.data,
        "target": target.facts,
        "parameters": trainer.kind.num_trained,
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "train_seconds": trainer.seconds,
        "replies": len(texts["train"]),
        "lr": plan.lr or trainer.kind.rate,
        "seed": plan.seed,
        "device": name,
        "date": date,
        "command": command,
        "history": trainer.history,
        "acceptance": found,
        "total_seconds": time.monotonic() - started,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(card(record))
    for file in (out / STATE, out / SAMPLES):
        file.unlink(missing_ok=True)
    print(f"done: {out} after {time.monotonic() - started:.0f} s", flush=True)


def _texts(plan: Plan, target: Target, tokenizer: Any, file: Path, say: Callable[[str], None]) -> dict[str, Texts]:
    """Texts to train on and held-out ones: those in ``file``, or sampled and kept there."""
    if file.exists():
        made = drafter_data.load_texts(file, target.facts["weights"])
    else:
        made = {
            "train": drafter_data.sample_texts(
                target.model, tokenizer, plan.mix, plan.replies, "train", plan.seed, plan.reply_tokens, say
            ),
            "held out": _held_out(plan, target.model, tokenizer, say),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        drafter_data.save_texts(file, made, target.facts["weights"])
    if plan.load().data == "text":
        made["train"] = drafter_data.written_texts(
            tokenizer, plan.mix, plan.replies, plan.seed, plan.reply_tokens, target.model.shape.positions
        )
    return made


def _held_out(plan: Plan, model: Model, tokenizer: Any, say: Callable[[str], None]) -> Texts:
    return drafter_data.sample_texts(
        model,
        tokenizer,
        plan.mix,
        plan.held_out,
        "validation",
        plan.seed,
        plan.reply_tokens,
        say,
        temperatures=(0.0,),
    )
