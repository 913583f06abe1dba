"""The seam of the lab's tasks: seeded problems, an exact checker, a difficulty dial, and training documents.

A task is one module in `kvasir_lab/tasks/`. Its name is that of a technique: ``chain``, or ``chain:max_steps=8`` with
its dial turned, or ``judge_pair/chain:max_steps=8`` for a prompt form (`kvasir_lab.forms`) on its problems. A task's
splits never share a problem: a hash of the problem decides the split. ``longer`` holds sizes that are never trained on.

Shape suffixes: T tokens, N documents.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from kvasir.errors import ConfigError
from kvasir.technique import Technique
from kvasir_lab.chat import Message, Segment, prompt, segments

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Split = Literal["train", "validation", "test", "longer"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test", "longer")
VERDICTS = (" bad", " good")  # How a check ends the line of a wrong and of a right candidate; each is one token.
HELD_OUT = 64  # One problem in 64 belongs to validation, and one to test.


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its solution.

    ``messages``: the conversation up to the question. ``solution``: the reply that a model is trained on. ``answer``:
    what the checker compares. ``difficulty``: the task's own measure, for example the number of steps. ``last_only``:
    the assistant's earlier turns carry no loss, because they may be wrong.
    """

    messages: tuple[Message, ...]
    solution: str
    answer: str
    difficulty: int = 0
    tools: tuple[dict, ...] = ()
    last_only: bool = False

    @property
    def prompt(self) -> str:
        """The question as the model reads it, up to the header of its own turn."""
        return prompt(self.messages, self.tools)

    def segments(self) -> list[Segment]:
        """The whole conversation, solution included, as text pieces that carry loss or not."""
        out = segments([*self.messages, {"role": "assistant", "content": self.solution}], self.tools)
        return [(text, learnt and i == len(out) - 2) for i, (text, learnt) in enumerate(out)] if self.last_only else out


def final_answer(reply: str) -> str | None:
    """The X of ``Answer: X`` in the last line; None when that line is missing or not the only one."""
    lines = reply.strip().split("\n")
    if sum(line.startswith("Answer:") for line in lines) != 1 or not lines[-1].startswith("Answer: "):
        return None
    return lines[-1].removeprefix("Answer: ").strip() or None


@dataclass(slots=True)
class Documents:
    """Token ids of N documents, end to end.

    ids [T] int32; trained [T] bool marks the tokens that carry loss; document n lies from bounds[n] to bounds[n + 1].
    """

    ids: np.ndarray
    trained: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)

    def take(self, index: np.ndarray) -> Documents:
        """The documents at ``index`` [K], in that order."""
        lengths = self.lengths[index]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        where = np.arange(bounds[-1]) + np.repeat(self.bounds[index] - bounds[:-1], lengths)
        return Documents(self.ids[where], self.trained[where], bounds)

    @staticmethod
    def join(parts: Sequence[Documents]) -> Documents:
        return Documents(
            np.concatenate([p.ids for p in parts]),
            np.concatenate([p.trained for p in parts]),
            np.concatenate([[0], np.cumsum(np.concatenate([p.lengths for p in parts]))]),
        )


def encode(tokenizer: Tokenizer, documents: Sequence[Sequence[Segment]]) -> Documents:
    """Tokenise documents given as segments.

    Segments meet at special tokens or line ends, so no token spans two of them.
    """
    flat = [segment for document in documents for segment in document]
    coded = [e.ids for e in tokenizer.encode_batch_fast([text for text, _ in flat], add_special_tokens=False)]
    sizes = np.array([len(ids) for ids in coded], dtype=np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(coded), dtype=np.int32, count=int(sizes.sum()))
    trained = np.repeat(np.array([t for _, t in flat], dtype=bool), sizes)
    ends = np.cumsum([len(document) for document in documents])
    return Documents(ids, trained, np.concatenate([[0], np.concatenate([[0], np.cumsum(sizes)])[ends]]))


def split_of(text: str) -> Split:
    """The split that a problem belongs to, by its text. Never ``longer``, which depends on size."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % HELD_OUT
    return {0: "test", 1: "validation"}.get(bucket, "train")  # type: ignore[return-value]


def generator(split: Split, seed: int) -> np.random.Generator:
    """A random generator with its own stream for every split and seed. Raises ConfigError for an unknown split."""
    if split not in SPLITS:
        raise ConfigError(f"no split named '{split}'; there are {', '.join(SPLITS)}")
    return np.random.default_rng([SPLITS.index(split), seed])


class Task(Technique):
    """One kind of problem.

    ``scored``: by ``answer`` (exact match) or by ``loss`` (prose has no right answer). ``pool``: number of training
    documents to make once and draw from; 0 means that ``documents`` is fast enough for every batch. ``candidates``:
    whether the task can write right and wrong solutions for the prompt forms.
    """

    scored: ClassVar[Literal["answer", "loss"]] = "answer"
    pool: ClassVar[int] = 0
    candidates: ClassVar[bool] = False

    @abstractmethod
    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        """Draw one problem at the dial's difficulty, always the same one from the same ``rng``.

        ``split`` matters for ``longer`` only, which has its own sizes.
        """
        raise NotImplementedError

    def belongs(self, problem: Problem, split: Split) -> bool:
        """Whether ``problem`` may stand in ``split``. A task too small to hold problems out accepts all."""
        return split == "longer" or split_of(problem.messages[-1]["content"]) == split

    def problems(self, split: Split, seed: int, count: int) -> list[Problem]:
        """``count`` problems of ``split``; the same seed gives the same problems.

        Raises ConfigError when the dial leaves too few.
        """
        return self._sample(generator(split, seed), split, count)

    def _sample(self, rng: np.random.Generator, split: Split, count: int) -> list[Problem]:
        out: list[Problem] = []
        for _ in range(40 * HELD_OUT + 8 * HELD_OUT * count):
            if len(out) == count:
                return out
            problem = self.draw(rng, split)
            if self.belongs(problem, split):
                out.append(problem)
        raise ConfigError(
            f"task '{self.name}' finds only {len(out)} of {count} problems for '{split}': its dial leaves too few"
        )

    def check(self, problem: Problem, reply: str) -> bool:
        """Whether ``reply`` (the assistant's text without special tokens) solves ``problem``. Takes any text."""
        return reply.strip() == problem.answer

    def answer(self, reply: str) -> str | None:
        """The canonical answer of a reply; None without an answer. Takes any text.

        Equal answers are equal values, as votes need.
        """
        return reply.strip() or None if self.scored == "answer" else None

    def verify(self, problem: Problem, candidates: Sequence[str], names: Sequence[str]) -> str:
        """The written check of ``candidates`` that a judge learns to write before its verdict.

        The check is exact and has no empty line. It ends with one line for each candidate: its name first, and as the
        last word a verdict that follows from what was written. Candidates may be any texts.
        """
        raise NotImplementedError

    def work_out(self, problem: Problem) -> list[str]:
        """The lines of a check before the line of the first candidate.

        Empty when a solution of one's own says nothing about another solution. The question is one line then.
        """
        raise NotImplementedError

    def tally(self, problem: Problem, reply: str) -> dict[str, int]:
        """Further counts of a reply, by name. Callers sum them over replies."""
        return {}

    def notes(self, problem: Problem) -> list[str]:
        """Further facts about a problem, a few words each, for readers of samples."""
        return []

    def documents(
        self, tokenizer: Tokenizer, rng: np.random.Generator, count: int, split: Split = "train"
    ) -> Documents:
        """Make ``count`` whole conversations, tokenised, with loss on the assistant's tokens."""
        return encode(tokenizer, [p.segments() for p in self._sample(rng, split, count)])
