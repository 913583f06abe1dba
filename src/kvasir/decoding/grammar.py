"""Structured output: a grammar becomes a mask over the next token. A thin layer over ``llguidance``.

Compiling takes milliseconds. Sizes are checked before the library sees the text, and the library's own fuel bounds most
of the rest; what it does not bound ends in ``grammar_process``. ``GrammarCompiler.compile`` may run in a worker thread.
A compiled ``Matcher`` is never advanced itself: every branch, and every return from preemption, takes a ``copy``
(microseconds) and replays its output.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir.decoding.json_schema import served_schema, whitespace_options
from kvasir.decoding.matcher import Matcher, reason
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar

MAX_TEXT_BYTES = 64 << 10
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
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 200_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if"}  # keywords whose parts may apply together
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


class GrammarCompiler:
    """Compiles grammars for one tokenizer. ``vocab_size``: width of the logits; ``tokenizer_file``: tokenizer.json."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Raises ConfigError when the library cannot read the tokenizer."""
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        try:
            text = Path(tokenizer_file).read_text(encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        except (OSError, ValueError) as e:
            raise ConfigError(f"structured output cannot read the tokenizer {tokenizer_file}: {e}") from e

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of ``grammar``. Blocks for milliseconds.

        Raises RequestError (400) when the grammar is malformed, exceeds the limits above, uses something that the
        library does not support, or allows no output at all. It names the place of ``grammar.parts`` that is at fault.
        Run it on text of clients only after ``grammar_process`` has tried that text: the library may crash."""
        try:
            return self._compile(grammar)
        except RequestError:
            for place, schema in grammar.parts:
                try_schema(schema, place)
            raise

    def _compile(self, grammar: Grammar) -> Matcher:
        param = "grammar"  # the name in SamplingParams; a route knows by which of its names the client sent it
        if not self.eos_ids:
            raise RequestError("structured output needs a model with an end-of-sequence token", param=param)
        try:
            size = len(grammar.text.encode())
        except UnicodeEncodeError as e:
            raise RequestError("the grammar is not valid Unicode", param=param) from e
        if size > MAX_TEXT_BYTES:
            raise RequestError(f"the grammar is larger than {MAX_TEXT_BYTES} bytes", param=param)
        source = _source(grammar, param)
        inner = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        matcher = Matcher(inner, self.vocab_size, self.eos_ids)
        mask = np.zeros(-(-self.vocab_size // 32), np.int32)
        if not matcher.fill(mask):
            # Other kinds were translated: a place in the translation tells the user nothing.
            why = matcher.error if grammar.kind == "lark" else re.sub(r"^at \d+\(\d+\): ", "", matcher.error)
            raise RequestError(f"the grammar cannot be used: {why}", param=param)
        if not mask.any():
            raise RequestError("the grammar allows no output at all", param=param)
        return Matcher(inner, self.vocab_size, self.eos_ids, grammar.after)


# ------------------------------------------------------------------------------------- text -> the library's grammar


def _source(grammar: Grammar, param: str) -> str:
    if grammar.kind == "json_object":
        return _from_schema('{"type": "object"}', param, grammar.whitespace)
    if grammar.kind == "json_schema":
        return _from_schema(grammar.text, param, grammar.whitespace)
    return _SOURCES[grammar.kind](grammar.text, param)


def _from_schema(text: str, param: str, whitespace: str) -> str:
    schema = _parse_json(text, param)
    if not isinstance(schema, (dict, bool)):
        raise RequestError("a JSON schema must be an object or a boolean", param=param)
    if schema is False:
        raise RequestError("the schema 'false' allows no output at all", param=param)
    check_schema(schema, param)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps({} if schema is True else served_schema(schema, param)),
            overrides=whitespace_options(whitespace),
        )
    except ValueError as e:
        raise RequestError(f"the schema cannot be used: {e}", param=param) from e


def _from_regex(text: str, param: str) -> str:
    check_regex(text, param)
    return llguidance.LLMatcher.grammar_from_regex(text)


def _from_choice(text: str, param: str) -> str:
    choices = _parse_json(text, param)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("choices must be a non-empty list of non-empty strings", param=param)
    if len(choices) > MAX_ENUM_VALUES:
        raise RequestError(f"{len(choices)} choices, at most {MAX_ENUM_VALUES} are allowed", param=param)
    return llguidance.LLMatcher.grammar_from_regex("|".join("".join(map(_literal, c)) for c in dict.fromkeys(choices)))


def _from_lark(text: str, param: str) -> str:
    if not text.strip():
        raise RequestError("the grammar is empty", param=param)
    rules = _without_schemas(text, param)
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
        lark = gbnf_to_lark(text)
    except Exception as e:  # the converter raises all kinds
        what = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)[:300]
        raise RequestError(f"the EBNF grammar cannot be used: {what}", param=param) from e
    return _from_lark(lark, param)


def _without_schemas(text: str, param: str) -> str:
    """Return a Lark grammar without the schemas that it embeds, which are checked like any schema."""
    rules, at, states = [], 0, 0
    for found in re.finditer(r"%json(?:\s|//[^\n]*+)*+", text):
        if found.start() >= at:  # not inside a schema
            rules.append(text[at : found.end()])
            try:
                schema, at = json.JSONDecoder().raw_decode(text, found.end())
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
    return "".join([*rules, text[at:]])


_SOURCES = {
    "regex": _from_regex,
    "choice": _from_choice,
    "lark": _from_lark,
    "ebnf": _from_ebnf,
}


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _parse_json(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as e:
        raise RequestError("the JSON is nested too deeply", param=param) from e
    except ValueError as e:
        raise RequestError(f"not valid JSON: {e}", param=param) from e


def check_schema(schema: Any, param: str | None = None) -> int:
    """Refuse a schema above the limits, with a reference that is not local, or with a regex above the limits.

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
        if type(multiple := node.get("multipleOf")) in (int, float) and math.isfinite(multiple):
            multiples.append(multiple)
        combined = combined or not _COMBINING.isdisjoint(node)
        todo.extend((value, depth + 1) for value in node.values())
    return _check_multiples(multiples, combined, param)


def try_schema(schema: str, param: str) -> None:
    """Refuse a schema, the JSON of one that was checked, that does not compile. Needs no tokenizer."""
    try:
        source = llguidance.LLMatcher.grammar_from_json_schema(schema)
        why = reason(llguidance.LLMatcher.validate_grammar(source, limits=llguidance.LLParserLimits(**_LIMITS)))
    except ValueError as e:
        why = str(e)
    if why:
        raise RequestError(f"the schema cannot be used: {why}", param=param, code="invalid_grammar")


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
    if isinstance(node.get("pattern"), str):
        check_regex(node["pattern"], param)
    if isinstance(node.get("patternProperties"), dict):
        for pattern in node["patternProperties"]:
            check_regex(pattern, param)


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
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_REGEX_BYTES:
        raise RequestError(f"a regex is longer than {MAX_REGEX_BYTES} bytes", param=param)
    if not pattern:
        raise RequestError("the regex is empty", param=param)
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
_REGEX_ITEM = (
    r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z))|(?P<open>\()|(?P<close>\))"
    r"|(?P<repeat>\{\d+(?:,\d*)?\})|(?P<other>.)"
)
