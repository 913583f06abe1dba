"""Lark rules for forced calls whose arguments are not JSON: bare text between marks, or Gemma's syntax.

A schema is followed parameter by parameter. What cannot be said of one parameter alone (``anyOf`` of the whole object,
``minProperties``), and a ``pattern`` of bare text, is refused by name, because the call could not be held to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvasir.api.calls.call_values import kinds_of
from kvasir.api.calls.tools import embedded, mark, quoted, schema_of
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer

# Keywords about the properties as a whole.
JOINT = (
    "$ref allOf anyOf oneOf not if then else patternProperties propertyNames minProperties maxProperties "
    "dependentRequired dependentSchemas unevaluatedProperties"
).split()
DEFINITIONS = ("$defs", "definitions")
COUNT = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def refuse(function: Mapping[str, Any], word: str) -> RequestError:
    """The error for a keyword that this format cannot be held to."""
    return RequestError(
        f"'{word}' in the parameters of '{function['name']}' cannot be forced in this model's tool-call format; leave "
        "it out, or send tool_choice='auto'",
        param="tools",
        code="invalid_grammar",
    )


def properties_of(function: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Name, schema and whether it is required of each property. Raises RequestError for keywords about all of them."""
    for word in JOINT:
        if word in schema:
            raise refuse(function, word)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    for key in [*properties, *(key for key in required if key not in properties)]:
        yield key, properties.get(key, {}), key in required


def keyed_rules(
    rule: str,
    function: Mapping[str, Any],
    before: Callable[[str], str],
    end: str | None,
    after: str,
    tokenizer: Tokenizer,
) -> list[str]:
    """Rules in which ``rule`` is the arguments of ``function``, each behind ``before(key)``.

    ``end``: the mark that ends a value of bare text, before ``after``; None: values are JSON, and ``after`` stands
    between two of them.
    """
    root = schema_of(function)
    arguments, lines = [], []
    for i, (key, schema, required) in enumerate(properties_of(function, root)):
        lines.append(f"{rule}_{i}: {before(key)} {rule}_value_{i}")
        lines += _value(f"{rule}_value_{i}", schema, root, end, function, tokenizer)
        arguments.append((f"{rule}_{i}", required))
    if end is None:
        return [*separated(rule, arguments, after), *lines]
    body = " ".join(f"({name} {quoted(after)}){'' if required else '?'}" for name, required in arguments)
    return [f"{rule}: {body or json.dumps('')}", *lines]


def separated(rule: str, items: list[tuple[str, bool]], separator: str) -> list[str]:
    """Rules in which ``rule`` is the items in their order with a separator between two, those that are not required
    left out at will."""
    lines = []
    for i, (item, required) in enumerate(items):
        for state, lead in (("none", ""), ("some", quoted(separator) + " ")):
            skip = "" if required else f" | {rule}_{state}_{i + 1}"
            lines.append(f"{rule}_{state}_{i}: {lead}{item} {rule}_some_{i + 1}{skip}")
    return [
        f"{rule}: {rule}_none_0",
        *lines,
        f'{rule}_none_{len(items)}: ""',
        *([f'{rule}_some_{len(items)}: ""'] if items else []),
    ]


def _value(
    rule: str, schema: Any, root: Mapping[str, Any], end: str | None, function: Mapping[str, Any], tokenizer: Tokenizer
) -> list[str]:
    """Rules of one value and its end."""
    if end is None:
        return [f"{rule}: {embedded(rooted(schema, root))}"]
    kinds = kinds_of(schema, root)
    if kinds is not None and "string" not in kinds:
        return [f"{rule}: {embedded(rooted(schema, root))} {mark(end, tokenizer)}"]
    schema = resolved(schema, root)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values:
        texts = (v if isinstance(v, str) else json.dumps(v) for v in values)
        return [f"{rule}: ({' | '.join(map(quoted, texts))}) {mark(end, tokenizer)}"]
    return text_rules(rule, schema, end, function, tokenizer)


def text_rules(
    rule: str, schema: Mapping[str, Any], end: str, function: Mapping[str, Any], tokenizer: Tokenizer
) -> list[str]:
    """Rules of bare text, of a string's length, up to and including the mark ``end``."""
    if "pattern" in schema:
        raise refuse(function, "pattern")
    low, high = (schema.get(word) for word in COUNT["string"])
    repeat = "*" if low is None and high is None else f"{{{low or 0},{'' if high is None else high}}}"
    text = f"/(?s:.{repeat})/"
    if tokenizer.is_added(end):
        return [f"{rule}: {text} {mark(end, tokenizer)}"]
    return [f"{rule}[suffix={quoted(end)}]: {text}"]


def rooted(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema with the definitions that its references name."""
    schema = schema if isinstance(schema, Mapping) else {}
    return {**schema, **{word: root[word] for word in DEFINITIONS if word in root}}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind local references, up to eight of them."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        target: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else {}
        schema = target
    return schema if isinstance(schema, Mapping) else {}


class Bare:
    """Rules of JSON values in Gemma's syntax: bare keys, strings between two ``quote`` marks, no white space."""

    def __init__(self, quote: str, tokenizer: Tokenizer) -> None:
        self.rules: list[str] = []
        self._quote = quote
        self._tokenizer = tokenizer
        self._count = 0
        self._references: dict[str, str] = {}  # rule of each reference, so that a schema may hold itself

    def arguments(self, function: Mapping[str, Any]) -> str:
        """The name of a rule of the function's arguments."""
        self._references = {}
        root = schema_of(function)
        return self._object(root, root, function)

    def _new(self) -> str:
        self._count += 1
        return f"bare_{self._count}"

    def _value(self, schema: Any, root: Mapping[str, Any], function: Mapping[str, Any]) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._references:
                rule = self._references[reference] = self._new()
                self.rules.append(f"{rule}: {self._value(resolved(schema, root), root, function)}")
            return self._references[reference]
        for word in ("allOf", "not", "if", "prefixItems", "contains", "uniqueItems"):
            if word in schema:
                raise refuse(function, word)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([self._constant(value) for value in values])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._either([self._value(part, root, function) for part in schema[word]])
        kinds = kinds_of(schema, root) or ("string", "number", "boolean", "null")
        return self._either([self._kind(kind, schema, root, function) for kind in sorted(kinds)])

    def _kind(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], function: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema, function)
        if kind == "object":
            return self._object(schema, root, function)
        if kind != "array":
            return embedded({**{k: v for k, v in schema.items() if k != "type"}, "type": kind})
        low, high = (schema.get(word) for word in COUNT["array"])
        item, rule, low = self._value(schema.get("items"), root, function), self._new(), low or 0
        if high == 0:
            return '"[" "]"'
        most = "" if high is None else high - 1
        self.rules.append(f'{rule}: {item} ("," {item}){{{max(low - 1, 0)},{most}}}')
        return f'"[" {rule}{"" if low else "?"} "]"'

    def _string(self, schema: Mapping[str, Any], function: Mapping[str, Any]) -> str:
        rule = self._new()
        self.rules += text_rules(rule, schema, self._quote, function, self._tokenizer)
        return f"{mark(self._quote, self._tokenizer)} {rule}"

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], function: Mapping[str, Any]) -> str:
        rule, items = self._new(), []
        for key, value, required in properties_of(function, schema):
            if not re.fullmatch(r"[^\s{}\[\],:\"<]+", key):
                raise refuse(function, key)
            item = self._new()
            self.rules.append(f"{item}: {quoted(key + ':')} {self._value(value, root, function)}")
            items.append((item, required))
        self.rules += separated(rule, items, ",")
        return f'"{{" {rule} "}}"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            quote = mark(self._quote, self._tokenizer)
            return f"{quote} {quoted(value)} {quote}"
        if isinstance(value, Mapping):
            inner = ' "," '.join(f"{quoted(f'{k}:')} {self._constant(v)}" for k, v in value.items())
            return f'"{{" {inner} "}}"'
        if isinstance(value, list):
            inner = ' "," '.join(map(self._constant, value))
            return f'"[" {inner} "]"'
        return quoted(json.dumps(value))

    def _either(self, choices: list[str]) -> str:
        return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"
