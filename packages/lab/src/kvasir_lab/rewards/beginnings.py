"""Training data of reward models: a model's own replies, and labels at the places where a search would ask.

Places are the last token of every line, the last token of the reply, a few in between, because pruning asks in the
middle of a line, and the last token of the prompt, whose score predicts how difficult the problem is. There are four
ways to label a place:

- ``outcome``: whether the reply that goes on from there is right, an estimate from one rollout;
- ``rollouts``: the share of right replies among ``k`` fresh continuations of a line's end (Math-Shepherd, Wang et al.
  2023, arXiv 2312.08935), and the outcome elsewhere;
- ``task``: whether the lines so far are those of the task's own solution, or a whole solution that its checker accepts;
- ``restart``: the chance that a fresh reply would be no better (Manvi et al. 2024, arXiv 2410.02725): 1 for a right
  reply, otherwise the share of wrong ones among the other replies to the problem. Ties count as no better.

Legend: N replies, T tokens of all replies and their prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kvasir.errors import ConfigError
from kvasir.progress import Progress
from kvasir_lab import sample
from kvasir_lab.drafters.data import Texts
from kvasir_lab.lookup import load_task
from kvasir_lab.model import Model
from kvasir_lab.task import Problem, Split
from kvasir_lab.tokenizer import STOPS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Labels = Literal["outcome", "rollouts", "task", "restart"]
LABELS: tuple[Labels, ...] = get_args(Labels)
BETWEEN = 2  # Further places of a reply, at random.
ROOM = 1.5  # Most tokens of a reply, as a multiple of the longest solution; 32 tokens come on top.


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies of a model.

    texts: prompts and replies, end to end, with the end mark of those that ended; right [N] bool; problem_of [N]:
    number of the problem; lines: places of each line's end and of the reply's end, within the text; between: the other
    places.
    """

    texts: Texts
    right: np.ndarray
    problem_of: np.ndarray
    lines: list[np.ndarray]
    between: list[np.ndarray]
    problems: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.right)

    def written(self, tokenizer: Tokenizer, i: int, place: int) -> str:
        """The text of reply ``i`` up to the token at ``place``."""
        ids = self.texts.text(i)[self.texts.begins[i] : place + 1]
        return tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def newlines(tokenizer: Tokenizer) -> np.ndarray:
    """Whether a token ends a line [V] bool."""
    count = tokenizer.get_vocab_size()
    texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=True)
    return np.array(["\n" in text for text in texts])


def room(tokenizer: Tokenizer, problems: Sequence[Problem]) -> int:
    """Most tokens of a reply to one of ``problems``."""
    longest = max(len(e.ids) for e in tokenizer.encode_batch_fast([p.solution for p in problems]))
    return int(ROOM * longest) + 32


def sample_replies(
    model: Model,
    tokenizer: Tokenizer,
    task: str,
    count: int,
    each: int,
    split: Split,
    seed: int,
    say: Callable[[str], None] = print,
    temperature: float = 1.0,
) -> Replies:
    """Sample ``each`` replies of ``model`` (as it is served) to ``count`` / ``each`` problems of ``task``.

    Raises ConfigError for a task without right and wrong answers.
    """
    inner, begin = load_task(task), time.monotonic()
    if inner.scored != "answer":
        raise ConfigError(f"task '{task}' is scored by {inner.scored}; a reward model needs answers that are right")
    problems = inner.problems(split, seed, max(1, count // each))
    longest = room(tokenizer, problems)
    prompts = [e.ids for e in tokenizer.encode_batch_fast([p.prompt for p in problems], add_special_tokens=False)]
    stops = [tokenizer.token_to_id(t) for t in STOPS]
    asked = [ids for ids in prompts for _ in range(each)]
    with Progress(f"sampling ({split})", brief=True) as progress:
        shown = sample.counted(len(asked), progress)
        found = sample.continue_all(model, asked, longest, stops, temperature=temperature, seed=seed, complete=shown)
    kept = [i for i, reply in enumerate(found) if reply]
    texts = tokenizer.decode_batch([found[i] or [] for i in kept], skip_special_tokens=True)
    right = np.array([inner.check(problems[i // each], text) for i, text in zip(kept, texts, strict=True)], bool)
    pairs = [(asked[i], [*(found[i] or []), *stops[: int(len(found[i] or []) < longest)]]) for i in kept]
    sizes = [len(prompt) + len(reply) for prompt, reply in pairs]
    packed = Texts(
        np.array([t for prompt, reply in pairs for t in (*prompt, *reply)], np.int32),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array([len(prompt) for prompt, _ in pairs]),
        np.zeros(len(pairs), np.int64),
        (task,),
    )
    ends, rng = newlines(tokenizer), np.random.default_rng([seed, 1])
    lines, between = [], []
    for i in range(len(packed)):
        ids, first = packed.text(i), packed.begins[i]
        at = np.flatnonzero(ends[ids[first:]]) + first
        lines.append(np.union1d(at, [len(ids) - 1]))
        between.append(np.setdiff1d(rng.integers(first, len(ids), BETWEEN), lines[-1]))
    say(f"  {len(packed)} replies ({split}), {right.mean():.1%} right, {time.monotonic() - begin:.1f} s")
    return Replies(packed, right, np.array(kept) // each, lines, between, problems)


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Labelled places of replies: label [T] float32 from 0 to 1, NaN where there is none."""

    replies: Replies
    label: np.ndarray


def label(
    replies: Replies,
    kind: Labels,
    model: Model,
    tokenizer: Tokenizer,
    k: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = print,
    temperature: float = 1.0,
) -> Beginnings:
    """Label the places of ``replies``. ``k``: rollouts of each line's end, for ``rollouts``. Raises ConfigError."""
    if kind not in LABELS:
        raise ConfigError(f"labels={kind} is not one of {', '.join(LABELS)}")
    found = np.full(int(replies.texts.bounds[-1]), np.nan, np.float32)
    values = replies.right.astype(np.float32)
    if kind == "restart":
        total = np.bincount(replies.problem_of, minlength=len(replies.problems))
        good = np.bincount(replies.problem_of, replies.right, minlength=len(replies.problems))
        others = np.maximum(1, total[replies.problem_of] - 1)
        rate = (good[replies.problem_of] - replies.right) / others
        values = np.where(replies.right, 1.0, 1.0 - rate).astype(np.float32)
    for i, begin in enumerate(replies.texts.bounds[:-1]):
        found[begin + replies.lines[i]] = values[i]
        if kind != "task":
            found[begin + replies.between[i]] = values[i]
            found[begin + replies.texts.begins[i] - 1] = values[i]
    if kind == "task":
        _by_task(replies, found, tokenizer)
    if kind == "rollouts":
        _by_rollouts(replies, found, model, tokenizer, k, seed, say, temperature)
    return Beginnings(replies, found)


def _by_task(replies: Replies, found: np.ndarray, tokenizer: Tokenizer) -> None:
    """Label the lines by the task's solution and checker."""
    for i, begin in enumerate(replies.texts.bounds[:-1]):
        problem = replies.problems[replies.problem_of[i]]
        for place in replies.lines[i][:-1]:
            found[begin + place] = problem.solution.startswith(replies.written(tokenizer, i, int(place)))


def _by_rollouts(
    replies: Replies,
    found: np.ndarray,
    model: Model,
    tokenizer: Tokenizer,
    k: int,
    seed: int,
    say: Callable[[str], None],
    temperature: float,
) -> None:
    """Label the lines by fresh continuations; the end of a reply keeps its outcome. Equal beginnings share theirs."""
    begin, task = time.monotonic(), load_task(replies.texts.specs[0])
    places: dict[tuple[int, ...], list[int]] = {}
    problem_of: dict[tuple[int, ...], int] = {}
    for i, start in enumerate(replies.texts.bounds[:-1]):
        for place in replies.lines[i][:-1].tolist():
            ids = tuple(replies.texts.text(i)[: place + 1].tolist())
            places.setdefault(ids, []).append(int(start) + place)
            problem_of[ids] = int(replies.problem_of[i])
    asked = [ids for ids in places for _ in range(k)]
    stops = [tokenizer.token_to_id(t) for t in STOPS]
    longest = room(tokenizer, replies.problems)
    with Progress("rollouts", brief=True) as progress:
        shown = sample.counted(len(asked), progress)
        told = sample.continue_all(model, asked, longest, stops, temperature=temperature, seed=seed + 1, complete=shown)
    first_of = dict(zip(replies.problem_of.tolist(), replies.texts.begins.tolist(), strict=True))
    written = [(*ids[first_of[problem_of[ids]] :], *(reply or ())) for ids, reply in zip(asked, told, strict=True)]
    texts = tokenizer.decode_batch([list(ids) for ids in written], skip_special_tokens=True)
    right = [task.check(replies.problems[problem_of[ids]], text) for ids, text in zip(asked, texts, strict=True)]
    for j, where in enumerate(places.values()):
        found[where] = float(np.mean(right[j * k : (j + 1) * k]))
    say(f"  {len(places)} beginnings, {k} rollouts each, {time.monotonic() - begin:.1f} s")
