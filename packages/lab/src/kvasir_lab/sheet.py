"""Tasks that numpy writes by the thousand: one rendering gives both the text and the token ids.

A `Sheet` is a grid of text pieces with one row a problem, filled column by column. Joining a row gives its text. Each
distinct piece is tokenised once; gathering their ids turns all rows into training documents, millions of tokens a
second and core. Pieces must meet where no token spans both: at digits, at line ends, or before a space. A test compares
the ids with the tokenised text.

Shape suffixes: N problems, C columns (-1 = empty), K pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.task import HELD_OUT, VERDICTS, Documents, Problem, Split, Task, final_answer, generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DIGITS = tuple("0123456789")
SYSTEMS = ("", "", "", "You are a helpful assistant.", "You are a careful mathematician. Work step by step.")
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
MOST_DRAWN = 1 << 13  # Most rows to draw at once when most of them belong to another split.
MOST_SHOWN = 64  # Characters of a candidate's answer that a check copies; no answer is longer.


@functools.lru_cache(maxsize=1 << 14)
def piece_ids(tokenizer: Tokenizer, piece: str) -> tuple[int, ...]:
    """Token ids of one piece."""
    return tuple(tokenizer.encode(piece, add_special_tokens=False).ids)


def mix(h: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words (the finaliser of splitmix64, public domain)."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def fold(numbers: np.ndarray) -> np.ndarray:
    """Hash each row of an integer array [N, C] to 64 bits: [N]."""
    words = numbers.astype(np.int64).astype(np.uint64)
    place = (np.arange(1, words.shape[1] + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return mix(mix(words + place).sum(1, dtype=np.uint64))


def split_mask(key: np.ndarray, split: Split) -> np.ndarray:
    """Mask [N] bool of the hashes ``key`` [N] that belong to ``split``. All belong to ``longer``."""
    bucket = key % np.uint64(HELD_OUT)
    return {"test": bucket == 0, "validation": bucket == 1, "train": bucket > 1}.get(
        split, np.ones(len(key), dtype=bool)
    )


class Sheet:
    """``count`` rows of text pieces. In every method, ``where`` [N] bool selects the rows; the others stay empty."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pieces: list[str] = []
        self.columns: list[np.ndarray] = []
        self.width = 0
        self._numbers: dict[str, int] = {}
        self._tables: dict[tuple[str, ...], np.ndarray] = {}

    def _add(self, block: np.ndarray) -> None:
        self.columns.append(block.astype(np.int32, copy=False))
        self.width += block.shape[1]

    def _number(self, piece: str) -> int:
        number = self._numbers.get(piece)
        if number is None:
            number = self._numbers[piece] = len(self.pieces)
            self.pieces.append(piece)
        return number

    def put(self, text: str, where: np.ndarray | None = None) -> None:
        """Add a column with the same text in every row."""
        number = self._number(text)
        self._add(np.full((self.count, 1), number) if where is None else np.where(where, number, -1)[:, None])

    def put_choice(self, texts: tuple[str, ...], index: np.ndarray, where: np.ndarray | None = None) -> None:
        """Add ``texts[index]`` for ``index`` [N] or [N, C]; -1 is empty."""
        if texts not in self._tables:
            self._tables[texts] = np.array([self._number(t) for t in texts] + [-1], dtype=np.int32)
        index = index if index.ndim == 2 else index[:, None]
        self._add(self._tables[texts][index if where is None else np.where(where[:, None], index, -1)])

    def put_number(self, value: np.ndarray, where: np.ndarray | None = None, *, digits: int | None = None) -> None:
        """Add ``value`` [N] >= 0 in decimal; a negative value is empty.

        ``digits``: write exactly that many, with leading zeros.
        """
        value = value if where is None else np.where(where, value, -1)
        wide = digits or len(str(int(max(value.max(initial=0), 0))))
        power = 10 ** np.arange(wide - 1, -1, -1, dtype=np.int64)
        place = value[:, None] // power
        shown = value[:, None] >= 0 if digits else (place > 0) | ((power == 1) & (value >= 0)[:, None])
        self.put_choice(DIGITS, np.where(shown, place % 10, -1))

    def put_sheet(self, other: Sheet) -> None:
        """Add the columns of ``other`` to the right of these."""
        table = np.array([self._number(p) for p in other.pieces] + [-1], dtype=np.int32)
        self._add(table[other.grid()])

    def grid(self) -> np.ndarray:
        """Piece numbers [N, C], -1 where empty."""
        if len(self.columns) > 1:
            self.columns = [np.concatenate(self.columns, axis=1)]
        return self.columns[0] if self.columns else np.empty((self.count, 0), dtype=np.int32)

    def reorder(self, keys: np.ndarray) -> None:
        """Sort the cells of every row by ``keys`` [N, C]; cells with equal keys keep their order."""
        self.columns = [np.take_along_axis(self.grid(), np.argsort(keys, axis=1, kind="stable"), 1)]

    def texts(self) -> list[str]:
        """Each row as text."""
        return ["".join([self.pieces[i] for i in row if i >= 0]) for row in self.grid().tolist()]

    def key(self) -> np.ndarray:
        """Hash the pieces of every row in order to 64 bits: [N]. Empty cells do not count."""
        grid = self.grid()
        codes = np.array(
            [int.from_bytes(hashlib.blake2b(p.encode(), digest_size=8).digest(), "little") for p in self.pieces] + [0],
            dtype=np.uint64,
        )
        full = grid >= 0
        place = np.cumsum(full, axis=1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return mix(np.where(full, mix(codes[grid] + place), np.uint64(0)).sum(1, dtype=np.uint64))

    def documents(self, tokenizer: Tokenizer, learnt: Sequence[tuple[int, int]]) -> Documents:
        """Every row as token ids, with loss on the column ranges ``learnt``."""
        grid = self.grid()
        coded = [piece_ids(tokenizer, piece) for piece in self.pieces]
        size = np.array([len(ids) for ids in coded], dtype=np.int64)
        flat = np.fromiter(itertools.chain.from_iterable(coded), dtype=np.int32, count=int(size.sum()))
        begin = np.cumsum(size) - size
        full = grid >= 0
        cells = grid[full]
        sizes = size[cells]
        ends = np.cumsum(sizes)
        ids = flat[np.arange(ends[-1] if len(ends) else 0) + np.repeat(begin[cells] - ends + sizes, sizes)]
        column = np.zeros(grid.shape[1], dtype=bool)
        for first, last in learnt:
            column[first:last] = True
        trained = np.repeat(np.broadcast_to(column, grid.shape)[full], sizes)
        counts = np.concatenate([[0], np.cumsum(full.sum(1))])
        return Documents(ids, trained, np.concatenate([[0], ends])[counts])


@dataclass(slots=True)
class Drawn:
    """N drawn problems as arrays whose first axis is N. Each task adds its own arrays to difficulty [N]."""

    difficulty: np.ndarray

    def __len__(self) -> int:
        return len(self.difficulty)

    def take(self, index: np.ndarray) -> Self:
        return type(self)(*(getattr(self, f.name)[index] for f in dataclasses.fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)))


class SheetTask(Task):
    """A task that draws, asks and solves many problems at once. Subclasses implement `sample`, `ask` and `solve`."""

    candidates = True

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Drawn:
        """Draw about ``count`` problems at the dial's difficulty.

        ``split`` matters for ``longer`` only, which has its own sizes.
        """
        raise NotImplementedError

    def ask(self, sheet: Sheet, drawn: Drawn) -> None:
        """Write the user's questions."""
        raise NotImplementedError

    def solve(self, sheet: Sheet, drawn: Drawn, rng: np.random.Generator, wrong: np.ndarray) -> None:
        """Write the assistant's solutions.

        Where ``wrong`` [N] is set, a solution has a realistic slip and a wrong answer.
        """
        raise NotImplementedError

    def left_wrong(self, rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
        """Training documents that end wrong on purpose: [N] bool."""
        return np.zeros(len(drawn), dtype=bool)

    def key(self, drawn: Drawn) -> np.ndarray:
        """Hash [N] that decides the split.

        It hashes the question. A task overrides it when problems with different texts are the same problem.
        """
        sheet = Sheet(len(drawn))
        self.ask(sheet, drawn)
        return sheet.key()

    def drawn(self, rng: np.random.Generator, split: Split, count: int) -> Drawn:
        """``count`` problems of ``split``. Raises ConfigError when the dial leaves too few."""
        parts: list[Drawn] = []
        found, share = 0, 1 if split in ("train", "longer") else HELD_OUT
        for _ in range(100 + count * share // 64):
            if parts and found >= count:
                break
            made = self.sample(rng, min(int((count - found) * share * 1.1) + 16, MOST_DRAWN), split)
            if split != "longer":
                made = made.take(np.flatnonzero(split_mask(self.key(made), split)))
            parts.append(made)
            found += len(made)
        if found < count:
            raise ConfigError(
                f"task '{self.name}' finds only {found} of {count} problems for '{split}': "
                "its dial leaves too few; turn it up"
            )
        return type(parts[0]).join(parts).take(np.arange(count))

    def written(self, drawn: Drawn, rng: np.random.Generator, wrong: np.ndarray | None = None) -> list[str]:
        """The solutions as text, wrong ones where ``wrong`` [N] is set."""
        sheet = Sheet(len(drawn))
        self.solve(sheet, drawn, rng, np.zeros(len(drawn), dtype=bool) if wrong is None else wrong)
        return sheet.texts()

    def as_problems(self, drawn: Drawn, rng: np.random.Generator) -> list[Problem]:
        sheet = Sheet(len(drawn))
        self.ask(sheet, drawn)
        return [
            Problem(({"role": "user", "content": question},), solution, self.answer(solution) or "", int(difficulty))
            for question, solution, difficulty in zip(
                sheet.texts(), self.written(drawn, rng), drawn.difficulty, strict=True
            )
        ]

    def problems(self, split: Split, seed: int, count: int) -> list[Problem]:
        rng = generator(split, seed)
        return self.as_problems(self.drawn(rng, split, count), rng)

    def draw(self, rng: np.random.Generator, split: Split) -> Problem:
        return self.as_problems(self.drawn(rng, split, 1), rng)[0]

    def belongs(self, problem: Problem, split: Split) -> bool:
        return True  # `draw` returns problems of the split only

    def check(self, problem: Problem, reply: str) -> bool:
        """Whether the last line, and no other line, is ``Answer: X`` with the right X."""
        return self.answer(reply) == problem.answer

    def answer(self, reply: str) -> str | None:
        return final_answer(reply)

    def verify(self, problem: Problem, candidates: Sequence[str], names: Sequence[str]) -> str:
        """Work the problem out first, then look at one candidate after the other.

        A small model that weighs all candidates at every line mixes them up.

            12+45=57 / 57*3=74 / Answer: 74 / A: 71 bad / B: 74 good
        """
        lines = (
            " ".join(filter(None, (f"{name}:", self.account(problem, text)))) + VERDICTS[self.check(problem, text)]
            for name, text in zip(names, candidates, strict=False)
        )
        return "\n".join([*self.work_out(problem), *lines])

    def work_out(self, problem: Problem) -> list[str]:
        """The lines of a check before the first candidate: the solution, or a shorter text that says as much."""
        return problem.solution.split("\n")

    def account(self, problem: Problem, candidate: str) -> str:
        """The text of a check about a candidate before the verdict, on one line: its answer."""
        return (self.answer(candidate) or "none")[:MOST_SHOWN].strip()

    def documents(
        self, tokenizer: Tokenizer, rng: np.random.Generator, count: int, split: Split = "train"
    ) -> Documents:
        drawn = self.drawn(rng, split, count)
        sheet = Sheet(count)
        open_turn(sheet, rng)
        self.ask(sheet, drawn)
        sheet.put(ASSISTANT)
        start = sheet.width
        self.solve(sheet, drawn, rng, self.left_wrong(rng, drawn))
        sheet.put(END)
        return sheet.documents(tokenizer, [(start, sheet.width)])


def open_turn(sheet: Sheet, rng: np.random.Generator) -> None:
    """Write the conversation's opening: a system prompt in some rows, then the header of the user's turn."""
    systems = tuple(
        "<bos>" + (f"<|im_start|>system\n{s}<|im_end|>\n" if s else "") + USER for s in dict.fromkeys(SYSTEMS)
    )
    which = np.maximum(rng.integers(0, len(SYSTEMS), sheet.count) - SYSTEMS.count("") + 1, 0)
    sheet.put_choice(systems, which)
