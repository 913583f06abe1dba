"""Arguments of tool calls that models do not write as JSON, typed by the schema of the function's parameters."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from kvasir.api.calls.json_scan import MAX_DEPTH, WHITESPACE, Malformed, ValueScan
from kvasir.api.calls.tools import ToolParser

KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str] | None:
    """JSON types that a schema allows; None when it does not say. ``root``: the schema that ``$ref`` points into."""
    if not isinstance(schema, Mapping) or not depth:
        return None
    if "type" in schema:
        named = schema["type"]
        return frozenset(t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(KINDS.get(type(value), "null") for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [kinds_of(part, root, depth - 1) for part in schema[word]]
            return None if None in parts else frozenset().union(*(part for part in parts if part))
    if isinstance(schema.get("allOf"), list):
        return next((kinds for part in schema["allOf"] if (kinds := kinds_of(part, root, depth - 1))), None)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return kinds_of(target, root, depth - 1)
    return None


def parameter_kinds(parameters: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """JSON types of one parameter of a function; None when they are not known."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return kinds_of(schema, parameters)


def typed(text: str, kinds: frozenset[str] | None) -> str:
    """JSON text of a value that a model wrote bare: ``5`` is a number where the schema allows one, else a string.

    Words of Python (True, None, single quotes) count where the schema asks for no string. What is no value of an
    allowed type is a string, so that the caller sees what the model wrote.
    """
    found = _json(text)
    if found is None and kinds is not None:
        found = literal(text)
    if found is None or not (kinds is None or _allowed(found, kinds)):
        return json.dumps(text, ensure_ascii=False)
    return found


def _allowed(found: str, kinds: frozenset[str]) -> bool:
    kind = KINDS.get(type(value := json.loads(found)), "null")
    whole = kind == "number" and "integer" in kinds and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or whole


def _json(text: str) -> str | None:
    """The text without surrounding white space if it is one JSON value, as the model wrote it."""
    scan, text = ValueScan(), text.strip(WHITESPACE)
    try:
        for char in text + " ":
            if scan.done and char != " ":
                return None
            if not scan.done:
                scan.feed(char)
        if scan.done:
            text.encode()
            json.loads(text)  # an integer of too many digits, or a nesting that the standard library refuses
            return text
    except (Malformed, ValueError, RecursionError):
        pass
    return None


def literal(text: str) -> str | None:
    """JSON text of a value written in JSON or as a literal of Python; None when it is neither."""
    found = _json(text)
    if found is not None:
        return found
    try:
        value = ast.literal_eval(text.strip())
        if _depth(value) > MAX_DEPTH:
            return None
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return found


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError  # json.dumps would turn other keys into strings
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 1


class KeyedArguments:
    """Writer of a call's arguments as JSON for a parser that reads them key by key.

    Strings stream; other values are typed when they end. ``opened``: the call is announced and has not ended.
    """

    def __init__(self, parser: ToolParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._parameters = parser.schemas.get(name, {})
        self._keys: set[str] = set()
        self._kinds: frozenset[str] | None = None
        self._value = ""
        self.opened = False

    def key(self, key: str) -> None:
        """Begin an argument. Raises Malformed for a key that came before."""
        self._begin(key)
        self._kinds, self._value = parameter_kinds(self._parameters, key), ""
        if self._kinds == {"string"}:
            self._parser.argue('"')

    def has(self, key: str) -> bool:
        """Whether this argument came before."""
        return key in self._keys

    def value(self, text: str) -> None:
        """Take more of the argument's value."""
        if self._kinds == {"string"}:
            self._parser.argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def end_value(self) -> None:
        """End the argument."""
        self._parser.argue('"' if self._kinds == {"string"} else typed(self._value, self._kinds))

    def whole(self, key: str, found: str) -> None:
        """Take an argument whose value is the JSON text ``found``. Raises Malformed like ``key``."""
        self._begin(key)
        self._parser.argue(found)

    def _begin(self, key: str) -> None:
        if not key or key in self._keys:
            raise Malformed
        if not self.opened:
            self._parser.open_call(self._name)
            self.opened = True
        self._parser.argue(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)

    def close(self) -> None:
        """End the call."""
        if not self.opened:
            self._parser.open_call(self._name)
        self._parser.argue("}" if self._keys else "{}")
        self.opened = False
