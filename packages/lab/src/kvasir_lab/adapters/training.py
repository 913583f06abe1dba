"""Train an adapter of a lab model on one task: AdamW over the change of every matrix, the model frozen."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from kvasir.errors import ConfigError
from kvasir.progress import Progress
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters.methods import METHODS, Change
from kvasir_lab.model import Model, losses
from kvasir_lab.task import Documents
from kvasir_lab.training.data import Batch, Mixture, Rows

LOOK = 20  # steps between two reports
CALIBRATION = 8  # batches whose inputs a calibrated method sees


@dataclass(frozen=True)
class Plan:
    """A training run. ``rank``: of plain LoRA; other methods take as many numbers. ``rows``, ``length``: of a batch in
    tokens; ``lr``: None for the method's own."""

    method: str
    task: str
    rank: int = 8
    steps: int = 300
    rows: int = 8
    length: int = 512
    lr: float | None = None
    warmup: int = 20
    seed: int = 0
    pool: int = 2000

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"no method '{self.method}'; there are {', '.join(METHODS)}")


def attach(model: Model, plan: Plan, grams: dict[str, torch.Tensor]) -> dict[str, Change]:
    """Freeze the model and put a change in place of every matrix of its layers. Returns them by module name."""
    model.requires_grad_(False)
    found: dict[str, Change] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or ".layers." not in name:
            continue
        home, _, attribute = name.rpartition(".")
        change = METHODS[plan.method](module.weight.cpu(), plan.rank, plan.seed + len(found), grams.get(name))
        setattr(model.get_submodule(home), attribute, change.to(module.weight.device))
        found[name] = change
    return found


@torch.no_grad()
def calibrate(model: Model, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Sum of x x^T over the inputs of every matrix of the layers, each batch divided by its largest value."""
    grams: dict[str, torch.Tensor] = {}
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = inputs[0].flatten(0, -2).double().cpu()
            x = x / x.abs().max().clamp(min=1e-12)
            grams[name] = grams.get(name, 0) + x.t() @ x

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            hooks.append(module.register_forward_hook(watch(name)))
    for batch in batches:
        loss_of(model, batch)
    for hook in hooks:
        hook.remove()
    return grams


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats and share of right guesses over the trained tokens of a batch: [2]."""
    device = model.model.embed_tokens.weight.device
    ids, documents, trained, chosen = (
        torch.from_numpy(a).to(device) for a in (batch.ids, batch.documents, batch.trained, batch.chosen)
    )
    sums = losses(model, ids.long(), documents, trained, chosen=chosen.long())
    return torch.stack([sums[0], sums[2]]) / max(1, batch.num_trained)


def train(
    plan: Plan,
    source: Path,
    out: Path,
    say: Callable[[str], None] = print,
    device: str = "cpu",
    documents: dict[str, Documents] | None = None,
) -> dict[str, Any]:
    """Train an adapter of the lab model in ``source`` and write its training form to ``out``. Returns the record.

    ``documents``: ready ones, by a name that begins with ``own/``, which may stand in the place of a task. Raises
    ConfigError for an unknown task, and where the loss is no longer a number.
    """
    model, tokenizer = export.load(source, device), lab_tokenizer.load(source)
    rows = (Rows(plan.rows, plan.length, {plan.task: 1.0}),)
    mixture = Mixture(rows, tokenizer, plan.seed, pool=plan.pool)
    for name, ready in (documents or {}).items():
        mixture.add(name, ready)
    grams = {}
    if METHODS[plan.method].calibrated:
        grams = calibrate(model, [mixture.batch(i)[0] for i in range(CALIBRATION)])
    changes = attach(model, plan, grams)
    trained = [p for change in changes.values() for p in change.parameters()]
    most = plan.lr or METHODS[plan.method].lr
    optimizer = torch.optim.AdamW(trained, lr=most, betas=(0.9, 0.95), weight_decay=0.0)
    numbers, began, history, note = sum(p.numel() for p in trained), time.monotonic(), [], ""
    say(f"{plan.method} on {plan.task}: {numbers:,} numbers in {len(changes)} matrices")
    with Progress(plan.method) as progress:
        for step in range(plan.steps):
            fraction = min(1.0, (step + 1) / plan.warmup) * 0.5 * (1 + math.cos(math.pi * step / plan.steps))
            for group in optimizer.param_groups:
                group["lr"] = most * fraction
            loss, right = loss_of(model, mixture.batch(step)[0])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOOK == 0 or step + 1 == plan.steps:
                now, share = loss.item(), right.item()
                if not math.isfinite(now):
                    raise ConfigError(f"the loss is {now} at step {step}: lower lr")
                history.append({"step": step, "loss": round(now, 4), "right": round(share, 4)})
                note = f"loss {now:.3f}, right {share:.1%}, {time.monotonic() - began:.0f} s"
            progress.show(step + 1, plan.steps, note)
    record = {"method": plan.method, "scale": 1.0, "base": source.name, "numbers": numbers, "plan": asdict(plan)}
    record |= {"seconds": round(time.monotonic() - began, 1), "history": history}
    out.mkdir(parents=True, exist_ok=True)
    parts = {f"{name}.{part}": x.cpu() for name, change in changes.items() for part, x in change.parts().items()}
    save_file(parts, out / "training.safetensors")
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
