"""Two chains of arithmetic of unequal length whose results are added: the difficulty of each part is known.

    Compute modulo 97 and add. A: start 12; +45; *3. B: start 5; -7; +1; *2.

The reply works out part A, then part B, then the sum: ``Answer: N``. A method that shares tokens out between parts is
measured against the parts' numbers of steps, which ``notes`` tells.

Shape suffixes: N problems, K steps; the parts are axis 1 where there are two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kvasir.lab.arithmetic import LONGER, SIGNS, Chains, check_dial, draw_chains, put_chain, slipped
from kvasir.lab.sheet import Drawn, Sheet, SheetTask
from kvasir.lab.task import Problem, Split

NAMES = ("A", "B")


@dataclass(frozen=True)
class Config:
    """The dial: ``easy`` and ``hard`` are the most steps of the short and of the long part; each has at least one."""

    modulus: int = 97
    easy: int = 3
    hard: int = 10
    max_factor: int = 12

    def __post_init__(self) -> None:
        check_dial("two_part", self.modulus, self.easy, self.hard, self.max_factor)


@dataclass(slots=True)
class Pairs(Drawn):
    """steps, start [N, 2]; signs, operands, values [N, 2, K]; modulus [N]. Difficulty: steps of both parts."""

    steps: np.ndarray
    start: np.ndarray
    signs: np.ndarray
    operands: np.ndarray
    values: np.ndarray
    modulus: np.ndarray

    def part(self, p: int) -> Chains:
        """One part of all problems."""
        return Chains(
            self.steps[:, p],
            self.start[:, p],
            self.signs[:, p],
            self.operands[:, p],
            self.values[:, p],
            self.modulus,
        )


class TwoPart(SheetTask):
    """Two sub-problems whose difficulties differ and are known."""

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Pairs:
        c = self.config
        longer = split == "longer"
        short = draw_chains(rng, count, (c.easy if longer else 1, c.easy), c.modulus, c.max_factor)
        low, high = (c.hard + 1, c.hard + LONGER) if longer else (c.easy + (c.hard > c.easy), c.hard)
        long = draw_chains(rng, count, (low, high), c.modulus, c.max_factor)
        swap = rng.random(count) < 0.5

        def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            """The arrays of both parts, the short one first or last."""
            if a.ndim == 2:
                a = np.concatenate([a, np.full((count, b.shape[1] - a.shape[1]), -1)], 1)
            pair = np.stack([a, b], 1)
            return np.where(swap.reshape(-1, *[1] * (pair.ndim - 1)), pair[:, ::-1], pair)

        return Pairs(
            short.difficulty + long.difficulty,
            both(short.difficulty, long.difficulty),
            both(short.start, long.start),
            both(short.signs, long.signs),
            both(short.operands, long.operands),
            both(short.values, long.values),
            short.modulus,
        )

    def ask(self, sheet: Sheet, drawn: Pairs) -> None:
        for p, name in enumerate(NAMES):  # no token spans two pieces
            sheet.put(f". {name}: start " if p else f"Compute modulo {self.config.modulus} and add. {name}: start ")
            put_chain(sheet, drawn.part(p))
        sheet.put(".")

    def solve(self, sheet: Sheet, drawn: Pairs, rng: np.random.Generator, wrong: np.ndarray) -> None:
        where = rng.integers(0, 2, len(drawn))  # the part that has the slip
        results = []
        for p, name in enumerate(NAMES):
            chain = drawn.part(p)
            values, _ = slipped(chain, rng, wrong & (where == p))
            sheet.put(f"{name}\n")
            value = chain.start
            for k in range(chain.signs.shape[1]):
                used = chain.signs[:, k] >= 0
                sheet.put_number(value, used)
                sheet.put_choice(SIGNS, chain.signs[:, k])
                sheet.put_number(chain.operands[:, k])
                sheet.put("=", used)
                sheet.put_number(values[:, k])
                sheet.put("\n", used)
                value = np.where(used, values[:, k], value)
            results.append(value)
        total = (results[0] + results[1]) % drawn.modulus
        sheet.put_number(results[0])
        sheet.put("+")
        sheet.put_number(results[1])
        sheet.put("=")
        sheet.put_number(total)
        sheet.put("\n")
        sheet.put("Answer: ")
        sheet.put_number(total)

    def notes(self, problem: Problem) -> list[str]:
        """The number of steps of each part."""
        return [f"{name}: {steps} steps" for name, steps in zip(NAMES, part_steps(problem))]


def part_steps(problem: Problem) -> tuple[int, int]:
    """The number of steps of part A and of part B, by the question."""
    parts = re.split(r"\. B: ", problem.messages[-1]["content"])
    first, second = (part.count(";") for part in parts)
    return first, second
