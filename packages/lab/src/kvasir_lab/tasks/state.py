"""Follow a state through many changes: a row of letters under swaps, or the parity of bits, written down now and then.

    Row C A B. Swap 1 2, 2 3, 1 3. Write the row after every 2 swaps.      ->      A B C / Answer: C B A

The true dial is ``every``, the number of changes between two written states, which the model must follow without
writing.

Shape suffixes: N problems, K changes (-1 beyond a problem's last change), I items.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split
from kvasir_lab.words import LETTERS

LONGER = 8  # The split ``longer`` has up to this many changes more than the longest problem in training.
SPACED = tuple(f" {letter}" for letter in LETTERS)
PARITY = ("even", "odd")
SPACED_PARITY = (" even", " odd")


@dataclass(frozen=True)
class Config:
    """``kind``: permutation or parity. ``min_every``..``max_every``: changes between two written states."""

    kind: str = "permutation"
    items: int = 5
    min_steps: int = 4
    max_steps: int = 16
    min_every: int = 1
    max_every: int = 6

    def __post_init__(self) -> None:
        if self.kind not in ("permutation", "parity"):
            raise ConfigError(f"state: kind='{self.kind}' is neither 'permutation' nor 'parity'")
        if not 3 <= self.items <= 9:
            raise ConfigError(f"state: items={self.items} must lie in 3..9")
        if not 1 <= self.min_steps <= self.max_steps <= 64:
            raise ConfigError(
                f"state: min_steps={self.min_steps} and max_steps={self.max_steps} must satisfy 1 <= min <= max <= 64"
            )
        if not 1 <= self.min_every <= self.max_every <= 64:
            raise ConfigError(
                f"state: min_every={self.min_every} and max_every={self.max_every} must satisfy 1 <= min <= max <= 64"
            )


@dataclass(slots=True)
class Walks(Drawn):
    """every [N]; start [N, I] letters; first, second [N, K]: places to swap, or the bits in ``first``."""

    every: np.ndarray
    start: np.ndarray
    first: np.ndarray
    second: np.ndarray


class State(SheetTask):
    """State tracking with a scratchpad that is written every few steps only."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.parity = self.config.kind == "parity"

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Walks:
        c = self.config
        low, high = (c.max_steps + 1, c.max_steps + LONGER) if split == "longer" else (c.min_steps, c.max_steps)
        steps = rng.integers(low, high + 1, count)
        start = np.argsort(rng.random((count, c.items)), axis=1)
        if self.parity:
            first = rng.integers(0, 2, (count, high))
            second = np.zeros_like(first)
        else:
            first = rng.integers(0, c.items, (count, high))
            second = (first + rng.integers(1, c.items, (count, high))) % c.items
        beyond = np.arange(high) >= steps[:, None]
        first[beyond] = second[beyond] = -1
        return Walks(steps, rng.integers(c.min_every, c.max_every + 1, count), start, first, second)

    def ask(self, sheet: Sheet, drawn: Walks) -> None:
        sheet.put("Bits" if self.parity else "Row")
        if not self.parity:
            for i in range(drawn.start.shape[1]):
                sheet.put_choice(SPACED, drawn.start[:, i])
            sheet.put(". Swap")
        for k in range(drawn.first.shape[1]):
            used = drawn.first[:, k] >= 0
            if self.parity:
                sheet.put(" ", used)
                sheet.put_number(drawn.first[:, k])
            else:
                sheet.put(", " if k else " ", used)
                sheet.put_number(drawn.first[:, k] + 1, used)
                sheet.put(" ", used)
                sheet.put_number(drawn.second[:, k] + 1, used)
        sheet.put(". Write the parity after every " if self.parity else ". Write the row after every ")
        sheet.put_number(drawn.every)
        sheet.put(" bits." if self.parity else " swaps.")

    def solve(self, sheet: Sheet, drawn: Walks, rng: np.random.Generator, wrong: np.ndarray) -> None:
        count, wide = drawn.first.shape
        skipped = self._skipped(drawn, rng, wrong)
        state, rows = (np.zeros((count, 1), dtype=np.int64) if self.parity else drawn.start.copy()), np.arange(count)
        for k in range(wide):
            used = drawn.first[:, k] >= 0
            change = used & (skipped != k)
            if self.parity:
                # A slip reads the bit as the other one.
                state[:, 0] ^= np.where(used, drawn.first[:, k] ^ (skipped == k), 0)
            else:
                a, b = drawn.first[:, k], np.where(change, drawn.second[:, k], drawn.first[:, k])
                state[rows, a], state[rows, b] = state[rows, b], state[rows, a]
            self._write(sheet, state, used & ((k + 1) % drawn.every == 0) & (k + 1 < drawn.difficulty), "\n")
        sheet.put("Answer:")
        self._write(sheet, state, np.ones(count, dtype=bool), "", spaced=True)

    def work_out(self, problem: Problem) -> list[str]:
        """The row after every single swap, which is easier than after several at once."""
        if self.parity:
            return super().work_out(problem)
        start, swaps = re.findall(r"Row ([A-Z ]+)\. Swap ([\d ,]+)\. ", problem.messages[-1]["content"])[0]
        row, out = start.split(" "), []
        for swap in swaps.split(", "):
            a, b = (int(place) - 1 for place in swap.split(" "))
            row[a], row[b] = row[b], row[a]
            out.append(" ".join(row))
        return [*out, f"Answer: {out[-1]}"]

    @staticmethod
    def _skipped(drawn: Walks, rng: np.random.Generator, wrong: np.ndarray) -> np.ndarray:
        """The change that a wrong solution forgets [N], -1 = none. Forgetting any single change alters the result."""
        return np.where(wrong, rng.integers(0, 1 << 30, len(drawn)) % drawn.difficulty, -1)

    def _write(self, sheet: Sheet, state: np.ndarray, where: np.ndarray, end: str, spaced: bool = False) -> None:
        if self.parity:
            sheet.put_choice(SPACED_PARITY if spaced else PARITY, state[:, 0], where)
        else:
            for i in range(state.shape[1]):
                sheet.put_choice(SPACED if i or spaced else LETTERS, state[:, i], where)
        if end:
            sheet.put(end, where)
