"""Exact match of a lab model in plain torch: batched greedy decoding, the task's own checker, a 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_lab.evaluation.statistics import wilson
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.sample import complete, complete_all
from kvasir_lab.task import Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Score:
    """``right`` of ``total`` problems.

    ``interval`` holds the true share with 95 % confidence (Wilson).
    """

    task: str
    split: str
    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.task} ({self.split}): {self.right}/{self.total} exact = {self.share:.2%} [{low:.2%}, {high:.2%}]"


def greedy(
    model: Model, prompts: Sequence[Sequence[int]], max_new: int, stop_ids: Sequence[int], **_: object
) -> list[list[int]]:
    """Greedy continuations without the stop token.

    Raises ValueError when the longest prompt leaves no room for a reply.
    """
    return complete(model, prompts, max_new, stop_ids)


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    spec: str,
    count: int,
    *,
    seed: int = 0,
    split: Split = "test",
    max_new: int = 400,
) -> Score:
    """Exact match on ``count`` unseen problems of ``spec``, a task or a form of one.

    A prompt that leaves no room for a reply counts as wrong. Raises ConfigError for an unknown task or form.
    """
    task = load_task(spec)
    problems = task.problems(split, seed, count)
    replies = complete_all(model, tokenizer, [p.prompt for p in problems], max_new, complete=greedy)
    right = sum(
        reply is not None and task.check(problem, reply) for problem, reply in zip(problems, replies, strict=True)
    )
    return Score(spec, split, right, len(problems))
