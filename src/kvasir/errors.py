"""The three ways things go wrong: a bad set-up, a bad request, and our own bug (a plain ``assert``)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """Start-up cannot go on. The message says what is wrong, why, and how to fix it."""


class RequestError(Exception):
    """One request fails; the engine and every other request go on.

    ``status`` is the HTTP status a server answers with, ``param`` the parameter at fault (OpenAI's ``error.param``),
    ``code`` a short machine-readable reason and ``retry_after`` (seconds) is set when the client should try again.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
                 retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest spelling among ``choices``, or an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""
