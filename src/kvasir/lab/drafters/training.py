"""Train a drafter for a lab model towards the model's own distribution over its replies.

A drafter is a head on the frozen hidden states, or prompt tokens. The loss of step (or head) j at a row is KL(target ||
drafter) of the token j + 2 places on, weighted 0.8^j as in Medusa and EAGLE-3. The target's distribution is conditioned
on the tokens really written, as the verifying draw will be. Acceptance is counted as in the engine: each reply of the
held-out problems is walked from draft to draft, greedily, as one chain.

Shape suffixes: B texts, T tokens, L tapped layers, E model dim, V vocabulary, M rows that predict a token of a reply.
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

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.lab import export
from kvasir.lab import tokenizer as lab_tokenizer
from kvasir.lab.drafters import data as drafter_data
from kvasir.lab.drafters import prompt_rows
from kvasir.lab.drafters.card import card, size_of
from kvasir.lab.drafters.data import Batch, Texts
from kvasir.lab.model import Model
from kvasir.lab.sample import serving_copy
from kvasir.lab.training.progress import Progress
from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads
from kvasir.speculation.head import Head

LOOK = 20  # Steps between two looks at the device, each of which waits for it.
DISCOUNT = 0.8  # Weight of a step's loss relative to the step before.
BATCH_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 11}
REPLIES = {"cuda": 32768, "cpu": 1024}  # Replies to train on by default; sampling them takes minutes at most.
REPLY_TOKENS = 320
WARMUP = 100
STATE, SAMPLES = "state.safetensors", "samples.safetensors"


@dataclass(frozen=True)
class Plan:
    """One run: what to train and for how long.

    The run lasts ``minutes``, or ``steps`` when given. ``replies``: number to train on. ``held_out``: number to measure
    acceptance on. ``lr`` 0 means the learning rate of the kind.
    """

    kind: str
    minutes: float = 2.0
    steps: int | None = None
    replies: int = REPLIES["cpu"]
    held_out: int = REPLIES["cpu"] // 32
    reply_tokens: int = REPLY_TOKENS
    lr: float = 0.0
    seed: int = 0
    mix: dict[str, float] = field(default_factory=drafter_data.mixture)

    @property
    def rate(self) -> float:
        return self.lr or heads.class_of(self.kind).rate


class Target:
    """The frozen target model: the states that a drafter reads, and its distribution."""

    def __init__(self, model: Model, name: str) -> None:
        self.model = serving_copy(model)
        weight = self.model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        s = model.shape
        self.facts = {
            "name": name,
            "hidden_size": s.dim,
            "vocab_size": s.vocab,
            "num_layers": s.layers,
            "weights": heads.fingerprint(model.model.norm.weight),
        }

    @torch.no_grad()
    def features(
        self, ids_BT: torch.Tensor, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs of ``layers`` [B, T, L, E], the final norm's output [B, T, E], and embeddings [B, T, E].

        The embeddings are those of the next token; the last row has its own.
        """
        trunk = self.model.model
        x = embedded = trunk.embed_tokens(ids_BT)
        rope, found = self.model.rope(ids_BT.shape[1]), {}
        for i, layer in enumerate(trunk.layers):
            x = layer(x, rope, None)
            found[i] = x
        return (
            torch.stack([found[i] for i in layers], 2),
            trunk.norm(x),
            torch.cat([embedded[:, 1:], embedded[:, -1:]], 1),
        )

    def guesses(self, head: Head, batch: Batch) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        """The final norm's output [B, T, E], and an iterator over the drafter's outputs.

        Output j = 0, 1, ... [B, T, E] predicts in row p token p + 2 + j of a reply.
        """
        ids = batch.ids.to(self.device, non_blocking=True)
        if head.reads_as_rows:
            normed, keys = prompt_rows.read(self.model, ids)
            return normed, prompt_rows.unroll(self.model, head.weight, batch, keys)
        features, normed, following = self.features(ids, head.shape.layers)
        return normed, head.unroll(features, normed, following)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 from the final norm's output; only the output matrix is applied."""
        return F.linear(normed.to(self.dtype), self.model.model.embed_tokens.weight).float()


class Trainer:
    """One run: head, optimizer and schedule, advanced by ``step``."""

    def __init__(self, target: Target, texts: Texts, plan: Plan) -> None:
        self.target, self.texts, self.plan = target, texts, plan
        cls = heads.class_of(plan.kind)
        self.head = cls(cls.shape_for(target.model.shape.dim, target.model.shape.layers))
        trunk = target.model.model
        self.head.begin_with(
            trunk.norm.weight.float().cpu(),
            trunk.embed_tokens.weight.float().cpu(),
            torch.Generator().manual_seed(plan.seed),
        )
        self.head.to(target.device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.done, self.seconds, self.tokens = 0, 0.0, 0
        self.history: list[dict[str, float]] = []

    def share(self) -> float:
        """The share of the run that is done."""
        return self.done / self.plan.steps if self.plan.steps else self.seconds / (60 * self.plan.minutes)

    def _rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.share())))
        warm = min(WARMUP, self.plan.steps // 10 + 1) if self.plan.steps else WARMUP
        return self.plan.rate * min(1.0, (self.done + 1) / warm) * max(0.02, cosine)

    def stream(self) -> Iterator[Batch]:
        """Yield batches from step ``done`` on. A resumed run gets the same batches."""
        tokens, left, epoch = BATCH_TOKENS[self.target.device.type], self.done, 0
        if self.head.reads_as_rows:
            # Each prompt token is a row of the whole model, whose activations are kept for the backward pass.
            tokens //= self.head.shape.depth * self.head.shape.ensemble
        while True:
            for batch in drafter_data.batches(self.texts, tokens, self.plan.seed, epoch):
                if left:
                    left -= 1
                else:
                    yield batch
            epoch += 1

    def step(self, batch: Batch) -> torch.Tensor:
        """Do one update. Returns the KL of every step [depth], on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        found = self.losses(batch)
        weights = DISCOUNT ** torch.arange(len(found), device=found.device)
        (found * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += int(batch.lengths.sum())
        return found.detach()

    def losses(self, batch: Batch) -> torch.Tensor:
        """Mean KL(target || drafter) in nats of every step j [depth], over the reply tokens that it can predict."""
        normed, guesses = self.target.guesses(self.head, batch)
        # Row n predicts token n + 1. The first token of a reply is drawn before any draft.
        place = torch.arange(batch.ids.shape[1] - 1)
        predicts = (place >= batch.begins[:, None]) & (place < batch.lengths[:, None] - 1)
        row, at = (x.to(self.target.device) for x in predicts.nonzero(as_tuple=True))
        first = batch.begins.to(self.target.device)[row] - 1  # root of the first draft of a reply
        with torch.no_grad():
            log_p = self.target.logits(normed[row, at]).log_softmax(-1)
            p = log_p.exp()
            entropy = (p * log_p).sum(-1)
        out = []
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.device.type == "cuda"):
            for j, x_BTE in enumerate(guesses):
                root = at - 1 - j
                weight = (root >= first).float()
                log_q = self.target.logits(x_BTE[row, root.clamp(min=0)]).log_softmax(-1)
                out.append(((entropy - (p * log_q).sum(-1)) * weight).sum() / weight.sum().clamp(min=1))
        return torch.stack(out)

    # ------------------------------------------------------------------------------------------------------------ state

    def save(self, out: Path) -> None:
        """Write the state of the run through a temporary file."""
        tensors = {f"head.{name}": p for name, p in self.head.named_parameters()}
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
        try:
            with safe_open(out / STATE, "pt") as f:
                run = json.loads((f.metadata() or {})["run"])
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
            if (run["kind"], run["weights"]) != (self.plan.kind, self.target.facts["weights"]):
                raise ConfigError(
                    f"{out / STATE} is a run of '{run['kind']}' or for another model: delete it, or give another --out"
                )
            self.head.load_state_dict({k.removeprefix("head."): t for k, t in tensors.items() if k.startswith("head.")})
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
    with Progress(f"drafter {trainer.plan.kind}") as progress:
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
                trainer.history.append({"step": trainer.done, "seconds": trainer.seconds, "kl": losses})
                total = trainer.plan.steps or round(trainer.done / max(1e-6, min(1.0, trainer.share())))
                progress.show(
                    trainer.done,
                    total,
                    f"KL {' '.join(f'{x:.3f}' for x in losses)}, {trainer.tokens / trainer.seconds / 1e6:.2f}M tok/s, "
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


# ----------------------------------------------------------------------------------------------------------- acceptance


def walk(right_JT: np.ndarray, begin: int, length: int) -> tuple[int, list[list[int]]]:
    """Forwards after a reply's first token when one chain is drafted a forward, and [tried, accepted] by depth.

    ``right_JT``: whether guess j of root p is token p + 2 + j. ``begin``, ``length``: where the reply starts and ends.
    """
    depth = len(right_JT)
    by_depth = [[0, 0] for _ in range(depth)]
    anchor, forwards = begin, 0  # The anchor is a known token; the forward that computes it draws the next one.
    while anchor < length - 1:
        accepted = 0
        for j in range(min(depth, length - 1 - anchor)):
            by_depth[j][0] += 1
            if not right_JT[j, anchor - 1]:
                break
            by_depth[j][1] += 1
            accepted += 1
        anchor += accepted + 1
        forwards += 1
    return forwards, by_depth


@torch.no_grad()
def acceptance(head: Head, target: Target, texts: Texts) -> dict[str, Any]:
    """Tokens a forward and acceptance by depth of greedy chains on greedy replies, in all and by task."""
    serving = type(head)(head.shape).to(target.device, target.dtype)
    serving.load_state_dict(head.state_dict())
    rows: dict[int, list[int]] = {}  # task -> tokens, forwards
    totals = [[0, 0] for _ in range(head.shape.depth)]
    for batch in drafter_data.batches(texts, BATCH_TOKENS[target.device.type], 0, 0):
        ids = batch.ids.to(target.device)
        guesses = [target.logits(x).argmax(-1) for x in target.guesses(serving, batch)[1]]
        right = (
            torch.stack(
                [
                    F.pad(guess[:, : -2 - j] == ids[:, 2 + j :], (0, 2 + j))
                    if guess.shape[1] > 2 + j
                    else torch.zeros_like(guess).bool()
                    for j, guess in enumerate(guesses)
                ],
                1,
            )
            .cpu()
            .numpy()
        )
        for i, (begin, length, number) in enumerate(
            zip(batch.begins.tolist(), batch.lengths.tolist(), batch.texts.tolist())
        ):
            forwards, by_depth = walk(right[i], begin, length)
            row = rows.setdefault(int(texts.tasks[number]), [0, 0])
            row[0] += max(0, length - 1 - begin)
            row[1] += forwards
            for mine, theirs in zip(totals, by_depth):
                mine[0] += theirs[0]
                mine[1] += theirs[1]
    tokens, forwards = (sum(row[i] for row in rows.values()) for i in range(2))
    return {
        "replies": len(texts),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / max(1, forwards),
        "by_depth": [accepted / max(1, tried) for tried, accepted in totals],
        "tried": [tried for tried, _ in totals],
        "by_task": {texts.specs[i]: row[0] / row[1] for i, row in sorted(rows.items()) if row[1]},
    }


# ---------------------------------------------------------------------------------------------------------- the command


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(name: str, device: str) -> tuple[Target, Any]:
    """The target and its tokenizer. Raises ConfigError for a checkpoint that the lab did not make."""
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
    size = sum(p.numel() for p in trainer.head.parameters())
    print(
        f"{plan.kind} for {target.facts['name']}: {size_of(size)} parameters ({2 * size / 1e6:.2f} MB in bf16), "
        f"reads layers {', '.join(map(str, trainer.head.shape.layers)) or 'none'}",
        flush=True,
    )
    if not run(trainer, out):
        print(f"stopped at step {trainer.done}; continue with --resume", flush=True)
        return
    heads.write(trainer.head, out, target.facts)
    print(f"weights written to {out} after {time.monotonic() - started:.0f} s", flush=True)
    found = acceptance(trainer.head, target, texts["held out"])
    print(
        f"  held out: {found['tokens_per_forward']:.2f} tokens a forward, accepted by depth "
        + ", ".join(f"{x:.2f}" for x in found["by_depth"]),
        flush=True,
    )
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    record = {
        "kind": plan.kind,
        "target": target.facts,
        "parameters": size,
        "steps": trainer.done,
        "tokens": trainer.tokens,
        "train_seconds": trainer.seconds,
        "replies": len(texts["train"]),
        "lr": plan.rate,
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
    if file.exists():
        return drafter_data.load_texts(file, target.facts["weights"])
    made = {
        "train": drafter_data.sample_texts(
            target.model, tokenizer, plan.mix, plan.replies, "train", plan.seed, plan.reply_tokens, say
        ),
        "held out": drafter_data.sample_texts(
            target.model,
            tokenizer,
            plan.mix,
            plan.held_out,
            "validation",
            plan.seed,
            plan.reply_tokens,
            say,
            temperatures=(0.0,),
        ),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    drafter_data.save_texts(file, made, target.facts["weights"])
    return made
