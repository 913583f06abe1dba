"""Exact match of a lab model by plain torch: batched greedy decoding, the task's own checker, a 95 % interval.

Shape suffixes: B problems at once, T tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvasir.lab.model import Model, losses
from kvasir.lab.task import load_task

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvasir.lab.data import Batch


@dataclass(frozen=True)
class Score:
    """``right`` of ``total`` problems; ``low`` and ``high`` bound the true share with 95 % confidence (Wilson)."""

    task: str
    split: str
    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        z, n, p = 1.959964, self.total, self.share
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.task} ({self.split}): {self.right}/{self.total} exact = {self.share:.2%} [{low:.2%}, {high:.2%}]"


@torch.inference_mode()
def greedy(model: Model, prompts: Sequence[Sequence[int]], max_new: int, stop_ids: Sequence[int]) -> list[list[int]]:
    """Greedy continuations, without the stop token. Prompts are padded on the left; RoPE sees each one's own positions.

    Raises ValueError when the longest prompt leaves no room in the model's positions.
    """
    device = model.model.embed_tokens.weight.device
    wide = max(map(len, prompts))
    max_new = min(max_new, model.shape.positions - wide)
    if max_new < 1:
        raise ValueError(f"a prompt of {wide} tokens leaves no room in {model.shape.positions} positions")
    padding = torch.tensor([wide - len(p) for p in prompts], device=device)
    ids = torch.tensor([[0] * (wide - len(p)) + list(p) for p in prompts], device=device)
    columns = torch.arange(wide + max_new, device=device)
    visible = columns[None] >= padding[:, None]
    # A padded row looks at itself only, since a row that sees nothing would be NaN.
    square = torch.ones(wide, wide, dtype=torch.bool, device=device)
    mask = (visible[:, None, :wide] & square.tril()) | (square.tril() & square.triu())
    cache = model.new_cache(len(prompts), wide + max_new)
    positions = (columns[None, :wide] - padding[:, None]).clamp(min=0)
    chosen = model(ids, mask[:, None], positions=positions, cache=cache)[:, -1].argmax(-1)
    stops = torch.tensor(list(stop_ids), device=device)
    out, done = [chosen], torch.isin(chosen, stops)
    for at in range(wide, wide + max_new - 1):
        if at % 8 == 0 and bool(done.all()):
            break
        logits = model(chosen[:, None], visible[:, None, None, :at + 1], positions=(at - padding)[:, None], cache=cache, at=at)
        chosen = logits[:, -1].argmax(-1)
        done |= torch.isin(chosen, stops)
        out.append(chosen)
    stop = set(stop_ids)
    rows = torch.stack(out, 1).tolist()
    return [row[:next((i for i, t in enumerate(row) if t in stop), len(row))] for row in rows]


def evaluate(model: Model, tokenizer: Tokenizer, spec: str, count: int, *, seed: int = 0, split: str = "test", max_new: int = 400,
             batch: int = 1024, stop_tokens: Sequence[str] = ("<|im_end|>", "<eos>")) -> Score:
    """Exact match on ``count`` unseen problems of task ``spec``. Raises ConfigError for an unknown task or split."""
    task = load_task(spec)
    problems = task.problems(split, seed, count)  # type: ignore[arg-type]
    stop_ids = [tokenizer.token_to_id(t) for t in stop_tokens]
    prompts = [e.ids for e in tokenizer.encode_batch_fast([p.prompt for p in problems], add_special_tokens=False)]
    right = 0
    by_length = sorted(range(len(problems)), key=lambda i: len(prompts[i]))
    for first in range(0, len(by_length), batch):
        chosen = by_length[first:first + batch]
        replies = greedy(model, [prompts[i] for i in chosen], max_new, stop_ids)
        for i, reply in zip(chosen, replies, strict=True):
            right += task.check(problems[i], tokenizer.decode(reply, skip_special_tokens=True))
    return Score(spec, split, right, len(problems))


@torch.inference_mode()
def mean_loss(model: Model, batch: Batch, *, whole: bool = False) -> tuple[float, float]:
    """Mean cross-entropy (nats a token) and share of tokens guessed right, over the batch's trained tokens, 8 rows at a time."""
    device = model.model.embed_tokens.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for first in range(0, len(batch.ids), 8):
        ids, documents, trained = (torch.from_numpy(a[first:first + 8]).to(device) for a in (batch.ids, batch.documents, batch.trained))
        total += losses(model, ids.long(), None if whole else documents, trained)
    loss, _, correct = (total / max(batch.num_trained, 1)).tolist()
    return loss, correct
