"""Sums of long numbers, digit by digit from the right, the carry first: ``1+8+7=16`` writes 6 and carries 1.

    Add 483 + 79.      ->      0+3+9=12 / 1+8+7=16 / 1+4+0=5 / Answer: 562

Shape suffixes: N problems, M terms, D digits (lowest first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Split

LONGER = 4  # The split ``longer`` has up to this many digits more than the longest sum in training.


@dataclass(frozen=True)
class Config:
    """The dial: more digits and more terms (2..max_terms) are harder."""

    min_digits: int = 2
    max_digits: int = 10
    max_terms: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits <= 13:
            raise ConfigError(
                f"long_add: min_digits={self.min_digits} and max_digits={self.max_digits} "
                "must satisfy 1 <= min <= max <= 13"
            )
        if not 2 <= self.max_terms <= 6:
            raise ConfigError(f"long_add: max_terms={self.max_terms} must lie in 2..6")


@dataclass(slots=True)
class Sums(Drawn):
    """terms [N, M], -1 where there are fewer; difficulty is the number of digits of the longest term."""

    terms: np.ndarray


class LongAdd(SheetTask):
    """Addition with a digit-wise scratchpad that extends to longer numbers."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Sums:
        c = self.config
        low, high = (c.max_digits + 1, c.max_digits + LONGER) if split == "longer" else (c.min_digits, c.max_digits)
        digits = rng.integers(low, high + 1, count)
        # The first term has all the digits; the others have as many, or one to three fewer.
        fewer = rng.integers(0, 4, (count, c.max_terms))
        fewer[:, 0] = 0
        sizes = np.maximum(digits[:, None] - fewer, 1)
        terms = rng.integers(10 ** (sizes - 1), 10**sizes)
        terms[np.arange(c.max_terms) >= rng.integers(2, c.max_terms + 1, count)[:, None]] = -1
        return Sums(digits, terms)

    def ask(self, sheet: Sheet, drawn: Sums) -> None:
        sheet.put("Add ")
        for m in range(drawn.terms.shape[1]):
            if m:
                sheet.put(" + ", drawn.terms[:, m] >= 0)
            sheet.put_number(drawn.terms[:, m])
        sheet.put(".")

    def solve(self, sheet: Sheet, drawn: Sums, rng: np.random.Generator, wrong: np.ndarray) -> None:
        count, terms = drawn.terms.shape
        at = np.where(wrong, rng.integers(0, 1 << 30, count) % drawn.difficulty, -1)
        by = np.where(rng.random(count) < 0.5, 1, -1)
        carry, total = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        for d in range(int(drawn.difficulty.max(initial=0))):
            used = d < drawn.difficulty
            digits = np.where(drawn.terms >= 0, drawn.terms // 10**d % 10, -1)
            sheet.put_number(carry, used)
            for m in range(terms):
                there = used & (digits[:, m] >= 0)
                sheet.put("+", there)
                sheet.put_number(digits[:, m], there)
            column = carry + np.maximum(digits, 0).sum(1)
            column = np.where(at == d, column + np.where(column == 0, 1, by), column)
            sheet.put("=", used)
            sheet.put_number(column, used)
            sheet.put("\n", used)
            total += np.where(used, column % 10 * 10**d, 0)
            carry = np.where(used, column // 10, carry)
        sheet.put("Answer: ")
        sheet.put_number(total + carry * 10**drawn.difficulty)
