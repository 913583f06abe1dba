"""Prose of known entropy: every sentence is a pattern with evenly drawn words, so its probability is known exactly.

    Write 2 sentences about case 48213.      ->      The old king and the wolf walked to the river. / In the winter ...

A sentence's surprisal is log2(patterns) plus the sum of log2(choices) over its words. A model that has learnt the
source can do no better than `Template.entropy` bits a sentence on average. ``choices`` is the dial: 3 to 16 words for
every gap.

Shape suffixes: N problems, S sentences.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np

from kvasir.errors import ConfigError
from kvasir_lab.sheet import Drawn, Sheet, SheetTask
from kvasir_lab.task import Problem, Split
from kvasir_lab.words import MOODS, NOUNS, PLACES, THINGS

WORDS = {"who": NOUNS[:16], "place": PLACES, "thing": THINGS, "mood": MOODS}
GAP = re.compile(r" \{(\w+)\}")
# Two gaps of the same kind in a sentence never hold the same word. Order counts, so each has one choice fewer than the
# one before.
PATTERNS = (
    "The {mood} {who} and the {who} walked to the {place}.",
    "At the {place} the {who} lost a {thing}.",
    "A {thing} and a {thing} were under the {place}.",
    "The {who}, the {who} and the {who} met at the {place}.",
    "Nobody saw the {mood} {who} take the {thing}.",
    "From the {place} to the {place} the {who} carried a {mood} {thing}.",
    "It was the {who}'s {thing}.",
    "So the {who} gave the {thing} to the {mood} {who}.",
)
LONGER = 4  # The split ``longer`` has up to this many sentences more.


@dataclass(frozen=True)
class Config:
    min_sentences: int = 2
    max_sentences: int = 6
    choices: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.min_sentences <= self.max_sentences <= 64:
            raise ConfigError(
                f"template: min_sentences={self.min_sentences} and max_sentences={self.max_sentences} "
                "must satisfy 1 <= min <= max <= 64"
            )
        if not 3 <= self.choices <= 16:
            raise ConfigError(f"template: choices={self.choices} must lie in 3..16")


@dataclass(slots=True)
class Reports(Drawn):
    """case [N]; pattern [N, S], -1 beyond the last; words [N, S, G]: the word drawn for every gap."""

    case: np.ndarray
    pattern: np.ndarray
    words: np.ndarray


@functools.cache
def gaps(pattern: str) -> tuple[str, ...]:
    """The kinds of a pattern's gaps, in order."""
    return tuple(GAP.findall(pattern))


class Template(SheetTask):
    """Prose with a closed-form entropy, for bounds of acceptance and for exactness of sampling."""

    scored = "loss"
    candidates = False

    def sample(self, rng: np.random.Generator, count: int, split: Split) -> Reports:
        c = self.config
        low, high = (
            (c.max_sentences + 1, c.max_sentences + LONGER) if split == "longer" else (c.min_sentences, c.max_sentences)
        )
        size = rng.integers(low, high + 1, count)
        pattern = np.where(np.arange(high) < size[:, None], rng.integers(0, len(PATTERNS), (count, high)), -1)
        most = max(len(gaps(p)) for p in PATTERNS)
        # Every sentence and kind has one random order of words; gap number g of a kind takes the g-th word.
        words = np.empty((count, high, most), dtype=np.int64)
        orders = {kind: np.argsort(rng.random((count, high, c.choices)), axis=2) for kind in WORDS}
        for p, text in enumerate(PATTERNS):
            chosen = pattern == p
            for g, kind in enumerate(gaps(text)):
                words[..., g] = np.where(chosen, orders[kind][..., gaps(text)[:g].count(kind)], words[..., g])
        return Reports(size, rng.integers(0, 100_000, count), pattern, words)

    def ask(self, sheet: Sheet, drawn: Reports) -> None:
        sheet.put("Write ")
        sheet.put_number(drawn.difficulty)
        sheet.put(" sentences about case ")
        sheet.put_number(drawn.case, digits=5)
        sheet.put(".")

    def solve(self, sheet: Sheet, drawn: Reports, rng: np.random.Generator, wrong: np.ndarray) -> None:
        for s in range(drawn.pattern.shape[1]):
            if s:
                sheet.put("\n", drawn.pattern[:, s] >= 0)
            for p, text in enumerate(PATTERNS):
                here, parts = drawn.pattern[:, s] == p, GAP.split(text)
                for g, kind in enumerate(parts[1::2]):
                    if parts[2 * g]:
                        sheet.put(parts[2 * g], here)
                    sheet.put_choice(_spaced(kind), drawn.words[:, s, g], here)
                sheet.put(parts[-1], here)

    def entropy(self) -> float:
        """Bits of a sentence on average."""
        return sum(self._bits(p) for p in PATTERNS) / len(PATTERNS)

    def surprisal(self, sentence: str) -> float | None:
        """Bits of one sentence, -log2 of its probability; None when the source never writes it."""
        for text, shape in zip(PATTERNS, self._shapes(), strict=True):
            found = shape.fullmatch(sentence)
            if found:
                drawn = list(zip(gaps(text), found.groups(), strict=True))
                return self._bits(text) if len(set(drawn)) == len(drawn) else None
        return None

    def _bits(self, pattern: str) -> float:
        kinds = gaps(pattern)
        return math.log2(len(PATTERNS)) + sum(
            math.log2(self.config.choices - kinds[:g].count(kind)) for g, kind in enumerate(kinds)
        )

    def _shapes(self) -> list[re.Pattern[str]]:
        return [
            re.compile(
                "".join(
                    f" ({'|'.join(WORDS[part][: self.config.choices])})" if i % 2 else re.escape(part)
                    for i, part in enumerate(GAP.split(text))
                )
            )
            for text in PATTERNS
        ]

    def notes(self, problem: Problem) -> list[str]:
        return [f"{self.surprisal(s) or 0:.1f} bits" for s in problem.solution.split("\n")] + [
            f"{self.entropy():.1f} bits a sentence on average"
        ]

    def check(self, problem: Problem, reply: str) -> bool:
        """Whether the reply has as many sentences as asked, each of which the source may write."""
        sentences = reply.strip().split("\n")
        return len(sentences) == problem.difficulty and all(self.surprisal(s) is not None for s in sentences)

    def answer(self, reply: str) -> str | None:
        return None


@functools.cache
def _spaced(kind: str) -> tuple[str, ...]:
    return tuple(f" {word}" for word in WORDS[kind])
