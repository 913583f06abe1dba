"""Lark rules for schemas with numbers that the grammar library would round, or ranges that it misreads.

Only what lies between the root and such a number becomes rules of ours; the rest stays a schema of the library's. A
keyword that these rules do not know is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kvasir.decoding.number_ranges import (
    MAX_DIGITS,
    MAX_PLACES,
    exact,
    integers,
    is_lost,
    is_misread,
    is_safe,
    multiples,
    numbers,
)
from kvasir.decoding.references import target
from kvasir.errors import RequestError

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords that constrain nothing.
_NOTES = frozenset(
    "title description default examples example deprecated readOnly writeOnly discriminator format $comment $schema "
    "$id $defs definitions".split()
)
# A key, in the one form that the grammar library writes: its escapes are the short ones, where there is one.
_TEXT = r'"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f]|7f))*"'


def needs_rules(schema: Any, root: Any = None) -> bool:
    """Whether the library would change a number of this schema, or misread its range. ``root``: where its references
    lead; None: into itself."""
    return any(True for _ in _unsafe(schema, schema if root is None else root))


def _unsafe(schema: Any, root: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        own = any(key in schema for key in (*BOUNDS, "allOf", "multipleOf"))
        bounds = list(_bounds(schema, root)) if own else []
        if own and is_misread(bounds):
            yield "minimum"
        step, kinds = schema.get("multipleOf"), schema.get("type", "number")
        if isinstance(step, float) and is_safe(step) and "number" in kinds and is_lost(step, bounds):
            yield "multipleOf"
        for key, value in schema.items():
            if key in (*BOUNDS, "multipleOf") and isinstance(value, int | float) and not is_safe(value):
                yield key
            elif key in ("const", "enum"):
                if not _safe_value(value):
                    yield key
            elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
                for part in value.values():
                    yield from _unsafe(part, root)
            elif key not in _NOTES and key != "required":
                yield from _unsafe(value, root)
    elif isinstance(schema, list):
        for part in schema:
            yield from _unsafe(part, root)


def _bounds(schema: Any, root: Any) -> Iterator[tuple[str, int | float]]:
    """All bounds that may hold together for the value that ``schema`` describes."""
    todo, seen = [schema], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        for key in BOUNDS:
            if isinstance(node.get(key), int | float):
                yield key, node[key]
        for word in ("allOf", "anyOf", "oneOf"):
            todo += node[word] if isinstance(node.get(word), list) else []
        if "$ref" in node:
            todo.append(target(root, node["$ref"]))


def _safe_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_safe_value, value.values()))
    if isinstance(value, list):
        return all(map(_safe_value, value))
    return isinstance(value, bool) or not isinstance(value, int | float) or is_safe(value)


def exact_rules(name: str, schema: Mapping[str, Any], options: Mapping[str, Any], param: str) -> list[str]:
    """Rules in which ``name`` is the schema. ``options``: the library's for whitespace. Raises RequestError."""
    try:
        return _Rules(name, schema, options, param).all()
    except (TypeError, AttributeError, KeyError, ValueError, ArithmeticError, RecursionError) as e:
        raise RequestError(
            f"the schema cannot be used: it is malformed ({type(e).__name__}: {str(e)[:100]})",
            param=param,
            code="invalid_grammar",
        ) from e


class _Rules:
    def __init__(self, name: str, root: Mapping[str, Any], options: Mapping[str, Any], param: str) -> None:
        self._name, self._root, self._options, self._param = name, root, options, param
        self._rules: list[str] = []
        self._count = 0
        self._references: dict[str, str] = {}
        pattern = options.get("whitespace_pattern") or r"[\x20\x0A\x0D\x09]+"
        self._space = "" if options.get("whitespace_flexible") is False else f"(/{pattern}/)? "
        self._comma = self._separator(options.get("item_separator", ","))
        self._colon = self._separator(options.get("key_separator", ":"))

    def all(self) -> list[str]:
        body = self._value(self._root, "#")
        return [f"{self._name}: {body}", *self._rules]

    def _separator(self, text: str) -> str:
        return f"{self._space}{json.dumps(text)} {self._space}".strip()

    def _rule(self, body: str) -> str:
        self._count += 1
        self._rules.append(f"{self._name}_{self._count}: {body}")
        return f"{self._name}_{self._count}"

    def _refuse(self, key: str, path: str, why: str) -> RequestError:
        return RequestError(
            f"'{key}' at {path[:200]} cannot be kept exactly: {why}", param=self._param, code="invalid_grammar"
        )

    def _value(self, node: Any, path: str) -> str:
        if node is False:
            raise RequestError(f"the schema at {path[:200]} allows no output at all", param=self._param)
        if not isinstance(node, Mapping):
            return self._leaf(node)
        rest = {k: v for k, v in node.items() if k not in _NOTES}
        if not needs_rules(rest, self._root) and not self._refers(node):
            return self._leaf(node)
        kinds = node.get("type", list(_KINDS))
        kinds = [kinds] if isinstance(kinds, str) else [k for k in kinds if k != "integer" or "number" not in kinds]
        if "const" in node or "enum" in node:
            return self._constants(node, kinds, path)
        for word in ("$ref", "anyOf", "allOf"):
            if word in node:
                if others := [k for k in node if k not in _NOTES and k != word]:
                    raise self._refuse(others[0], path, f"it stands next to '{word}' and a number of many digits")
                return self._combined(word, node[word], path)
        if not kinds:
            raise self._refuse("type", path, "it names no type")
        return self._either([self._kind(kind, node, path) for kind in kinds])

    def _either(self, choices: list[str]) -> str:
        return f"({' | '.join(choices)})"

    def _leaf(self, node: Any) -> str:
        schema = node if isinstance(node, Mapping) else {}
        return "%json " + json.dumps({**schema, "x-guidance": dict(self._options)})

    def _refers(self, node: Any) -> bool:
        """Whether a reference lies in a schema: its target is known to our rules only."""
        if isinstance(node, Mapping):
            return isinstance(node.get("$ref"), str) or any(self._refers(v) for k, v in node.items() if k not in _NOTES)
        return isinstance(node, list) and any(map(self._refers, node))

    def _combined(self, word: str, value: Any, path: str) -> str:
        if word == "$ref":
            if value not in self._references:
                self._count += 1
                rule = self._references[value] = f"{self._name}_{self._count}"
                pointed = target(self._root, value)
                if not isinstance(pointed, Mapping | bool):
                    raise self._refuse(word, path, f"{value[:80]!r} is not found")
                self._rules.append(f"{rule}: {self._value(pointed, value)}")
            return self._references[value]
        if word == "allOf" and len(value) != 1:
            raise self._refuse(word, path, "its parts hold a number of many digits")
        parts = [(i, part) for i, part in enumerate(value) if part is not False or word == "allOf"]
        if not parts:
            raise self._refuse(word, path, "it allows nothing")
        return self._either([self._value(part, f"{path}/{word}/{i}") for i, part in parts])

    def _constants(self, node: Mapping[str, Any], kinds: list[str], path: str) -> str:
        for key in node:
            if key not in _NOTES and key not in ("const", "enum", "type"):
                raise self._refuse(key, path, "it stands next to a value with a number of many digits")
        values = [node["const"]] if "const" in node else node["enum"]
        values = [v for v in values if any(_is(v, kind) for kind in kinds)]
        if "const" in node and "enum" in node:
            values = [v for v in values if v in node["enum"]]
        if not values:
            raise self._refuse("const" if "const" in node else "enum", path, "no value has the type that is asked for")
        return self._either([self._constant(value) for value in values])

    def _constant(self, value: Any) -> str:
        if isinstance(value, Mapping):
            items = [f"{self._key(k)} {self._constant(v)}" for k, v in value.items()]
        elif isinstance(value, list):
            items = [self._constant(v) for v in value]
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return json.dumps(self._digits(value) if is_number else json.dumps(value, ensure_ascii=False))
        ends = ('"{"', '"}"') if isinstance(value, Mapping) else ('"["', '"]"')
        inner = f" {self._comma} ".join(items)
        return f"{ends[0]} {self._space}{inner} {self._space}{ends[1]}"

    def _digits(self, value: int | float) -> str:
        """A number as the library writes it: without an exponent, and an integer without a fraction."""
        number = exact(value)
        if not number.is_finite() or abs(number.adjusted()) > MAX_DIGITS:
            raise RequestError(f"a value of the schema has more than {MAX_DIGITS} digits", param=self._param)
        return f"{number:f}" if number != number.to_integral_value() else f"{number.to_integral_value():f}"

    def _key(self, key: str) -> str:
        return f"{json.dumps(json.dumps(key, ensure_ascii=False))} {self._colon}"

    def _kind(self, kind: str, node: Mapping[str, Any], path: str) -> str:
        words = (*BOUNDS, "multipleOf")
        if kind in ("integer", "number") and needs_rules({"type": kind, **{k: node[k] for k in words if k in node}}):
            return self._number(kind, node, path)
        if kind == "object":
            return self._object(node, path)
        if kind == "array":
            return self._array(node, path)
        return self._leaf({**{k: v for k, v in node.items() if k in _WORDS[kind]}, "type": kind})

    def _number(self, kind: str, node: Mapping[str, Any], path: str) -> str:
        step = node.get("multipleOf")
        if step is not None and (kind == "integer" or not is_safe(step) or not step):
            raise self._refuse("multipleOf", path, f"{step} with bounds of many digits, or of many digits")
        bounds: dict[str, tuple[Decimal, bool] | None] = {}
        for side, sign in (("inimum", 1), ("aximum", -1)):
            found = []
            for word in (f"m{side}", f"exclusiveM{side}"):
                value = node.get(word)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    number = exact(value)
                    if not number.is_finite() or number.adjusted() >= MAX_DIGITS:
                        raise self._refuse(word, path, f"it has more than {MAX_DIGITS} digits")
                    if kind == "number" and -int(number.as_tuple().exponent) > MAX_PLACES:
                        raise self._refuse(word, path, f"it has more than {MAX_PLACES} decimal places")
                    found.append((number, word.startswith("e")))
            bounds[side] = max(found, key=lambda b, s=sign: (b[0] * s, b[1])) if found else None
        low, high = bounds["inimum"], bounds["aximum"]
        try:
            if kind == "integer":
                least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
                most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
                return f"/{integers(least, most)}/"
            ends = (low and low[0], high and high[0], bool(low and low[1]), bool(high and high[1]))
            if step is not None:
                return f"/{multiples(exact(step), *ends)}/"
            return f"/{numbers(*ends)}/"
        except ValueError as e:
            raise self._refuse("minimum" if step is None else "multipleOf", path, str(e)) from e

    def _array(self, node: Mapping[str, Any], path: str) -> str:
        if "prefixItems" in node or isinstance(node.get("items"), list):
            raise self._refuse("prefixItems", path, "items of their own schemas hold a number of many digits")
        low, high = node.get("minItems", 0), node.get("maxItems")
        if node.get("items") is False:
            high = 0
        if low != int(low) or (high is not None and high != int(high)) or low < 0 or (high is not None and high < low):
            raise self._refuse("minItems", path, f"{low} items at least, {high} at most")
        if high == 0:
            return f'"[" {self._space}"]"'
        item = self._rule(self._value(node.get("items", {}), f"{path}/items"))
        more = f"{{{max(int(low) - 1, 0)},{'' if high is None else int(high) - 1}}}"
        inner = self._rule(f"{item} ({self._comma} {item}){more}")
        return f'"[" {self._space}{inner}{"" if low else "?"} {self._space}"]"'

    def _object(self, node: Mapping[str, Any], path: str) -> str:
        for key in ("patternProperties", "minProperties", "maxProperties"):
            if key in node:
                raise self._refuse(key, path, "it stands next to a number of many digits")
        properties, required = dict(node.get("properties") or {}), node.get("required") or []
        others = node.get("additionalProperties", True)
        for key in required:
            properties.setdefault(key, others)
        items = []
        for key, schema in properties.items():
            if schema is False:
                if key in required:
                    raise self._refuse("required", path, f"{key[:80]!r} is not allowed")
                continue
            value = self._value(schema, f"{path}/properties/{key}")
            items.append((self._rule(f"{self._key(key)} {value}"), key in required))
        if others is not False:
            name = f"{self._name}_KEY_{self._count}".upper()
            without = "|".join(map(_written, properties))
            self._rules.append(f"{name}: /{_TEXT}/" + (f' & ~/"({without})"/' if without else ""))
            item = self._rule(f"{name} {self._colon} {self._value(others, f'{path}/additionalProperties')}")
            items.append((self._rule(f"{item} ({self._comma} {item})*"), False))
        return f'"{{" {self._space}{self._states(items)} {self._space}"}}"'

    def _states(self, items: list[tuple[str, bool]]) -> str:
        """The items in their order with commas between two, those that are not required left out at will."""
        self._count += 1
        rule = f"{self._name}_{self._count}"
        for i, (item, required) in enumerate(items):
            for state, lead in (("none", ""), ("some", f"{self._comma} ")):
                skip = "" if required else f" | {rule}_{state}_{i + 1}"
                self._rules.append(f"{rule}_{state}_{i}: {lead}{item} {rule}_some_{i + 1}{skip}")
        self._rules += [f'{rule}_{state}_{len(items)}: ""' for state in ("none", "some")]
        return f"{rule}_none_0"


def _written(key: str) -> str:
    """A regex of a key's characters as ``_TEXT`` writes them."""
    text = json.dumps(key, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")
    return re.sub(r"[^a-zA-Z0-9]", lambda c: f"\\x{{{ord(c[0]):x}}}", text)


_WORDS = {
    "null": (),
    "boolean": (),
    "integer": (*BOUNDS, "multipleOf"),
    "number": (*BOUNDS, "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or kind == "integer" and exact(value) == exact(value).to_integral_value()
    return kind == {str: "string", list: "array", dict: "object"}.get(type(value))
