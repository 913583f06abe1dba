"""Patterns that are matched against text while it grows: whether it is one, or may still become one."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPACE = r"\s{0,40}"


def spelled(text: str) -> list[str]:
    """The parts of a pattern that matches ``text``, a part for each character."""
    return [re.escape(char) for char in text]


class Growing:
    """A pattern with several ways to match. Each way is a sequence of parts: regular expressions of one character, or
    of a repeated one, so that every beginning of a match ends in or between parts. Parts that are a single bracket
    stand around others, to name them."""

    def __init__(self, *ways: Sequence[str]) -> None:
        self._whole = [re.compile("".join(way)) for way in ways]
        self._begun = re.compile("|".join(map(_beginnings, ways)))

    def match(self, text: str) -> re.Match[str] | None:
        """Return the match of the whole text with the first way that fits, or None."""
        return next((found for way in self._whole if (found := way.fullmatch(text))), None)

    def search(self, text: str) -> int:
        """Return where the first match in the text begins; -1: there is none."""
        found = [match.start() for way in self._whole if (match := way.search(text))]
        return min(found, default=-1)

    def may(self, text: str) -> bool:
        """Whether the text is the beginning of a match."""
        return self._begun.fullmatch(text) is not None

    def pending(self, text: str) -> int:
        """Return where the first match begins that text to come may complete; the end of the text: there is none."""
        return next((at for at in range(len(text)) if self.may(text[at:])), len(text))


BRACKET = re.compile(r"\(\?P<\w+>|\)")


def _beginnings(parts: Sequence[str]) -> str:
    """A regular expression for every beginning of these parts, one after the other, without the names."""
    found = ""
    for part in reversed(parts):
        found = found if BRACKET.fullmatch(part) else f"(?:{part}{found})?"
    return found
