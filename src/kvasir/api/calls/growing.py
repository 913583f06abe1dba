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
        nameless = [[part for part in way if not BRACKET.fullmatch(part)] for way in ways]
        self._any = re.compile(_tree(nameless, whole=True))
        self._begun = re.compile(_tree(nameless, whole=False))
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

    def starts(self, text: str) -> bool:
        """Whether the text begins with a whole match."""
        return self._any.match(text) is not None

    def search(self, text: str, start: int = 0) -> int:
        """Return where the first match that begins at ``start`` or later begins; -1: there is none."""
        places = (at for at in range(start, len(text)) if text[at] in self.firsts)
        return next((at for at in places if self._any.match(text, at)), -1)

    def pending(self, text: str, start: int = 0) -> int:
        """Return where the first match from ``start`` on begins that text to come may complete; the end of the text:
        there is none."""
        places = (at for at in range(start, len(text)) if text[at] in self.firsts)
        return next((at for at in places if self.may(text[at:])), len(text))


def _tree(ways: Sequence[Sequence[str]], whole: bool) -> str:
    """A regular expression for all ways, or for every beginning of them, without the names. What several ways begin
    with is tried once: a format has a hundred ways."""
    grouped: dict[str, list[Sequence[str]]] = {}
    for way in ways:
        if way:
            grouped.setdefault(way[0], []).append(way[1:])
    if not grouped:
        return ""
    optional = "" if whole and all(ways) else "?"
    return f"(?:{'|'.join(part + _tree(rests, whole) for part, rests in grouped.items())}){optional}"
