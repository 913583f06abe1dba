"""Rules by which two replies give the same answer, by name, for callers that cannot pass a function."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.scaling.problem import last_answer


def last_line(text: str) -> str | None:
    """The last line that is not blank, in lower case."""
    lines = text.strip().splitlines()
    return lines[-1].strip().lower() or None if lines else None


def whole(text: str) -> str | None:
    """The whole text in lower case, with blanks made equal."""
    return " ".join(text.split()).lower() or None


ANSWERS: dict[str, Callable[[str], str | None]] = {"marked": last_answer, "last_line": last_line, "text": whole}
