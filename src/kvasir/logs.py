"""The package's one logger. The CLI decides where its records go and how they look."""

from __future__ import annotations

import logging

log = logging.getLogger("kvasir")


def setup(level: str = "INFO") -> None:
    """Send plain records to stderr, with control characters escaped so that text of users cannot forge a line."""

    class Escaping(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            text = super().format(record)
            return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)

    handler = logging.StreamHandler()
    handler.setFormatter(Escaping("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
