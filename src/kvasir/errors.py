"""The errors for users: a bad configuration and a bad request. A bug of our own is a plain ``assert``."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import TypedDict

# Most characters of a message, kept from its beginning and from its end, where the fix is. Messages quote names and
# values of files and requests, which may be as long as a file: one such line would fill a log or a terminal.
HEAD, TAIL = 3000, 1000


def bounded(message: str) -> str:
    """The message with its middle left out where it is longer than ``HEAD`` + ``TAIL`` characters."""
    left_out = len(message) - HEAD - TAIL
    return message if left_out <= 0 else f"{message[:HEAD]}[... {left_out} characters ...]{message[-TAIL:]}"


class ConfigError(Exception):
    """The configuration cannot work. The message says what is wrong, why, and how to fix it; it is ``bounded``."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class Failure(TypedDict):
    """Why a request fails, as the fields of its error event."""

    status: int
    code: str
    message: str
    param: str | None


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
        self.message = bounded(message)
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def failure(self, code: str = "invalid_request") -> Failure:
        """The same as the fields of an error event. ``code``: for an error without one."""
        return Failure(status=self.status, code=self.code or code, message=self.message, param=self.param)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust. Its class is no Exception, and no module exports it."""
    return type(error).__name__ == "PanicException"


def is_bug(error: BaseException) -> bool:
    """Whether an error ends one piece of work: no interrupt, no cancellation, no end of the process or a generator."""
    return isinstance(error, Exception) or is_panic(error)


# Errors of a disk that takes no more, and of a path that cannot be opened.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
NO_WAY = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def of_a_file(error: OSError) -> str | None:
    """The message for an error that somebody who runs a command can repair at a file; None: it is none of these."""
    if error.errno in NO_ROOM:
        file = f" {error.filename}" if error.filename else ""
        return f"cannot write{file}: {error.strerror}. Make room or name another place, and run the command again"
    if error.errno in NO_WAY and error.filename:
        return f"cannot open {error.filename}: {error.strerror}. Check the path and its permissions"
    return None


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


def from_lab(what: str) -> str:
    """The message for something that kvasir-lab brings, where that is not installed. It too is on no package index."""
    return (
        f"{what} comes with kvasir-lab, which is not installed: run `pip install -e packages/lab` in a checkout of "
        "kvasir, or give pip the file or the URL of its wheel"
    )


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
