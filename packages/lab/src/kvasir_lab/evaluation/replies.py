"""A model's replies to problems, which the exact checker tells right from wrong: to measure with, and to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvasir_lab.model import Model
from kvasir_lab.sample import complete_all
from kvasir_lab.task import Problem, Split, Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Replies:
    """Several replies to one problem.

    ``right``: which of them are right. ``answers``: their canonical answers (None: no answer found).
    """

    problem: Problem
    texts: tuple[str, ...]
    right: tuple[bool, ...]
    answers: tuple[str | None, ...]

    @staticmethod
    def join(parts: Sequence[Replies]) -> Replies:
        """Several models' replies to one problem as one."""
        return Replies(
            parts[0].problem,
            *(tuple(x for part in parts for x in getattr(part, name)) for name in ("texts", "right", "answers")),
        )


def sample_replies(
    model: Model,
    tokenizer: Tokenizer,
    task: Task,
    split: Split,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_new: int,
    seed: int,
) -> list[Replies]:
    """Sample ``samples`` replies to each of ``problems`` problems.

    A prompt that leaves no room gets empty replies, which are wrong.
    """
    asked = task.problems(split, seed, problems)
    written = complete_all(
        model, tokenizer, [p.prompt for p in asked for _ in range(samples)], max_new, temperature=temperature, seed=seed
    )
    out = []
    for n, problem in enumerate(asked):
        texts = tuple(text or "" for text in written[n * samples : (n + 1) * samples])
        out.append(
            Replies(problem, texts, tuple(task.check(problem, t) for t in texts), tuple(task.answer(t) for t in texts))
        )
    return out


def choose(rng: np.random.Generator, replies: Replies, right: int, count: int) -> list[str] | None:
    """Choose ``count`` of the replies, ``right`` of them right, in random order.

    None when there are too few of a kind. Empty replies are never chosen.
    """
    groups = [
        [t for t, ok in zip(replies.texts, replies.right, strict=True) if ok == wanted and t.strip()]
        for wanted in (True, False)
    ]
    if right > len(groups[0]) or count - right > len(groups[1]):
        return None
    texts = [
        group[i]
        for group, n in zip(groups, (right, count - right), strict=True)
        for i in rng.permutation(len(group))[:n]
    ]
    return [texts[i] for i in rng.permutation(count)]
