"""The package's one logger. The CLI decides where its records go and how they look.

Whatever a record holds, it is one line: characters that a terminal or a reader of the log would obey are escaped, so
that the text of a client (a path, a model's or tool's name, a header) cannot forge a line. Only tracebacks and the
texts of our own processes have several lines; all but the first are indented.
"""

from __future__ import annotations

import logging

# Loggers whose records look like ours: the HTTP server's and those of the event loop.
FOREIGN = ("uvicorn", "asyncio")

log = logging.getLogger("kvasir")


def escaped(text: str) -> str:
    """The text with line breaks, control characters and characters that change the direction of text escaped."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


class Escaping(logging.Formatter):
    """Formats a record so that no text in it can begin a line or steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        first, *rest = super().format(record).split("\n")
        return "\n    ".join(map(escaped, [first, *rest]))

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not getattr(record, "several_lines", False):
            record.message = escaped(record.message)
        return super().formatMessage(record)


def setup(level: str = "INFO") -> None:
    """Send records to stderr as ``Escaping`` formats them."""
    handler = logging.StreamHandler()
    handler.setFormatter(Escaping("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    for name in FOREIGN:
        logging.getLogger(name).handlers[:] = [handler]
        logging.getLogger(name).propagate = False
