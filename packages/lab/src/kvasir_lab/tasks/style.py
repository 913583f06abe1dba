"""Sums told in one of three styles: the same facts and the same answer, plain, formal or lively.

    Tell in the plain style: 17 + 25.        ->      17 plus 25 makes 42. / Answer: 42
    Tell in any style: 17 + 25.              ->      one of the three, drawn evenly

``Style.style_of`` says which style a reply has, from its text alone. Problems in any style show whether an edit of
hidden states holds; those that name one, whether it prevails over the prompt.

Shape suffixes: N problems, K sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split

STYLES = ("plain", "formal", "lively")
# Before a sum's first number, between its numbers, before its result, and behind.
TEMPLATES = {
    "plain": ("", " plus ", " makes ", "."),
    "formal": ("The sum of ", " and ", " is given by ", "."),
    "lively": ("Look, ", " and ", " give us ", "!"),
}
LONGER = 2  # The split ``longer`` has up to this many sums more.


@dataclass(frozen=True)
class Config:
    min_sums: int = 1
    max_sums: int = 3
    largest: int = 99

    def __post_init__(self) -> None:
        if not 1 <= self.min_sums <= self.max_sums <= 16:
            raise ConfigError(
                f"style: min_sums={self.min_sums}, max_sums={self.max_sums} must be 1 <= min <= max <= 16"
            )
        if not 9 <= self.largest <= 999:
            raise ConfigError(f"style: largest={self.largest} must lie in 9..999")


@dataclass(slots=True)
class Sums(Drawn):
    """named [N]: the style that the question asks for, 3 for any. told [N]: that of the solution. first [N];
    more [N, K]: what is added, -1 beyond the last."""

    named: np.ndarray
    told: np.ndarray
    first: np.ndarray
    more: np.ndarray


class Style(SheetTask):
    """Sums whose telling has a style that a checker can see, apart from the answer."""

    candidates = False

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Sums:
        c = self.config
        low, high = (c.max_sums + 1, c.max_sums + LONGER) if split == "longer" else (c.min_sums, c.max_sums)
        size = rng.integers(low, high + 1, count)
        more = np.where(np.arange(high) < size[:, None], rng.integers(1, c.largest + 1, (count, high)), -1)
        named = rng.integers(0, len(STYLES) + 1, count)
        first = rng.integers(1, c.largest + 1, count)
        # The style is drawn from the numbers, so that a problem and its solution go together.
        told = np.where(named < len(STYLES), named, (first * 7 + np.maximum(more, 0).sum(1) * 5) % len(STYLES))
        return Sums(size, named, told, first, more)

    def ask(self, sheet: Sheet, drawn: Sums) -> None:
        sheet.put("Tell in")
        sheet.put_choice((*(f" the {style} style: " for style in STYLES), " any style: "), drawn.named)
        sheet.put_number(drawn.first)
        for k in range(drawn.more.shape[1]):
            used = drawn.more[:, k] >= 0
            sheet.put(" + ", used)
            sheet.put_number(np.maximum(drawn.more[:, k], 0), used)

    def solve(self, sheet: Sheet, drawn: Sums, rng: np.random.Generator, wrong: np.ndarray) -> None:
        parts = [tuple(TEMPLATES[style][i] for style in STYLES) for i in range(4)]
        value = drawn.first
        for k in range(drawn.more.shape[1]):
            used, more = drawn.more[:, k] >= 0, np.maximum(drawn.more[:, k], 0)
            after = value + more + np.where(wrong & (drawn.difficulty == k + 1), 1, 0)
            for part, number in zip(parts, (value, more, after, None)):
                sheet.put_choice(part, drawn.told, used)
                if number is not None:
                    sheet.put_number(number, used)
            sheet.put("\n", used)
            value = np.where(used, after, value)
        sheet.put("Answer: ")
        sheet.put_number(value)

    @staticmethod
    def style_of(reply: str) -> str | None:
        """The style that every sentence of a reply has; None where they differ or have none."""
        found = set()
        for line in reply.strip().split("\n"):
            if line.startswith("Answer:"):
                continue
            shapes = {style: r"\d+".join(map(re.escape, parts)) for style, parts in TEMPLATES.items()}
            styles = [style for style, shape in shapes.items() if re.fullmatch(shape, line)]
            found.add(styles[0] if styles else None)
        return found.pop() if len(found) == 1 else None

    def named(self, problem: Problem) -> str | None:
        """The style that the question asks for; None: any."""
        word = re.match(r"Tell in(?: the (\w+))?", problem.messages[-1]["content"])
        return word[1] if word else None

    def notes(self, problem: Problem) -> list[str]:
        return [self.style_of(problem.solution) or "no style"]
