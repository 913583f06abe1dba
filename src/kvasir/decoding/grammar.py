"""Structured output: a grammar becomes a mask over the next token. A thin layer over ``llguidance``.

Compiling takes milliseconds, so there is no cache. It is bounded: sizes are checked before the library sees the text,
and the library's own fuel bounds the rest. ``GrammarCompiler.compile`` may run in a worker thread. A compiled
``Matcher`` is never advanced itself: every branch, and every return from preemption, takes a ``copy`` (microseconds)
and replays its output.

This module handles the end of a sequence, not the library: EOS is allowed exactly in accepting states, and after EOS
nothing else is. No failure here raises or asserts in the step loop; ``Matcher.error`` says what happened to that one
request.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir.decoding.json_schema import served_schema, whitespace_options
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
# Masks that are worth waking threads for, and the most threads: 64 masks take 2 ms on one, a third of a large step.
LEAST_FOR_THREADS, MAX_THREADS = 4, 8
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 200_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
_SHOWN_REGEX = r'invalid regex ".*" \(in regex\): '
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "not", "if"}  # keywords whose parts may apply together
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


class Matcher:
    """The state of one branch under one grammar. ``fill`` gives the next mask, ``accept`` advances, ``rollback``
    undoes.

    With ``after`` (ids that end the reasoning) the output is free until those ids were generated, except that it cannot
    end: a finished output always satisfies the grammar.
    """

    def __init__(
        self, inner: llguidance.LLMatcher, vocab_size: int, eos_ids: tuple[int, ...], after: tuple[int, ...] = ()
    ) -> None:
        self._inner = inner
        self._words = -(-vocab_size // 32)
        self._eos_ids = eos_ids
        self._after = after
        self._free: list[int] = []  # tokens of the free part, up to and including ``after``
        self._fed = 0  # tokens that the library has consumed
        self._ended = 0  # EOS tokens seen since the grammar was satisfied
        self.error = ""

    @property
    def constrained(self) -> bool:
        """False while the output is still free text before ``after``."""
        return not self._after or tuple(self._free[-len(self._after) :]) == self._after

    def is_stopped(self) -> bool:
        """Whether nothing but EOS can follow."""
        return bool(self.error) or self._ended > 0 or (self.constrained and self._inner.is_stopped())

    def is_accepting(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return not self.error and self.constrained and self._inner.is_accepting()

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed next tokens into ``mask``, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for
        token i.

        Returns False, with ``error`` set and nothing allowed, when the library gave up."""
        assert mask.shape == (self._words,) and mask.dtype == np.int32 and mask.flags.c_contiguous
        if self._asks_library():
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._complete(mask)

    def _asks_library(self) -> bool:
        return not self.failed() and not self._ended and self.constrained

    def _complete(self, mask: np.ndarray) -> bool:
        """Turn the library's mask, if it was asked, into what ``fill`` writes."""
        if self.failed():
            mask[:] = 0
            return False
        if self._ended:
            mask[:] = 0
            self._set_eos(mask, True)
        elif not self.constrained:
            mask[:] = -1
            self._set_eos(mask, False)
        else:
            self._set_eos(mask, self._inner.is_accepting())
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must follow, one after the other: at each of them the mask has exactly that token.

        EOS is never among them. The library tokenises forced bytes as the tokenizer does and gives the first token as
        the only one of its mask, so that this is what the masks would force one by one."""
        if self.failed() or self._ended or not self.constrained:
            return []
        return self._inner.compute_ff_tokens()

    def accept(self, tokens: list[int]) -> bool:
        """Advance by ``tokens``. False when one of them is not allowed; then only those before it count."""
        return self.try_accept(tokens) == len(tokens)

    def try_accept(self, tokens: list[int]) -> int:
        """Advance by the longest legal prefix of ``tokens`` and return its length. An illegal token changes nothing."""
        for i, token in enumerate(tokens):
            if not self._accept_one(token):
                return i
        return len(tokens)

    def _accept_one(self, token: int) -> bool:
        if self.failed():
            return False
        if token in self._eos_ids:
            if not (self._ended or self.is_accepting()):
                return False
            self._ended += 1
        elif self._ended:
            return False
        elif not self.constrained:
            self._free.append(token)
        elif self._inner.is_stopped() or self._inner.try_consume_tokens([token]) != 1:
            return False
        else:
            self._fed += 1
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        assert 0 <= count <= self._ended + self._fed + len(self._free), "rollback past the beginning"
        ended = min(count, self._ended)
        fed = min(count - ended, self._fed)
        free = count - ended - fed
        self._ended -= ended
        self._fed -= fed
        if fed and not self._inner.rollback(fed):
            self.error = self.error or f"rollback failed: {self._inner.get_error()}"
        if free:
            del self._free[-free:]

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        twin = Matcher(self._inner.deep_copy(), self._words * 32, self._eos_ids, self._after)
        twin._free, twin._fed, twin._ended, twin.error = list(self._free), self._fed, self._ended, self.error
        return twin

    def failed(self) -> bool:
        """Whether the library gave up for good; ``error`` then says why."""
        if not self.error and self._inner.is_error():
            self.error = _reason(self._inner.get_error()) or "the grammar engine gave up"
        return bool(self.error)

    def _set_eos(self, mask: np.ndarray, allowed: bool) -> None:
        words = mask.view(np.uint32)
        for token in self._eos_ids:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit


def fill_all(matchers: list[Matcher], masks: np.ndarray) -> list[bool]:
    """Fill ``masks`` [matchers, ceil(V / 32)] int32 as ``Matcher.fill`` does, several at a time where there are
    threads. The matchers must differ."""
    threads = _threads() if len(matchers) >= LEAST_FOR_THREADS else None
    if threads is None:
        return [matcher.fill(mask) for matcher, mask in zip(matchers, masks)]
    assert masks.shape == (len(matchers), matchers[0]._words) and masks.dtype == np.int32 and masks.flags.c_contiguous
    asked = [(matcher._inner, i) for i, matcher in enumerate(matchers) if matcher._asks_library()]
    threads.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.strides[0], len(masks))
    return [matcher._complete(mask) for matcher, mask in zip(matchers, masks)]


@functools.cache
def _threads() -> llguidance.LLExecutor | None:
    """The library's threads, at most half of the cores; None: a core or two are left alone."""
    count = min(MAX_THREADS, (os.cpu_count() or 1) // 2)
    return llguidance.LLExecutor(count) if count > 1 else None


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
        library does not support, or allows no output at all."""
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


def _reason(text: str) -> str:
    """Return the library's reason in one line. For a regex it repeats the pattern first, and gives the reason in a
    later line."""
    lines = text.strip().splitlines() or [""]
    reason = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    return f"{re.sub(_SHOWN_REGEX, '', lines[0])} {reason}" if reason else lines[0]


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


def try_schema(schema: dict[str, Any], param: str) -> None:
    """Refuse a schema, checked before, that does not compile. Needs no tokenizer: a tenth of a millisecond for the
    schema of a function."""
    try:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        why = _reason(llguidance.LLMatcher.validate_grammar(source, limits=llguidance.LLParserLimits(**_LIMITS)))
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
