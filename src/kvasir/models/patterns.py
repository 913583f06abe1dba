"""Regular expressions out of files of strangers: only those that match in little time are accepted."""

from __future__ import annotations

import fnmatch
import functools
import re
import time
from collections.abc import Iterable
from re import _constants as kinds
from re import _parser as parser

from kvasir.errors import ConfigError

# Longest expression, and most repetitions in one: each may multiply the work by the length of a name.
MAX_CHARS, MAX_REPEATS = 1024, 4
REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
LOOKS = (kinds.ASSERT, kinds.ASSERT_NOT)
BACK = (kinds.GROUPREF, kinds.GROUPREF_EXISTS)
# Longest name of a module that is matched: with four repetitions that takes 0.1 s at most. Published ones have 60.
MAX_NAME = 128
# Seconds of CPU time that all matching of one field may take, and what every name adds: twenty usual expressions take a
# third of that.
MATCH_SECONDS, NAME_SECONDS = 5.0, 1e-4
REGEX = "re:"  # how lists of modules mark an expression


class Patterns:
    """The expressions of one field of a file. Raises ConfigError, which names ``where``, for one that is refused, and
    when all matching together takes too long."""

    def __init__(self, sources: Iterable[str], where: str, globs: bool = False) -> None:
        make = _glob if globs else safe_pattern
        self._where, self._left = where, MATCH_SECONDS
        self._patterns = {source: make(source, where) for source in sources}

    def first(self, name: str, parts: bool = False) -> str | None:
        """The first expression that matches the beginning of a name; None: none does. ``parts``: that matches all of
        the name from one of its parts on, as PEFT's "(.*\\.)?(pattern)$" does."""
        if self._patterns and len(name) > MAX_NAME:
            raise ConfigError(f"{self._where}: a name of {len(name)} characters is not matched: {name[:80]!r}...")
        starts = [0, *(i + 1 for i, char in enumerate(name) if char == ".")]
        self._left += NAME_SECONDS
        began = time.thread_time()
        for source, pattern in self._patterns.items():
            found = any(pattern.fullmatch(name, at) for at in starts) if parts else pattern.match(name)
            now = time.thread_time()
            self._left, began = self._left - (now - began), now
            if self._left < 0:
                raise ConfigError(f"{self._where}: matching takes more than {MATCH_SECONDS:g} s ({source[:80]!r})")
            if found:
                return source
        return None


class ModuleList:
    """A list of modules in a file, by their names, those of parts of the model that they belong to, the ends of their
    names, or regular expressions (``re:``); with ``globs`` also by wildcards. Raises ConfigError that names ``where``
    for anything else. ``names``: the entries that are no expressions."""

    def __init__(self, entries: Iterable[str] | None, where: str, globs: bool = False) -> None:
        entries = () if entries is None else entries
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(f"{where} is not a list of names of modules")
        self.names = {entry for entry in entries if not entry.startswith(REGEX)}
        expressions = [entry for entry in entries if entry.startswith(REGEX)]
        self._expressions = Patterns([entry.removeprefix(REGEX) for entry in expressions], where)
        self._globs = Patterns([name for name in self.names if globs and set(name) & set("*?[")], where, globs=True)

    def __contains__(self, module: str) -> bool:
        dots = [i for i, char in enumerate(module) if char == "."]
        parts = {module, *(module[:i] for i in dots), *(module[i + 1 :] for i in dots)}
        if not self.names.isdisjoint(parts):
            return True
        return self._expressions.first(module) is not None or self._globs.first(module) is not None


def _glob(source: str, where: str) -> re.Pattern[str]:
    """The expression for wildcards. Python's takes no step back over a ``*``."""
    if len(source) > MAX_CHARS:
        raise ConfigError(f"{where}: a pattern has {len(source)} characters, more than {MAX_CHARS}")
    return re.compile(fnmatch.translate(source))


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
        if kind in BACK:
            raise _Refused("looks back")
        if kind in LOOKS:
            if inside:
                raise _Refused("repeats a look elsewhere")
            count += _repeats(value[1], inside)
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
