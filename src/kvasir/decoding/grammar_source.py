"""Translation of a request's grammar to the grammar library's, and the checks before the library sees it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir.decoding.ecma_regex import library_patterns, literal, own_patterns, patterns_of
from kvasir.decoding.exact_schema import exact_rules, needs_rules
from kvasir.decoding.grammar_tokenizer import by_id
from kvasir.decoding.json_schema import served_schema, whitespace_options
from kvasir.decoding.number_ranges import Rounded, read_float
from kvasir.errors import RequestError
from kvasir.types import Grammar

MAX_REGEX_BYTES = 4 << 10
MAX_SCHEMA_DEPTH = 64  # levels of JSON; a level of "properties" takes two, so 32 levels of objects
MAX_ENUM_VALUES = 2000
MAX_REPEAT = 10_000
MAX_EXPANDED = 50_000  # atoms of a regex after its repeats are written out
# Largest "multipleOf", without trailing zeros. It costs that many states, which no fuel bounds; this many take up to a
# second.
MAX_MULTIPLE = 100_000
# An EBNF grammar is converted in Python, in time that grows with the square of its rules.
MAX_EBNF_BYTES, MAX_EBNF_RULES = 16 << 10, 500
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if"}  # keywords whose parts may apply together
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def library_source(grammar: Grammar, added: Mapping[str, int], param: str) -> str:
    """The grammar library's text of ``grammar``. ``added``: ids of the tokenizer's added tokens.

    Raises RequestError (400) when the grammar is above the limits or cannot be kept exactly."""
    if grammar.kind == "json_object":
        return schema_source({"type": "object"}, param, grammar.whitespace)
    if grammar.kind == "json_schema":
        return _from_schema(grammar.text, param, grammar.whitespace)
    if grammar.kind in ("lark", "ebnf"):
        lark = _from_ebnf(grammar.text, param) if grammar.kind == "ebnf" else grammar.text
        return _from_lark(lark, param, added, grammar.whitespace)
    return (_from_regex if grammar.kind == "regex" else _from_choice)(grammar.text, param)


def _from_schema(text: str, param: str, whitespace: str) -> str:
    schema = _parse_json(text, param)
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema must be an object or a boolean", param=param)
    if schema is False:
        raise RequestError("the schema 'false' allows no output at all", param=param)
    check_schema(schema, param)
    return schema_source({} if schema is True else served_schema(schema, param), param, whitespace)


def schema_source(schema: dict[str, Any], param: str, whitespace: str = "fixed") -> str:
    """The library's text of a served schema, in which numbers keep their value. Raises RequestError."""
    options = whitespace_options(whitespace)
    schema = _with_library_patterns(schema, param)
    if needs_rules(schema):
        rules = exact_rules("exact", schema, options, param)
        return llguidance.LLMatcher.grammar_from_lark("\n".join(["start: exact", *rules]))
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as e:
        raise RequestError(f"the schema cannot be used: {e}", param=param) from e


def _with_library_patterns(schema: Any, param: str | None) -> Any:
    """The schema with its patterns in the library's dialect. Raises RequestError."""
    schema = library_patterns(schema, param)
    for pattern in patterns_of(schema):
        _check_atoms(pattern, param)
    return schema


def _from_regex(text: str, param: str) -> str:
    check_regex(text, param)
    return llguidance.LLMatcher.grammar_from_regex(text)


def _from_choice(text: str, param: str) -> str:
    choices = _parse_json(text, param)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("choices must be a non-empty list of non-empty strings", param=param)
    if len(choices) > MAX_ENUM_VALUES:
        raise RequestError(f"{len(choices)} choices, at most {MAX_ENUM_VALUES} are allowed", param=param)
    return llguidance.LLMatcher.grammar_from_regex("|".join("".join(map(literal, c)) for c in dict.fromkeys(choices)))


def _from_lark(text: str, param: str, added: Mapping[str, int], whitespace: str) -> str:
    if not text.strip():
        raise RequestError("the grammar is empty", param=param)
    rules, text = _without_schemas(text, param, added, whitespace)
    for pattern in filter(None, re.findall(_LARK_REGEX, rules)):
        check_regex(pattern, param)
    for bound in re.findall(r"\d+", " ".join(re.findall(_LARK_BOUND, rules))):
        _check_bound(float(bound), param)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _from_ebnf(text: str, param: str) -> str:
    if len(text.encode()) > MAX_EBNF_BYTES or text.count("::=") > MAX_EBNF_RULES:
        raise RequestError(
            f"an EBNF grammar may hold {MAX_EBNF_BYTES} bytes and {MAX_EBNF_RULES} rules; larger ones can be sent as "
            "Lark",
            param=param,
        )
    try:
        lark = gbnf_to_lark(re.sub(_EBNF_ESCAPE, partial(_unescaped, param), text))
    except Exception as e:  # the converter raises all kinds
        what = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)[:300]
        raise RequestError(f"the EBNF grammar cannot be used: {what}", param=param) from e
    return lark


def _unescaped(param: str, found: re.Match[str]) -> str:
    """The character of an escape like ``\\u0041``, whose leading zeros the library's converter drops: it then reads the
    text behind as digits. An escape of another kind is kept."""
    if not (digits := found[1] or found[2]):
        return found[0]
    code = int(digits, 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise RequestError(f"the EBNF grammar cannot be used: {found[0]} is no character", param=param)
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02x}"


def _without_schemas(text: str, param: str, added: Mapping[str, int], whitespace: str) -> tuple[str, str]:
    """A Lark grammar without the schemas that it embeds, which are checked like any schema, and the grammar for the
    library, with tokens by id and exact numbers."""
    rules, kept, extra, at, states = [], [], [], 0, 0
    for found in re.finditer(r"%json(?:\s|//[^\n]*+)*+", text):
        if found.start() >= at:  # not inside a schema
            rules.append(text[at : found.end()])
            kept.append(by_id(text[at : found.start()], added))
            try:
                schema, at = json.JSONDecoder(parse_float=read_float).raw_decode(text, found.end())
            except (ValueError, RecursionError) as e:
                raise RequestError(
                    f"the grammar cannot be used: no readable JSON schema follows %json: {e}", param=param
                ) from e
            # The library's own options for whitespace and separators.
            options = schema.pop("x-guidance", None) if isinstance(schema, dict) else None
            for pattern in options.values() if isinstance(options, dict) else ():
                if isinstance(pattern, str) and pattern:
                    check_regex(pattern, param)
            states = _check_multiple(states + check_schema(schema, param), param)
            options = options if isinstance(options, dict) else whitespace_options(whitespace)
            schema = _with_library_patterns(served_schema(schema, param), param)
            if isinstance(schema, dict) and needs_rules(schema):
                name = f"exact_schema_{len(kept)}"
                extra += exact_rules(name, schema, options, param)
                kept.append(f"{name} ")
            else:
                kept.append(
                    "%json " + json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema)
                )
    rest = text[at:]
    return "".join([*rules, rest]), "\n".join(["".join([*kept, by_id(rest, added)]), *extra])


def _parse_json(text: str, param: str, number: Callable[[str], float] = read_float) -> Any:
    try:
        return json.loads(text, parse_float=number, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError as e:
        raise RequestError("the JSON is nested too deeply", param=param) from e
    except ValueError as e:
        raise RequestError(f"not valid JSON: {e}", param=param) from e


def without_annotations(grammar: Grammar, param: str = "grammar") -> Grammar:
    """The grammar of the same schema without its annotations, which a grammar does not need and which may be long.

    A schema in which a number would change by being written again is left as it is. Raises RequestError."""
    if grammar.kind != "json_schema":
        return grammar
    rounded: list[str] = []

    def number(text: str) -> float:
        value = read_float(text)
        if isinstance(value, Rounded):
            rounded.append(text)
        return value

    schema = _parse_json(grammar.text, param, number)
    served = served_schema(schema, param)
    return grammar if rounded else dataclasses.replace(grammar, text=json.dumps(served, ensure_ascii=False))


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in an object")
    return found


def check_schema(schema: Any, param: str | None = None) -> int:
    """Refuse a schema above the limits, with a reference that is not local, or with a regex that is too long.

    Returns the number of states that its "multipleOf" values take."""
    enums, multiples, combined = 0, [], False
    todo = [(schema, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels of JSON", param=param)
        if isinstance(node, list):
            todo.extend((item, depth + 1) for item in node)
        if not isinstance(node, dict):
            continue
        enum = node.get("enum")
        enums += len(enum) if isinstance(enum, list) else 0
        if enums > MAX_ENUM_VALUES:
            raise RequestError(f"the schema has more than {MAX_ENUM_VALUES} enum values", param=param)
        _check_keywords(node, param)
        multiple = node.get("multipleOf")
        if type(multiple) is int or type(multiple) is float and math.isfinite(multiple):
            multiples.append(multiple)
        combined = combined or not _COMBINING.isdisjoint(node)
        todo.extend((value, depth + 1) for value in node.values())
    return _check_multiples(multiples, combined, param)


def _check_keywords(node: dict[str, Any], param: str | None) -> None:
    reference = node.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise RequestError(
            f"'$ref': {reference[:80]!r} is not local; only references that start with '#' are supported", param=param
        )
    if "x-guidance" in node:
        raise RequestError("'x-guidance' is not supported in a schema", param=param)
    for name in _BOUNDS:
        if isinstance(node.get(name), (int, float)):
            _check_bound(node[name], param, name)
    for pattern in own_patterns(node):  # their repeats are counted once they are in the library's dialect
        _check_regex_bytes(pattern, param)


def _check_multiples(multiples: list[float], combined: bool, param: str | None) -> int:
    """Check the state machines of "multipleOf" values: each has as many states as its value, and values that may apply
    together form one with their least common multiple."""
    total, common = 0, 1
    for multiple in multiples:
        size = int("".join(map(str, Decimal(repr(abs(multiple))).normalize().as_tuple().digits)))
        total, common = total + size, math.lcm(common, size or 1) if combined else 1
        _check_multiple(max(total, common), param)
    return total


def _check_multiple(states: int, param: str | None) -> int:
    if states > MAX_MULTIPLE:
        raise RequestError(
            f"multipleOf, by itself or of several values together, is above the limit of {MAX_MULTIPLE}", param=param
        )
    return states


def _check_bound(bound: float, param: str | None, name: str = "a repeat") -> None:
    if bound > MAX_REPEAT:
        # The value itself may have too many digits to print.
        raise RequestError(f"{name} is above the limit of {MAX_REPEAT}", param=param)


def check_regex(pattern: str, param: str | None = None) -> None:
    """Refuse a regex whose text, repeats, or size with nested repeats written out is above the limits.

    The compiler decides whether it is valid; here everything that is not a repeat counts as one atom."""
    _check_regex_bytes(pattern, param)
    if not pattern:
        raise RequestError("the regex is empty", param=param)
    _check_atoms(pattern, param)


def _check_regex_bytes(pattern: str, param: str | None) -> None:
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_REGEX_BYTES:
        raise RequestError(f"a regex is longer than {MAX_REGEX_BYTES} bytes", param=param)


def _check_atoms(pattern: str, param: str | None) -> None:
    """Refuse a regex with repeats above the limits, or that is too large once they are written out."""
    groups, last = [0], 0  # atoms in each open group; atoms of the last item
    for item in re.finditer(_REGEX_ITEM, pattern, re.DOTALL):
        kind = item.lastgroup
        if kind == "open":
            groups.append(0)
        elif kind == "close" and len(groups) > 1:
            last = max(1, groups.pop())
            groups[-1] += last
        elif kind == "repeat":
            times = max(int(n) for n in re.findall(r"\d+", item.group()))
            _check_bound(times, param)
            groups[-1] += last * (max(times, 1) - 1)
            last *= max(times, 1)
        else:
            last = 1
            groups[-1] += 1
        if groups[-1] > MAX_EXPANDED:
            raise RequestError(f"a regex with its repeats written out is larger than {MAX_EXPANDED}", param=param)


# An item that is opened and not closed extends as far as it might reach. Searching for its end again from every later
# character would take a minute in 64 KiB of text, and block every other request.
_LARK_REGEX = r"/(?:((?:[^/\\\n]|\\.)++)/|(?:[^/\\\n]|\\.)*+)"
_LARK_BOUND = r"(\{[^}\n]*+\}|~[^\n]*)|\{[^}~\n]*+"
_EBNF_ESCAPE = r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)"
_REGEX_ITEM = (
    r"(?P<escape>\\(?:[xuU]\{[0-9a-fA-F]++\}|.))"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z))|(?P<open>\()|(?P<close>\))"
    r"|(?P<repeat>\{\d+(?:,\d*)?\})|(?P<other>.)"
)
