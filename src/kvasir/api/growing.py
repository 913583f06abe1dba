"""Patterns that are matched against text while it grows: whether it is one, or may still become one."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPACE = r"\s{0,40}"
BRACKET = re.compile(r"\(\?P<\w+>|\)")  # a part that only names others


def spelled(text: str) -> list[str]:
    """The parts of a pattern that matches ``text``, a part for each character."""
    return [re.escape(char) for char in text]


class Growing:
    """A pattern with several ways to match. Each way is a sequence of parts: regular expressions of one character, or
    of a repeated one, so that every beginning of a match ends in or between parts. Parts that are a single bracket
    stand around others, to name them. A match begins with an ASCII character."""

    def __init__(self, *ways: Sequence[str]) -> None:
        self._whole = [re.compile("".join(way)) for way in ways]
        self._any = re.compile("|".join("".join(part for part in way if not BRACKET.fullmatch(part)) for way in ways))
        self._begun = re.compile("|".join(map(_beginnings, ways)))
        # Characters with which a match begins, so that a look at one is enough for most text.
        self.firsts = frozenset(char for char in map(chr, range(128)) if self.may(char))

    def match(self, text: str) -> re.Match[str] | None:
        """Return the match of the whole text with the first way that fits, or None."""
        if not self._any.fullmatch(text):
            return None
        return next((found for way in self._whole if (found := way.fullmatch(text))), None)

    def may(self, text: str) -> bool:
        """Whether the text is the beginning of a match."""
        return self._begun.fullmatch(text) is not None

    def search(self, text: str) -> int:
        """Return where the first match in the text begins; -1: there is none."""
        places = (at for at, char in enumerate(text) if char in self.firsts)
        return next((at for at in places if self._any.match(text, at)), -1)

    def pending(self, text: str) -> int:
        """Return where the first match begins that text to come may complete; the end of the text: there is none."""
        places = (at for at, char in enumerate(text) if char in self.firsts)
        return next((at for at in places if self.may(text[at:])), len(text))


def _beginnings(parts: Sequence[str]) -> str:
    """A regular expression for every beginning of these parts, one after the other, without the names."""
    found = ""
    for part in reversed(parts):
        found = found if BRACKET.fullmatch(part) else f"(?:{part}{found})?"
    return found
