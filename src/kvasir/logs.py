"""One logger for the package; the CLI decides where it goes and how it looks."""

from __future__ import annotations

import logging

log = logging.getLogger("kvasir")


def setup(level: str = "INFO") -> None:
    """Plain one-line records on stderr, control characters escaped so that user text cannot forge a line."""

    class Escaping(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            text = super().format(record)
            return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)

    handler = logging.StreamHandler()
    handler.setFormatter(Escaping("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
