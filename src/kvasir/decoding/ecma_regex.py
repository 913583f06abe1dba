"""Patterns of JSON schemas, which are regular expressions of ECMA 262, in the dialect of the grammar library (Rust's).

JSON Schema reads patterns with Unicode code points (draft 2020-12, core, 6.4). The dialects differ in classes (Rust has
operators and nested classes), in the characters of ``.``, ``\\d``, ``\\w`` and ``\\s``, and in escapes. What one of
them lacks is refused by name. Needs neither torch nor the grammar library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvasir.errors import RequestError

_DIGIT = "0-9"
_WORD = "A-Za-z0-9_"
# White space and line ends of ECMA 262 (12.2 and 12.3).
_SPACE = r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_SETS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_DOT = r"[^\x{a}\x{d}\x{2028}\x{2029}]"
_CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ANY = "(?s:.)"
_REPEAT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
# The second spelling of a name is Python's and Rust's, and the flag i is theirs too.
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_$][\w$]*>|(?P<case>-?i[:)]))")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,8})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z0-9_]+)?\}")
# Keywords whose values are no schemas, and those that hold schemas by name.
_VALUES = ("const", "enum", "default", "examples", "example")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def literal(character: str) -> str:
    """A character in the library's dialect, wherever it stands."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def library_patterns(schema: Any, param: str | None) -> Any:
    """Return a schema with its patterns in the library's dialect; the schema itself is not changed. It may be applied
    once. Raises RequestError (400) for a pattern that cannot be kept."""
    if isinstance(schema, list):
        return [library_patterns(part, param) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            value = _checked(value, param)
        elif key in _NAMED and isinstance(value, dict):
            value = {name: library_patterns(part, param) for name, part in value.items()}
            value = _by_pattern(value, param) if key == "patternProperties" else value
        elif key not in _VALUES:
            value = library_patterns(value, param)
        found[key] = value
    return found


def own_patterns(schema: dict[str, Any]) -> list[str]:
    """The patterns of a schema itself, without those of its parts."""
    named, pattern = schema.get("patternProperties"), schema.get("pattern")
    return [*(named if isinstance(named, dict) else ()), *([pattern] if isinstance(pattern, str) else ())]


def patterns_of(schema: Any) -> Iterator[str]:
    """Yield the patterns of a schema and of everything in it."""
    if isinstance(schema, dict):
        yield from own_patterns(schema)
    if isinstance(schema, dict | list):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from patterns_of(part)


def _by_pattern(schemas: dict[str, Any], param: str | None) -> dict[str, Any]:
    """Schemas by pattern. Two patterns that mean the same hold both of their schemas."""
    found: dict[str, Any] = {}
    for pattern, schema in schemas.items():
        pattern = _checked(pattern, param)
        found[pattern] = {"allOf": [found[pattern], schema]} if pattern in found else schema
    return found


def _checked(pattern: str, param: str | None) -> str:
    try:
        return library_regex(pattern)
    except ValueError as e:
        raise RequestError(f"the pattern {pattern[:80]!r} cannot be used: {e}", param=param) from e


def library_regex(pattern: str) -> str:
    """The regex of the library that matches what ``pattern`` means. Raises ValueError that says what cannot be kept."""
    out, at, can_repeat = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        repeat = _REPEAT.match(pattern, at)
        if repeat is not None:
            if not can_repeat:
                raise ValueError(f"{repeat[0]!r} has nothing to repeat")
            text, at, can_repeat = repeat[0], repeat.end(), False
        elif char == "[":
            text, at = _class(pattern, at + 1)
            can_repeat = True
        elif char == "\\":
            found, text, at = _escape(pattern, at + 1)
            text, can_repeat = f"[{text}]" if found is None else literal(found), True
        elif char == "(":
            text, at = _group(pattern, at)
            can_repeat = text.endswith(")")
        else:
            if pattern.startswith("{,", at) and re.match(r"\{,[0-9]+\}", pattern[at:]):
                raise ValueError("'{,n}' is no repeat in ECMA 262; write {0,n}")
            text = {".": _DOT, "{": r"\{", "}": r"\}", "]": r"\]"}.get(char, char)
            at, can_repeat = at + 1, char != "|"
        out.append(text)
    return "".join(out)


def _group(pattern: str, at: int) -> tuple[str, int]:
    """The start of a group, and where it ends."""
    if not pattern.startswith("(?", at):
        return "(", at + 1
    found = _GROUP.match(pattern, at)
    if found is None:
        if re.match(r"\(\?<?[=!]", pattern[at:]):
            raise ValueError("look-around, including look-ahead and look-behind, is not supported")
        raise ValueError(f"{pattern[at : at + 4]!r} begins no group of ECMA 262; of the flags, 'i' is served")
    return found[0] if found["case"] else "(?:", found.end()


def _escape(pattern: str, at: int, in_class: bool = False) -> tuple[str | None, str, int]:
    """The escape behind a backslash: its character, or None and the set as it stands in a class; and where it ends."""
    char = pattern[at : at + 1]
    if not char:
        raise ValueError("it ends with a backslash")
    if char.lower() in _SETS:
        inner = _SETS[char.lower()]
        return None, inner if char.islower() else f"[^{inner}]", at + 1
    if char in _CONTROLS:
        return _CONTROLS[char], "", at + 1
    if char == "b" and in_class:
        return "\b", "", at + 1
    if char in "bB":
        raise ValueError(f"'\\{char}', a word boundary, is a look-around, which is not supported")
    if char == "c" and re.match("[A-Za-z]", pattern[at + 1 : at + 2]):
        return chr(ord(pattern[at + 1]) % 32), "", at + 2
    if char in "xu" and (found := _HEX.match(pattern, at)):
        return _character(pattern, found)
    if char in "pP" and (found := _PROPERTY.match(pattern, at)):
        return None, f"\\{found[0]}", found.end()
    if char == "0" and not re.match("[0-9]", pattern[at + 1 : at + 2]):
        return "\0", "", at + 1
    if char in "123456789k":
        raise ValueError(f"'\\{char}' is a backreference, which is not supported")
    if char.isascii() and char.isalnum():
        hint = "; the ends of a text are ^ and $" if char in "AZz" else ""
        raise ValueError(f"'\\{pattern[at : at + 1]}' is no escape of ECMA 262{hint}")
    return char, "", at + 1


def _character(pattern: str, found: re.Match[str]) -> tuple[str, str, int]:
    """The character of ``\\xHH``, ``\\uHHHH`` or ``\\u{H}``; two halves of a surrogate pair are one."""
    code, end = int(found[1] or found[2] or found[3], 16), found.end()
    if 0xD800 <= code < 0xDC00 and (low := re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(pattern, end)):
        code, end = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00), low.end()
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"'\\{found[0]}' is no character")
    return chr(code), "", end


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The class whose bracket stands before ``at``, and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    items: list[str] = []
    while not pattern.startswith("]", at):
        first, text, at = _member(pattern, at)
        if not (pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]"):
            items.append(text)
            continue
        last, more, at = _member(pattern, at + 1)
        if first is None or last is None:  # a set is no end of a range, so the hyphen is one
            items += [text, literal("-"), more]
        elif first > last:
            raise ValueError(f"the range from {first!r} to {last!r} is out of order")
        else:
            items.append(f"{text}-{more}")
    if not items:
        if not negated:
            raise ValueError("the empty class '[]' matches nothing")
        return _ANY, at + 1
    return f"[{'^' if negated else ''}{''.join(items)}]", at + 1


def _member(pattern: str, at: int) -> tuple[str | None, str, int]:
    """One member of a class: its character (None: it is a set), its text, and where it ends."""
    if at >= len(pattern):
        raise ValueError("a class is not closed with ']'")
    if pattern[at] != "\\":
        return pattern[at], literal(pattern[at]), at + 1
    char, text, at = _escape(pattern, at + 1, in_class=True)
    return char, text if char is None else literal(char), at
