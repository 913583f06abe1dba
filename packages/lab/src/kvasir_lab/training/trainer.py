"""One training run: model, optimizer, data and schedule, advanced a step at a time, saved and restored."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from kvasir.errors import ConfigError
from kvasir_lab import export
from kvasir_lab.model import PLAIN, Compute, Model, compiled, losses
from kvasir_lab.sample import serving_copy
from kvasir_lab.training.data import Batch, Mixture
from kvasir_lab.training.own import own_documents
from kvasir_lab.training.recipe import Recipe
from kvasir_lab.training.state import NAME, load_own, load_state, save_own, save_state

VALIDATED = 256  # Most ready documents of a source for the held-out rows.


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
        """Take the weights of a finished model. Raises ConfigError when its shape differs."""
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
        """Enter the next phase when its time has come. Returns whether it did.

        A phase with ``own`` first samples the model's own candidates and makes documents of them.
        """
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
        """Do one update. Returns [3] on the device: mean cross-entropy, mean z term, share of right guesses."""
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
        """Do the step that compiles.

        If the fused kernel fails to compile, dense masks replace it: a slow run is better than none.
        """
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
        """Measure the held-out rows and append the result to ``history``. ``report``: the values of the last step."""
        row = {"step": self.done, "seconds": self.seconds, "lr": self.rate(self.done), "train loss": report[0]}
        for part, batch in zip(self.recipe.validate, self.validation, strict=True):
            name = "+".join(spec.split(":")[0] for spec in part.mix)
            row[f"{name} loss"], row[f"{name} right"] = mean_loss(self.model, batch, whole=part.whole)
        self.history.append(row)
        return row

    def save(self, folder: Path) -> None:
        """Write everything that an exact resume needs into ``folder``."""
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
        """Continue exactly where ``save`` was called. Raises ConfigError for a state that does not fit this run."""
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


@torch.inference_mode()
def mean_loss(model: Model, batch: Batch, *, whole: bool = False) -> tuple[float, float]:
    """Mean cross-entropy (nats a token) and share of right guesses over the batch's trained tokens.

    Computes 8 rows at a time.
    """
    device = model.model.embed_tokens.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for first in range(0, len(batch.ids), 8):
        ids, documents, trained = (
            torch.from_numpy(a[first : first + 8]).to(device) for a in (batch.ids, batch.documents, batch.trained)
        )
        total += losses(model, ids.long(), None if whole else documents, trained)
    loss, _, correct = (total / max(batch.num_trained, 1)).tolist()
    return loss, correct
