"""Random schemas and grammars for fuzzing, and a validator that reads numbers exactly."""

from __future__ import annotations

import json
import re
from decimal import Context, Decimal, localcontext
from typing import Any

import jsonschema
from hypothesis import strategies as st

I64, U64 = 1 << 63, 1 << 64
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]
EDGES = [0, 1, -1, 7, 255, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 53) + 1]
EDGES += [-I64 - 1, -I64, 1 - I64, I64 - 1, I64, I64 + 1, U64 - 1, U64, 10**30, -(10**30), 10**400]
FLOATS = [0.1, -0.5, 1e-7, 5e-324, 1e22, 1e23, 1.5e300, 1e308, -1e308, 0.30000000000000004]

numbers = st.one_of(
    st.integers(-20, 20),
    st.sampled_from(EDGES),
    st.sampled_from(FLOATS),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
)
sizes = st.one_of(st.integers(0, 5), st.sampled_from([64, 1000, 9999, 10_000, 10_001, 1 << 31, I64, U64, 1.5, 3.0, -1]))
texts = st.one_of(st.sampled_from(["a", "b", "", "é", '"', "\\", "\n", "<think>", "a/b~", "$ref"]), st.text(max_size=8))
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
# Atoms and operators of regexes that are put together at random: many are invalid, some are large, some are slow.
_ATOMS = [
    "a",
    "b",
    ".",
    r"\d",
    r"\w+",
    r"\s*",
    "[a-f]",
    "[^x]",
    "(a|b)",
    "(?:ab)+",
    "^",
    "$",
    "(",
    ")",
    "[",
    "]",
    "{2,3}",
    "{0,1000}",
    "{99999}",
    "*",
    "+",
    "?",
    "|",
    r"\b",
    "(?=a)",
    "(?!b)",
    r"\1",
    "(a*)*",
    "((a+)+)+",
    "(a|a)*",
    r"\p{L}",
    r"\u0061",
    r"\x{10ffff}",
    "é",
    "\x00",
    r"\/",
    "(?i)A",
    "&",
    "~(a)",
    "[a-z&&[^b]]",
]
patterns = st.one_of(
    st.sampled_from(["^a+$", "^[a-z]{1,5}$", "a", r"^\d{3}-\d{4}$", "^(a|b)*$", "^[^\\n]{0,9}$", ".*b.*", ""]),
    st.lists(st.sampled_from(_ATOMS), max_size=6).map("".join),
    st.text(max_size=6),
)
FORMATS = "date-time time date duration email hostname ipv4 ipv6 uri uuid unknown regex color idn-email iri".split()
references = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/$defs/none", "#/properties/a", "#/$defs/a/items", "#a", "other.json", "##", ""]
)


def _node(inner: st.SearchStrategy) -> st.SearchStrategy:
    """One level of a schema over ``inner``. Keywords stand together at random, sensible or not."""
    listed = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(texts, inner, max_size=3)
    keywords = {
        "type": st.one_of(st.sampled_from(KINDS), st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)),
        "enum": st.lists(values, max_size=4),
        "const": values,
        "minimum": numbers,
        "maximum": numbers,
        "exclusiveMinimum": numbers,
        "exclusiveMaximum": numbers,
        "multipleOf": numbers,
        "minLength": sizes,
        "maxLength": sizes,
        "pattern": patterns,
        "format": st.sampled_from(FORMATS),
        "minItems": sizes,
        "maxItems": sizes,
        "items": st.one_of(inner, listed),
        "prefixItems": listed,
        "additionalItems": inner,
        "properties": named,
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "additionalProperties": inner,
        "required": st.lists(texts, max_size=3),
        "minProperties": sizes,
        "maxProperties": sizes,
        "anyOf": listed,
        "oneOf": listed,
        "allOf": listed,
        "$ref": references,
        "$defs": st.fixed_dictionaries({}, optional={"a": inner, "b": inner}),
        "definitions": named,
        "not": inner,
        "if": inner,
        "then": inner,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "dependentRequired": st.dictionaries(texts, st.lists(texts, max_size=2), max_size=2),
        "propertyNames": inner,
        "unevaluatedProperties": inner,
        "title": texts,
        "default": values,
        "$schema": st.sampled_from(
            ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", "x"]
        ),
        "$id": texts,
        "$anchor": texts,
        "x-guidance": values,
        "nullable": st.booleans(),
    }
    common = ["type", "properties", "required", "items", "anyOf", "enum", "minimum", "maximum", "pattern"]
    names = st.lists(st.one_of(st.sampled_from(common), st.sampled_from(list(keywords))), max_size=4, unique=True)
    right = names.flatmap(lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen}))
    # Any value at any keyword.
    wrong = st.builds(lambda node, name, value: {**node, name: value}, right, st.sampled_from(list(keywords)), values)
    return st.one_of(right, right, right, wrong)


# Schemas of all kinds: sensible, contradictory, recursive, malformed.
wild = st.recursive(st.one_of(_node(st.booleans()), st.booleans(), values), _node, max_leaves=8)


def _deep(wrap: str, depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {wrap: [inner] if wrap.endswith("Of") else {"a": inner} if wrap == "properties" else inner}
    return inner


deep = st.builds(
    _deep, st.sampled_from(["items", "properties", "anyOf", "allOf", "oneOf", "not"]), st.integers(5, 200), wild
)
wide = st.one_of(
    st.builds(lambda n, s: {"type": "object", "properties": {f"k{i}": s for i in range(n)}}, st.integers(9, 300), wild),
    st.builds(lambda n, s: {"anyOf": [s] * n}, st.integers(9, 300), wild),
    st.builds(lambda n: {"enum": list(range(n))}, st.integers(100, 3000)),
    st.builds(
        lambda n, s: {"type": "object", "required": [f"k{i}" for i in range(n)], "additionalProperties": s},
        st.integers(9, 300),
        wild,
    ),
)
# A few that need each other.
recursive = st.builds(
    lambda a, b, root: {"$defs": {"a": a, "b": b}, **root},
    _node(st.builds(lambda r: {"$ref": r}, references)),
    _node(st.builds(lambda r: {"$ref": r}, references)),
    _node(st.builds(lambda r: {"$ref": r}, references)),
)
schemas = st.one_of(wild, wild, recursive, recursive, deep, wide)

_LARK = [
    "start: a",
    "start: a+",
    "\na: /x/",
    '\na: "b" | a "c"',
    "\nA: /[a-z]{1,9}/",
    ' "t"',
    " | start",
    "{1,3}",
    "{99999}",
    " %json {}",
    ' %json {"type": "integer", "minimum": 9223372036854775807}',
    " <think>",
    " <[5]>",
    " <[1-99]>",
    " (",
    ")",
    "\n%ignore / /",
    "\n%import common.WS",
    "\nstart[lazy]: A",
    "\na[max_tokens=3]: /.*/",
    "\na[suffix=/x/]: /.*/",
    "\nb: %regex {}",
    " ?",
    "*",
    " & ",
    " ~",
    "//",
    '"',
    "/",
    "\x00",
    "\u2028",
]
_EBNF = ["root ::= a", "root ::= ", "\na ::= ", '"x"', "[a-z]", "[^a]+", " | ", "(", ")", "*", "+", "?", "{2,9}", " a "]
_EBNF += ["root", "\nb ::= root b", '"<think>"', "[", '"', "# c", "\n", "::=", "{99999}", "\\", "\x00"]


def _joined(parts: list[str], head: str) -> st.SearchStrategy:
    return st.builds(lambda first, rest: first + "".join(rest), st.sampled_from([head, ""]),
                     st.lists(st.sampled_from(parts), max_size=8))  # fmt: skip


lark = _joined(_LARK, "start: a\na: /[ab]{1,3}/")
ebnf = _joined(_EBNF, "root ::= a\na ::= [ab] ")
choices = st.lists(texts, max_size=5) | values


def exact_json(text: str) -> Any:
    """The value of a JSON text, in which a number that is an integer is one, whatever its notation, and others are
    decimals."""
    with localcontext(Context(prec=1200)):
        return json.loads(text, parse_float=_number)


def _number(text: str) -> Any:
    value = Decimal(text)
    if abs(value.adjusted()) > 1000:
        return value
    return int(value) if value == value.to_integral_value() else value


def is_valid(instance_text: str, schema_text: str) -> bool:
    """Whether jsonschema accepts an instance, with every number exact."""
    with localcontext(Context(prec=1200)):
        schema = _readable(exact_json(schema_text))
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        return kind(schema).is_valid(exact_json(instance_text))


def _readable(schema: Any) -> Any:
    """A schema without the annotations that jsonschema fails on."""
    if isinstance(schema, list):
        return [_readable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k not in ("$schema", "$id", "$anchor") or isinstance(v, str)}
    if isinstance(
        kept.get("pattern"), str
    ):  # Python's $ also matches before a line break at the end, JSON Schema's not
        kept["pattern"] = re.sub(r"(?<!\\)\$", r"\\Z", kept["pattern"])
    return {k: v if k in ("enum", "const", "default") else _readable(v) for k, v in kept.items()}
