"""Regular expressions out of files of strangers: only those that match in little time are accepted."""

from __future__ import annotations

import functools
import re
from re import _constants as kinds
from re import _parser as parser

from kvasir.errors import ConfigError

# Longest expression, and most repetitions in one: each may multiply the work by the length of a name.
MAX_CHARS, MAX_REPEATS = 1024, 4
REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
# Parts that look elsewhere, so that their cost is not that of one pass.
REFUSED = (kinds.GROUPREF, kinds.GROUPREF_EXISTS, kinds.ASSERT, kinds.ASSERT_NOT)


@functools.lru_cache(maxsize=8192)
def safe_pattern(source: str, where: str) -> re.Pattern[str]:
    """The compiled expression. Raises ConfigError, which names ``where``, for one that is not valid, repeats a
    repetition, or repeats more than four times."""
    try:
        if len(source) > MAX_CHARS:
            raise ConfigError(f"{where}: a pattern has {len(source)} characters, more than {MAX_CHARS}")
        if _repeats(parser.parse(source), False) > MAX_REPEATS:
            raise ConfigError(f"{where}: the pattern {source[:80]!r} has more than {MAX_REPEATS} repetitions")
        return re.compile(source)
    except _Refused as e:
        raise ConfigError(f"{where}: the pattern {source[:80]!r} {e}, which may take for ever to match") from e
    except (re.error, RecursionError, OverflowError, TypeError) as e:
        raise ConfigError(f"{where}: {str(source)[:80]!r} is not a valid pattern: {e}") from e


class _Refused(Exception):
    """A part of a pattern that is not accepted."""


def _repeats(parts: parser.SubPattern | list, inside: bool) -> int:
    """Number of repetitions. ``inside``: the parts are repeated."""
    count = 0
    for kind, value in parts:
        if kind in REFUSED:
            raise _Refused("looks around or back")
        if kind in REPEATS:
            if inside:
                raise _Refused("repeats a repetition")
            count += 1 + _repeats(value[2], True)
        elif kind is kinds.BRANCH:
            if inside:
                raise _Refused("repeats alternatives")
            count += sum(_repeats(branch, inside) for branch in value[1])
        elif kind is kinds.SUBPATTERN:
            count += _repeats(value[3], inside)
        elif kind is kinds.ATOMIC_GROUP:
            count += _repeats(value, inside)
    return count
