"""Fields of clients that change nothing here: each name is told once."""

from __future__ import annotations

import functools
import logging

# Most names that are told about, so that a client cannot fill the log.
MAX_TOLD = 200
log = logging.getLogger(__name__)


@functools.cache
def _tell(name: str) -> None:
    log.warning("%s is ignored: it changes nothing here", name)


def ignore(name: str, ignored: list[str]) -> None:
    """Tell that a client's field is ignored, in the log and in ``ignored``, from which the reply's header is made."""
    tell_ignored(name)
    ignored.append(name)


def tell_ignored(name: str) -> None:
    """Log that a client's field is ignored: once a name in this process, escaped, and at most MAX_TOLD names."""
    if _tell.cache_info().currsize < MAX_TOLD:
        _tell(ascii(name[:80]))
