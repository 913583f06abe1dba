"""Two chains of arithmetic of unequal length whose results are added: the difficulty of each part is known.

    Compute modulo 97 and add. A: start 12; +45; *3. B: start 5; -7; +1; *2.

The reply works out part A, then part B, then the sum: ``Answer: N``. A method that shares tokens out between parts is
measured against the parts' numbers of steps, which ``notes`` tells.

``kind=hinted`` gives each part a number of tokens, and a part with too few is written without its operations:

    ... A: up to 30 tokens. B: up to 8 tokens.  ->  A / 12+45=57 / 57*3=74 / B / 95 / 96 / 95 / 74+95=72 / Answer: 72

``kind=plan`` asks for a plan as JSON, with credits by the parts' steps. ``mixed`` draws one of the three for each
problem, to train a model for `plan_and_budget`.

Shape suffixes: N problems, K steps; the parts are axis 1 where there are two.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvasir_lab.arithmetic import LONGER, SIGNS, Chains, check_dial, draw_chains, put_chain, slipped
from kvasir_lab.chat import Message
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split

NAMES = ("A", "B")
FULL, TERSE = 9, 3  # most tokens of a line with and without its operation
PLAIN, HINTED, PLANNED = range(3)
KINDS = {"solve": PLAIN, "hinted": HINTED, "plan": PLANNED}
PLAN = " Plan the parts, do not solve them."


@dataclass(frozen=True)
class Config:
    """The dial: ``easy`` and ``hard`` are the most steps of the short and of the long part; each has at least one.
    ``kind``: of the prompts and replies."""

    modulus: int = 97
    easy: int = 3
    hard: int = 10
    max_factor: int = 12
    kind: Literal["solve", "hinted", "plan", "mixed"] = "solve"

    def __post_init__(self) -> None:
        check_dial("two_part", self.modulus, self.easy, self.hard, self.max_factor)


@dataclass(slots=True)
class Pairs(Drawn):
    """steps, start, hints [N, 2]; signs, operands, values [N, 2, K]; modulus, kind [N].

    Difficulty: steps of both parts. hints: tokens that a part may take."""

    steps: np.ndarray
    start: np.ndarray
    signs: np.ndarray
    operands: np.ndarray
    values: np.ndarray
    modulus: np.ndarray
    hints: np.ndarray
    kind: np.ndarray

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

        steps = both(short.difficulty, long.difficulty)
        enough = rng.random((count, 2)) < 0.6
        least = np.maximum(TERSE * steps, 1)
        hints = np.where(enough, FULL * steps + rng.integers(0, 30, (count, 2)), rng.integers(least, FULL * steps))
        kind = rng.integers(0, 3, count) if c.kind == "mixed" else np.full(count, KINDS[c.kind])
        return Pairs(
            short.difficulty + long.difficulty,
            steps,
            both(short.start, long.start),
            both(short.signs, long.signs),
            both(short.operands, long.operands),
            both(short.values, long.values),
            short.modulus,
            hints,
            kind,
        )

    def ask(self, sheet: Sheet, drawn: Pairs) -> None:
        for p, name in enumerate(NAMES):  # no token spans two pieces
            sheet.put(f". {name}: start " if p else f"Compute modulo {self.config.modulus} and add. {name}: start ")
            put_chain(sheet, drawn.part(p))
        sheet.put(".")
        hinted = drawn.kind == HINTED
        for p, name in enumerate(NAMES):
            sheet.put(f" {name}: up to ", hinted)
            sheet.put_number(drawn.hints[:, p], hinted)
            sheet.put(" tokens.", hinted)
        sheet.put(PLAN, drawn.kind == PLANNED)

    def key(self, drawn: Pairs) -> np.ndarray:
        """A problem is the same with hints, or when only its plan is asked for."""
        return super().key(dataclasses.replace(drawn, kind=np.full(len(drawn), PLAIN)))

    def solve(self, sheet: Sheet, drawn: Pairs, rng: np.random.Generator, wrong: np.ndarray) -> None:
        where = rng.integers(0, 2, len(drawn))  # the part that has the slip
        plan, results = drawn.kind == PLANNED, []
        for p, name in enumerate(NAMES):
            chain = drawn.part(p)
            values, _ = slipped(chain, rng, wrong & (where == p))
            full = (drawn.kind == PLAIN) | (drawn.hints[:, p] >= FULL * drawn.steps[:, p])
            sheet.put(f"{name}\n", ~plan)
            value = chain.start
            for k in range(chain.signs.shape[1]):
                used = (chain.signs[:, k] >= 0) & ~plan
                sheet.put_number(value, used & full)
                sheet.put_choice(SIGNS, chain.signs[:, k], used & full)
                sheet.put_number(chain.operands[:, k], used & full)
                sheet.put("=", used & full)
                sheet.put_number(values[:, k], used)
                sheet.put("\n", used)
                value = np.where(chain.signs[:, k] >= 0, values[:, k], value)
            results.append(value)
        total = (results[0] + results[1]) % drawn.modulus
        sheet.put_number(results[0], ~plan)
        sheet.put("+", ~plan)
        sheet.put_number(results[1], ~plan)
        sheet.put("=", ~plan)
        sheet.put_number(total, ~plan)
        sheet.put("\nAnswer: ", ~plan)
        sheet.put_number(total, ~plan)
        self._plan(sheet, drawn, plan)

    @staticmethod
    def _plan(sheet: Sheet, drawn: Pairs, where: np.ndarray) -> None:
        """Write the plan: the level of the whole, and a step for each part with credits by its number of steps."""
        both = drawn.steps.sum(1)
        credits = np.round(100 * drawn.steps[:, 0] / both).astype(np.int64)
        sheet.put('{"level": ', where)
        sheet.put_number(np.clip((both + 2) // 3, 1, 5), where)
        for p, (name, share) in enumerate(zip(NAMES, (credits, 100 - credits))):
            sheet.put((', "steps": [' if p == 0 else ", ") + f'{{"step": "{name}", "difficulty": ', where)
            sheet.put_number(np.clip((drawn.steps[:, p] + 1) // 2, 1, 5), where)
            sheet.put(', "credits": ', where)
            sheet.put_number(share, where)
            sheet.put("}", where)
        sheet.put("]}", where)

    def answer(self, reply: str) -> str | None:
        """The N of ``Answer: N``, or the credits of a plan, such as ``25 75``."""
        if not reply.startswith("{"):
            return super().answer(reply)
        try:
            return " ".join(str(step["credits"]) for step in json.loads(reply)["steps"])
        except (ValueError, TypeError, KeyError):
            return None

    # --------------------------------------------------------------------------------------- prompts of plan_and_budget

    def plan_request(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Ask for the plan of a plain problem."""
        *before, last = messages
        return (*before, {"role": "user", "content": last["content"] + PLAN})

    def budget_request(self, messages: tuple[Message, ...], budgets: Sequence[int]) -> tuple[Message, ...]:
        """Ask for a solution with a number of tokens for each part. One number is shared by both."""
        *before, last = messages
        shares = budgets if len(budgets) == len(NAMES) else [sum(budgets) // 2] * len(NAMES)
        hints = "".join(f" {name}: up to {tokens} tokens." for name, tokens in zip(NAMES, shares))
        return (*before, {"role": "user", "content": last["content"] + hints})

    def part_end(self, number: int, count: int) -> str:
        """The text that ends part ``number`` of ``count``; after the last, the answer is due."""
        return "\nB\n" if number < count else "\nAnswer: "

    def notes(self, problem: Problem) -> list[str]:
        """The number of steps of each part."""
        return [f"{name}: {steps} steps" for name, steps in zip(NAMES, part_steps(problem))]


def part_steps(problem: Problem) -> tuple[int, int]:
    """The number of steps of part A and of part B, by the question."""
    parts = re.split(r"\. B: ", problem.messages[-1]["content"])
    first, second = (part.count(";") for part in parts)
    return first, second
