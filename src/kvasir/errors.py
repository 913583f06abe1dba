"""The errors for users: a bad configuration and a bad request. A bug of our own is a plain ``assert``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """The configuration cannot work. The message says what is wrong, why, and how to fix it."""


class RequestError(Exception):
    """One request fails; the engine and every other request go on.

    ``status`` is the HTTP status a server answers with, ``param`` the parameter at fault (OpenAI's ``error.param``),
    ``code`` a short machine-readable reason and ``retry_after`` (seconds) is set when the client should try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust. Its class is no Exception, and no module exports it."""
    return type(error).__name__ == "PanicException"


def is_bug(error: BaseException) -> bool:
    """Whether an error ends one piece of work: no interrupt, no cancellation, no end of the process or a generator."""
    return isinstance(error, Exception) or is_panic(error)


# Packages of each extra of pyproject.toml, by their names on the package index.
EXTRAS = {
    "gguf": "gguf",
    "humming": "humming-kernels",
    "plots": "matplotlib pillow",
    "otel": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    "events": "pyzmq",
    "cluster": "ray cryptography",
    "fla": "fla-core",
}


def install(extra: str) -> str:
    """The command that installs the packages of an extra. It names the packages because it must work wherever kvasir
    came from, and kvasir itself is on no package index: the name there belongs to somebody else."""
    return f"pip install {EXTRAS[extra]}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest spelling among ``choices``, or an empty string.

    Choices with the same first letter come first, because typos seldom change it; names that share only their ends
    ("length_penalty", "presence_penalty") mean different things.
    """
    choices = list(choices)
    alike = [c for c in choices if _first(c) == _first(word)]
    found = difflib.get_close_matches(word, alike, n=1, cutoff=0.75) or difflib.get_close_matches(
        word, choices, n=1, cutoff=0.9
    )
    return f" Did you mean '{found[0]}'?" if found else ""


def _first(word: str) -> str:
    return word.lstrip("-")[:1].casefold()
