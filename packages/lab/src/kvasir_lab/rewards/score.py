"""A process reward model: a lab model whose head for tokens is replaced by one score, trained on beginnings of replies.

score(row) = sigmoid(w . norm(x_row)), read at the last token of a beginning. Trained are all weights, or the head alone
(``tune=head``, a probe of the base model's states). The loss is the cross-entropy with labels from 0 to 1
(`kvasir_lab.rewards.beginnings`). The folder is a Qwen3ForSequenceClassification with one label, which the engine
serves as a reranker; strategies take it as ``prm=FOLDER``.

Shape suffixes: B texts, T tokens, E model dim, M labelled places.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.adapters.reward import area, beliefs
from kvasir_lab.drafters.data import BATCH_TOKENS, Batch, batches
from kvasir_lab.forms import FormTask
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.rewards.beginnings import LABELS, Beginnings, Labels, Replies, label, sample_replies
from kvasir_lab.sample import serving_copy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLIES = {"cuda": 65536, "cpu": 256}  # Replies to train on by default.
LOOK = 20  # Steps between two reports.
RATES = {"all": (1e-4, 1e-3), "head": (0.0, 1e-2)}  # Largest learning rates of trunk and head.
BINS = 10  # Bins of the calibration curve.


@dataclass(frozen=True)
class Plan:
    """A training run.

    ``replies``: to train on, ``each`` of a problem. ``rollouts``: of each line's end, where ``labels=rollouts``.
    ``epochs``: passes over the replies; ``held_out``: replies to other problems, to measure on.
    """

    task: str = "countdown"
    labels: Labels = "outcome"
    tune: Literal["all", "head"] = "all"
    replies: int = REPLIES["cpu"]
    each: int = 8
    rollouts: int = 4
    epochs: float = 2.0
    held_out: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labels not in LABELS or self.tune not in RATES:
            raise ConfigError(
                f"labels={self.labels}, tune={self.tune}: labels are {', '.join(LABELS)}, and tune is all or head"
            )
        if not (1 <= self.each <= self.replies and self.rollouts >= 1 and self.epochs > 0 and self.held_out >= 8):
            raise ConfigError(
                "replies must be at least each, each and rollouts at least 1, epochs above 0, held_out at least 8"
            )


class RewardNet(nn.Module):
    """``trunk`` and the head ``score_E``."""

    def __init__(self, trunk: Model, seed: int = 0) -> None:
        super().__init__()
        self.trunk = trunk
        generator = torch.Generator().manual_seed(seed)
        self.score_E = nn.Parameter(torch.randn(trunk.shape.dim, generator=generator) * trunk.shape.dim**-0.5)

    def states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The final norm's output [B, T, E]; padding stands on the right."""
        trunk, rope = self.trunk.model, self.trunk.rope(ids_BT.shape[1])
        x = trunk.embed_tokens(ids_BT)
        for layer in trunk.layers:
            x = layer(x, rope, None)
        return trunk.norm(x)

    def forward(self, ids_BT: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Logits [B, T] in fp32 of every beginning, or [M] of those at ``where`` (text and place)."""
        x = self.states(ids_BT)
        return ((x if where is None else x[where]).float() * self.score_E.float()).sum(-1)


def load(folder: str | Path, device: str | torch.device = "cpu") -> RewardNet:
    """Load a reward model with the weights of ``folder`` in fp32. Raises ConfigError for another kind of folder."""
    folder = Path(folder)
    weights = dict(read_tensors(folder))
    score = weights.pop("score.weight", None)
    if score is None:
        raise ConfigError(f"{folder} has no score.weight: it is no reward model; 'kvasir train prm' makes one")
    found = RewardNet(export.load(folder, device, weights))
    with torch.no_grad():
        found.score_E.copy_(score[0].float())
    return found.to(device).eval()


def labelled(beginnings: Beginnings, batch: Batch, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Text, place and label [M] of every labelled place of a batch."""
    texts, text_of, places, values = beginnings.replies.texts, [], [], []
    for row, i in enumerate(batch.texts.tolist()):
        told = beginnings.label[texts.bounds[i] : texts.bounds[i + 1]]
        at = np.flatnonzero(~np.isnan(told))
        text_of.append(np.full(len(at), row))
        places.append(at)
        values.append(told[at])
    return tuple(torch.from_numpy(np.concatenate(x)).to(device) for x in (text_of, places, values))


def loss_of(net: RewardNet, beginnings: Beginnings, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats over a batch's labelled places."""
    device = net.score_E.device
    text_of, places, values = labelled(beginnings, batch, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = net(batch.ids.to(device), (text_of, places))
    return F.binary_cross_entropy_with_logits(logits, values)


def fit(
    net: RewardNet, beginnings: Beginnings, plan: Plan, say: Callable[[str], None] = print
) -> list[dict[str, float]]:
    """Train ``net`` in place. Returns the losses. Raises ConfigError where the loss is no number."""
    device, began, history = net.score_E.device, time.monotonic(), []
    net.train().requires_grad_(True)
    slow, quick = RATES[plan.tune]
    groups = [{"params": [net.score_E], "top": quick}]
    if plan.tune == "all":
        groups.append({"params": list(net.trunk.parameters()), "top": slow})
    else:
        net.trunk.requires_grad_(False)
    optimizer = torch.optim.AdamW(groups, lr=quick, betas=(0.9, 0.95), weight_decay=0.01)
    tokens = BATCH_TOKENS[device.type]
    epochs = [list(batches(beginnings.replies.texts, tokens, plan.seed, e)) for e in range(math.ceil(plan.epochs))]
    order = [batch for epoch in epochs for batch in epoch][: max(1, round(plan.epochs * len(epochs[0])))]
    for step, batch in enumerate(order):
        share = min(1.0, (step + 1) / max(1, len(order) // 20)) * 0.5 * (1 + math.cos(math.pi * step / len(order)))
        for group in optimizer.param_groups:
            group["lr"] = group["top"] * share
        loss = loss_of(net, beginnings, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOOK == 0 or step + 1 == len(order):
            now = loss.item()
            if not math.isfinite(now):
                raise ConfigError(f"the loss is {now} at step {step}: train on fewer epochs, or another seed")
            history.append({"step": step, "loss": round(now, 4)})
            say(f"  step {step} of {len(order)}: loss {now:.3f}, {time.monotonic() - began:.0f} s")
    net.eval().requires_grad_(False)
    return history


@torch.no_grad()
def scores(net: RewardNet, replies: Replies) -> list[np.ndarray]:
    """The score of every beginning [T] of each reply, prompt included."""
    found: list[np.ndarray] = [np.empty(0)] * len(replies)
    device = net.score_E.device
    for batch in batches(replies.texts, BATCH_TOKENS[device.type], 0, 0):
        told = net(batch.ids.to(device)).sigmoid().cpu().numpy()
        for row, i in enumerate(batch.texts.tolist()):
            found[i] = told[row, : int(batch.lengths[row])]
    return found


def measure(found: list[np.ndarray], replies: Replies) -> dict[str, Any]:
    """Measure how well scores predict that a reply becomes right: the area under the curve of all lines' ends, by the
    number of lines (4 and more together), of whole replies, at the prompt's end, and the calibration of all."""
    ends = [(int(i), n, float(found[i][p])) for i in range(len(replies)) for n, p in enumerate(replies.lines[i])]
    value, right = np.array([v for _, _, v in ends]), np.array([replies.right[i] for i, _, _ in ends])
    depth = np.array([min(4, n + 1) for _, n, _ in ends])
    last = np.array([found[i][replies.lines[i][-1]] for i in range(len(replies))])
    prompt = np.array([found[i][replies.texts.begins[i] - 1] for i in range(len(replies))])
    curve = []
    for low in np.arange(BINS) / BINS:
        within = (value >= low) & (value < low + 1 / BINS + (low == (BINS - 1) / BINS))
        if within.any():
            said, came = (round(float(x[within].mean()), 4) for x in (value, right))
            curve.append([int(within.sum()), said, came])
    return {
        "auc": area(value, right),
        "auc_by_lines": {str(d): area(value[depth == d], right[depth == d]) for d in range(1, 5)},
        "auc_whole": area(last, replies.right),
        "auc_prompt": area(prompt, replies.right),
        "brier": round(float(np.mean((value - right) ** 2)), 4),
        "calibration": curve,
    }


def untrained(source: Path, tokenizer: Tokenizer, replies: Replies, device: str) -> dict[str, Any]:
    """The same areas for the model's own Yes or No, the judge that needs no training."""
    form = FormTask("self_evaluate", load_task(replies.texts.specs[0]))
    cases, where = [], []
    for i in range(len(replies)):
        for n, place in enumerate(replies.lines[i]):
            problem, text = replies.problems[replies.problem_of[i]], replies.written(tokenizer, i, int(place))
            cases.append(form.case(problem, [text]))
            where.append((i, min(4, n + 1)))
    value = np.array(beliefs(source, cases, device))
    right, depth = np.array([replies.right[i] for i, _ in where]), np.array([d for _, d in where])
    return {
        "auc": area(value, right),
        "auc_by_lines": {str(d): area(value[depth == d], right[depth == d]) for d in range(1, 5)},
    }


def train(
    plan: Plan, target: str, out: Path, say: Callable[[str], None] = print, device: str = "cpu"
) -> dict[str, Any]:
    """Train a reward model for the replies of ``target`` and write it to ``out``. Returns the record, which is also in
    ``reward.json``. Raises ConfigError for a plan that cannot work."""
    source = checkpoint.resolve(target)
    base, tokenizer, began = export.load(source, device), lab_tokenizer.load(source), time.monotonic()
    served = serving_copy(base)
    say(f"{source.name} on {plan.task}, labels by {plan.labels}")
    replies = sample_replies(served, tokenizer, plan.task, plan.replies, plan.each, "train", plan.seed, say)
    held = sample_replies(served, tokenizer, plan.task, plan.held_out, 4, "validation", plan.seed, say)
    beginnings = label(replies, plan.labels, served, tokenizer, plan.rollouts, plan.seed, say)
    net = RewardNet(base, plan.seed).to(device)
    history = fit(net, beginnings, plan, say)
    export.export(net.trunk, tokenizer, out, score_E=net.score_E)
    record: dict[str, Any] = {
        "kind": "score",
        "base": source.name,
        "plan": asdict(plan),
        "history": history,
        "right": round(float(replies.right.mean()), 4),
        "before": untrained(source, tokenizer, held, device),
        "after": measure(scores(load(out, device), held), held),
        "seconds": round(time.monotonic() - began, 1),
    }
    say(f"area under the curve: {record['before']['auc']} of its own Yes or No, {record['after']['auc']} after")
    (out / "reward.json").write_text(json.dumps(record, indent=2) + "\n")
    return record
