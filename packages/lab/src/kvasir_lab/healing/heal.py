"""Heal a converted model on its source's answers: ``kvasir convert heal SRC DST --teacher MODEL``.

First every converted block is regressed on the teacher's block, for the teacher's own input; only what makes and reads
latents is trained. Then all weights are trained on the next token and on the teacher's distribution: cross-entropy plus
the KL divergence over the teacher's ``TOP`` tokens, with all others as one more class (CARE, arXiv 2603.17946, with
tau = beta = 1). AdamW, cosine, and a warm-up.

A run that was given ``steps`` and is resumed gives the bits of one that was not stopped, on the same device.

Legend: B texts, T tokens, E model dim, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvasir.convert.checkpoint import RECORD, copy_rest, write_tensors
from kvasir.errors import ConfigError
from kvasir.layers.spec import MLASpec
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.models.loader import read_headers
from kvasir.models.quantisation import reader_of
from kvasir.models.spec import ModelSpec
from kvasir.progress import Progress
from kvasir_lab.healing.data import Corpus
from kvasir_lab.healing.student import Student, why_not

STATE = "heal.safetensors"
TOP = 512  # tokens of the teacher that the divergence tells apart
# Share of the run that regresses blocks, and the learning rates of the two stages. The second is in CARE's sweep; the
# others are ours, and not tuned yet.
REGRESSION, BLOCK_RATE, RATE = 1 / 3, 3e-4, 1e-5
WARMUP, DECAY, BETAS = 0.005, 0.01, (0.9, 0.95)
ROWS = {"cuda": 32, "cpu": 4}  # texts of a step
SAVE_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Plan:
    """One run: ``minutes`` long, or ``steps``. ``rows``: texts of a step, 0: as the device takes."""

    minutes: float = 3.0
    steps: int | None = None
    seed: int = 42
    rows: int = 0

    def __post_init__(self) -> None:
        if not (self.minutes > 0 and (self.steps is None or self.steps > 1)):
            raise ConfigError("--minutes must be above 0, and --steps at least 2: one for each stage")


def check(source: Path, teacher: Path, target: Path, resume: bool) -> None:
    """Raise ConfigError for folders that cannot work, before any weight is read."""
    if resume and not (target / STATE).is_file():
        raise ConfigError(f"nothing to resume: {target / STATE} does not exist")
    if not resume and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name a new folder, or continue its run with --resume")
    configs = [checkpoint.read_config(folder) for folder in (source, teacher)]
    specs = [build_spec(config) for config in configs]
    for folder, config, spec in zip((source, teacher), configs, specs):
        if reader_of(config) is not None:
            raise ConfigError(f"{folder} is quantised, and healing trains plain weights; heal first, quantise then")
        if (why := why_not(spec)) is not None:
            raise ConfigError(f"{folder} {why}")
    student, taught = specs
    if not any(isinstance(layer.mixer, MLASpec) for layer in student.layers):
        raise ConfigError(f"{source} has no latent attention; make it with `kvasir convert mla` first")
    if any(isinstance(layer.mixer, MLASpec) for layer in taught.layers):
        raise ConfigError(f"--teacher {teacher} has latent attention itself. Give the model that was converted.")
    if _sizes(student) != _sizes(taught) or student.base_family not in (None, taught.family):
        raise ConfigError(
            f"--teacher {teacher} is not what {source} was converted from: family, vocabulary, width, layers, heads or "
            "blocks differ. Give the model that was converted."
        )


def _sizes(spec: ModelSpec) -> tuple:
    """Sizes and parts that a conversion leaves as they were."""
    heads = [
        (m.num_heads, m.nope_dim if isinstance(m, MLASpec) else m.head_dim) for m in (x.mixer for x in spec.layers)
    ]
    blocks = [(layer.ffn, layer.norm, layer.norms, layer.residual_scale) for layer in spec.layers]
    return spec.vocab_size, spec.hidden_size, heads, blocks


class Healing:
    """A run in memory: student, teacher, texts, and how far it is."""

    def __init__(self, source: Path, teacher: Path, corpus: Corpus, plan: Plan, device: str) -> None:
        self.plan, self.corpus, self.device = plan, corpus, torch.device(device)
        self.length = corpus.held_out.shape[1]
        self.student, self.teacher = (
            Student.load(folder, checkpoint.read_config(folder), self.length).to_device(self.device)
            for folder in (source, teacher)
        )
        self.teacher.requires_grad_(False)
        self.rows = plan.rows or ROWS[self.device.type]
        self.done, self.seconds = 0, 0.0
        self.history: list[dict[str, float]] = []
        digest = hashlib.blake2b(digest_size=16)
        for folder in (source, teacher):
            digest.update(repr(sorted((t.name, t.shape) for t in read_headers(folder))).encode())
        for part in (*corpus.streams, corpus.held_out.numpy()):
            digest.update(part.tobytes())
        self.digest = f"{digest.hexdigest()} seed {plan.seed} rows {self.rows}"
        self._start(None)

    def share(self) -> float:
        """The share of the run that is done."""
        return self.done / self.plan.steps if self.plan.steps else self.seconds / (60 * self.plan.minutes)

    def _start(self, stage: int | None) -> None:
        """Take the optimizer of a stage: 0 blocks, 1 all weights."""
        self.stage = stage
        if stage is not None:
            chosen = list(self.student.parameters()) if stage else self.student.attention()
            self.optimizer = torch.optim.AdamW(chosen, lr=RATE, betas=BETAS, weight_decay=DECAY)

    def _rate(self) -> float:
        """The learning rate: warm-up and cosine of the stage."""
        stage, share = self.stage, self.share()
        within = share / REGRESSION if stage == 0 else (share - REGRESSION) / (1 - REGRESSION)
        within = min(1.0, max(0.0, within))
        cosine = 0.5 * (1 + math.cos(math.pi * within))
        return (RATE if stage else BLOCK_RATE) * min(1.0, max(within, 1e-3) / WARMUP) * max(0.02, cosine)

    def step(self) -> float:
        """Do one update. Returns the loss of its stage."""
        stage = int(self.share() >= REGRESSION)
        if stage != self.stage:
            self._start(stage)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        ids = self.corpus.batch(self.rows, self.plan.seed, self.done, self.length).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.answers(ids) if stage else self.blocks(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        self.student.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss.detach())

    def blocks(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Mean squared error of every converted block, as a share of what the teacher's block adds, for the teacher's
        input; the mean of all."""
        found = []
        with torch.no_grad():
            h = self.teacher.embed(ids_BT)
        for index, layer in enumerate(self.student.spec.layers):
            with torch.no_grad():
                wanted = self.teacher.block(index, h)
            if isinstance(layer.mixer, MLASpec):
                error = (self.student.block(index, h) - wanted).float().square().mean()
                found.append(error / (wanted - h).float().square().mean().clamp_min(1e-12))
            h = wanted
        return torch.stack(found).mean()

    def answers(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the next token plus the divergence from the teacher, in nats a token."""
        with torch.no_grad():
            taught = self.teacher(ids_BT)
        logits = self.student(ids_BT)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        return loss + divergence(logits, taught)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Held-out cross-entropy and whole KL divergence from the teacher, nats a token."""
        ids = self.corpus.held_out.to(self.device)
        found = torch.zeros(2, dtype=torch.float64)
        for text in ids.split(2):
            logits, taught = (model(text).float().log_softmax(-1) for model in (self.student, self.teacher))
            found[0] += float(F.nll_loss(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten(), reduction="sum"))
            found[1] += float((taught.exp() * (taught - logits)).sum())
        return {"loss": float(found[0]) / (ids[:, 1:].numel()), "kl": float(found[1]) / ids.numel()}

    # ----------------------------------------------------------------------------------------------------------- state

    def save(self, folder: Path) -> None:
        """Write everything that an exact resume needs, through a temporary file."""
        tensors = {f"weight.{i}": p for i, p in enumerate(self.student.weights)}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        run = {"digest": self.digest, "stage": self.stage, "done": self.done, "seconds": self.seconds,
               "steps": self.plan.steps, "history": self.history}  # fmt: skip
        temporary = folder / (STATE + ".tmp")
        save_file(
            {k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary, metadata={"run": json.dumps(run)}
        )
        os.replace(temporary, folder / STATE)

    def restore(self, folder: Path) -> None:
        """Continue where ``save`` was called. Raises ConfigError for a state that is broken or of another run."""
        try:
            with safe_open(folder / STATE, "pt") as f:
                run = json.loads((f.metadata() or {})["run"])
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
            if (run["digest"], run["steps"]) != (self.digest, self.plan.steps):
                raise ConfigError(
                    f"{folder / STATE} belongs to a run with other models, texts, steps or seed: give the same ones, "
                    "or another folder"
                )
            with torch.no_grad():
                for i, p in enumerate(self.student.weights):
                    p.copy_(tensors[f"weight.{i}"])
            self._start(run["stage"])
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith("optimizer."):
                    _, i, name = key.split(".", 2)
                    moments.setdefault(int(i), {})[name] = value
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
            self.done, self.seconds, self.history = run["done"], run["seconds"], run["history"]
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as e:
            raise ConfigError(f"cannot resume: {folder / STATE}: {e}. Delete it and start again.") from e


def divergence(logits: torch.Tensor, taught: torch.Tensor, top: int = TOP) -> torch.Tensor:
    """Mean KL divergence in nats of a row from ``taught`` [..., V] to ``logits``, over the teacher's ``top`` tokens and
    all others as one class; the whole divergence where the vocabulary has no others."""
    q, p = logits.float().log_softmax(-1), taught.float().log_softmax(-1)
    if p.shape[-1] > top:
        p, at = p.topk(top, -1)
        q = q.gather(-1, at)
        p, q = (torch.cat((x, torch.log1p(-x.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))), -1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1).mean()


def heal(
    source: Path,
    target: Path,
    teacher: Path,
    plan: Plan,
    corpus: Callable[[], Corpus],
    *,
    resume: bool = False,
    device: str = "cpu",
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Heal ``source`` into the folder ``target``. Returns the record, or None where Ctrl-C, or ``stop_after`` steps,
    ended it: the state is kept. ``corpus`` is asked for once all checks passed. Raises ConfigError."""
    check(source, teacher, target, resume)
    run = Healing(source, teacher, corpus(), plan, device)
    before = run.measure() if not resume else None
    target.mkdir(parents=True, exist_ok=True)
    if resume:
        run.restore(target)
    else:
        run.history.append({"step": 0, **before})
    mark, saved, base, first = time.monotonic(), time.monotonic(), run.seconds, run.done
    with Progress("healing") as progress:
        try:
            while run.share() < 1:
                loss = run.step()
                run.seconds = base + time.monotonic() - mark
                if not math.isfinite(loss):
                    raise ConfigError(f"the loss is {loss} at step {run.done}; the state before it is in {target}")
                total = plan.steps or round(run.done / max(1e-6, min(1.0, run.share())))
                progress.show(run.done, total, f"{('blocks', 'answers')[run.stage]} {loss:.4f}")
                if time.monotonic() - saved > SAVE_EVERY and run.share() < 1:
                    run.save(target)
                    saved = time.monotonic()
                if stop_after is not None and run.done - first >= stop_after and run.share() < 1:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            run.save(target)
            return None
    run.history.append({"step": run.done, **run.measure()})
    return _write(run, source, teacher, target)


def _write(run: Healing, source: Path, teacher: Path, target: Path) -> dict[str, Any]:
    """Write the healed checkpoint next to the state, and remove the state."""
    total = write_tensors(target, iter(run.student.stored().items()))
    shutil.copyfile(source / "config.json", target / "config.json")
    copy_rest(source, target)
    record = {
        "healed": source.resolve().name,
        "teacher": teacher.resolve().name,
        "steps": run.done,
        "tokens": run.done * run.rows * run.length,
        "seconds": round(run.seconds, 1),
        "held_out": run.history,
        "bytes": total,
    }
    before = source / RECORD
    if before.is_file():
        record["conversion"] = json.loads(before.read_text())
    (target / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    (target / STATE).unlink(missing_ok=True)
    return record
