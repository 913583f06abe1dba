"""What schemas mean: random schemas of the served keywords against random instances, with jsonschema as the judge.

An instance is written in canonical form: the default whitespace, integers without a fraction, keys in some order. A
valid one must be accepted in one of the orders of its keys, an invalid one in none.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from kvasir.decoding import grammar_source, json_schema
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.schemas import exact_json, is_valid

BIG = 1234567890123456789
MAX_ORDERS = 150
NAMES = ["a", "b", "ab", 'é"']
WORDS = ["", "a", "b", "ab", "aab", "bb", "é", '"', "\\", "\n", "a b", "😀"]
INTEGERS = [*range(-4, 13), BIG, -BIG, BIG + 1, 2**53, 2**53 + 1, 2**63, -(2**63), 2**64, 10**25]
DECIMALS = [Decimal(text) for text in ("0.5", "-1.5", "0.1", "0.3", "2.25", "1e-7", "12345678901234567890.5")]
PATTERNS = ["^a+$", "a", "^[ab]{1,3}$", "b$", "^.b", "^(a|é)*$", "[^a]"]
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]

scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(INTEGERS), st.sampled_from(DECIMALS), st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=5,
)
bounds = st.one_of(st.integers(-4, 12), st.sampled_from(INTEGERS), st.sampled_from(DECIMALS))
small = st.integers(0, 3)


def _some(chosen: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=chosen)


def _typed(kind: str, chosen: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    return _some(chosen).map(lambda found: {"type": kind, **found})


strings = {"minLength": small, "maxLength": small, "pattern": st.sampled_from(PATTERNS)}
ranges = {name: bounds for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
multiples = {"multipleOf": st.sampled_from([1, 2, 3, 5, Decimal("0.5"), Decimal("0.1"), Decimal("2.5"), 7])}
leaves = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(KINDS)),
    st.builds(lambda kinds: {"type": kinds}, st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda found: {"enum": found}, st.lists(values, min_size=1, max_size=4)),
    _typed("string", strings),
    st.sampled_from(["integer", "number"]).flatmap(lambda kind: _typed(kind, {**ranges, **multiples})),
    st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]),
    _some({**strings, **ranges, "enum": st.lists(values, min_size=1, max_size=4)}),
)


def _level(inner: st.SearchStrategy) -> st.SearchStrategy:
    arrays = {
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=3),
        "minItems": small,
        "maxItems": small,
    }
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    objects = {
        "properties": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        "minProperties": small,
        "maxProperties": small,
    }
    plain = {name: objects[name] for name in ("properties", "required", "additionalProperties")}
    branches = st.lists(inner, min_size=1, max_size=3)
    words = st.sampled_from(["anyOf", "oneOf", "allOf"])
    beside = st.one_of(leaves.filter(lambda leaf: isinstance(leaf, dict)), _typed("object", plain))
    return st.one_of(
        _typed("array", arrays),
        _typed("object", objects),
        _typed("object", plain),
        _some({**arrays, **plain}),
        st.builds(lambda word, parts: {word: parts}, words, branches),
        st.builds(lambda word, parts, more: {**more, word: parts}, words, branches, beside),
    )


nodes = st.recursive(leaves, _level, max_leaves=6)
schemas = st.builds(
    lambda root, x, y: {**root, "$defs": {"x": x, "y": y}} if "$ref" in dumped(root) else root,
    nodes.filter(lambda node: isinstance(node, dict)),
    leaves.filter(lambda node: "$ref" not in dumped(node)),
    nodes,
)


def dumped(value: Any) -> str:
    """The JSON text of a value in which decimals keep their digits."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {dumped(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def orders(value: Any) -> list[Any]:
    """A value with the keys of its objects in every order. Raises TooMany."""
    if isinstance(value, list):
        parts = [orders(part) for part in value]
        return [list(chosen) for chosen in itertools.product(*bounded(parts, 1))]
    if not isinstance(value, dict):
        return [value]
    parts = bounded([orders(part) for part in value.values()], math.factorial(len(value)))
    found = [dict(zip(value, chosen)) for chosen in itertools.product(*parts)]
    return [{key: one[key] for key in keys} for one in found for keys in itertools.permutations(value)]


class TooMany(Exception):
    """A value has more orders of keys than are tried."""


def bounded(parts: list[list[Any]], times: int) -> list[list[Any]]:
    """The parts, if they make at most ``MAX_ORDERS`` values."""
    if math.prod(map(len, parts)) * times > MAX_ORDERS:
        raise TooMany
    return parts


class Guess:
    """Instances that are likely to satisfy a schema: one of its values, with its names, near its bounds."""

    def __init__(self, root: dict, rng: random.Random) -> None:
        self._root, self._rng = root, rng

    def value(self, schema: Any, depth: int = 0) -> Any:
        rng = self._rng
        if not isinstance(schema, dict) or depth > 6:
            return rng.choice([None, 1, "a"])
        if "$ref" in schema:
            return self.value(self._root["$defs"][schema["$ref"][-1]], depth + 1)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema and rng.random() < 0.7:
                part = rng.choice(schema[word])
                rest = {k: v for k, v in schema.items() if k != word}
                return self.value({**rest, **part} if isinstance(part, dict) else rest, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kinds = schema.get("type") or self._kinds(schema)
        return self._of(kinds if isinstance(kinds, str) else rng.choice(kinds), schema, depth)

    def _kinds(self, schema: dict) -> list[str]:
        words = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array"}
        words |= {"prefixItems": "array", "minItems": "array", "minimum": "number", "maximum": "integer"}
        words |= {"pattern": "string", "minLength": "string", "maxLength": "string"}
        return [kind for word, kind in words.items() if word in schema] or KINDS

    def _of(self, kind: str, schema: dict, depth: int) -> Any:
        rng = self._rng
        if kind in ("integer", "number"):
            ends = [schema[word] for word in ranges if word in schema] or [rng.choice(INTEGERS + DECIMALS)]
            value = rng.choice(ends) + rng.choice([-1, 0, 0, 1, Decimal("0.5")])
            if "multipleOf" in schema and rng.random() < 0.8 and abs(value) < 10**20:
                value = (value // schema["multipleOf"] + rng.choice([0, 1])) * schema["multipleOf"]
            return int(value) if value == int(value) else value
        if kind == "array":
            prefix = schema.get("prefixItems", [])
            count = rng.choice([schema.get("minItems", 0), schema.get("maxItems", 2), rng.randint(0, 3)])
            items = [prefix[i] if i < len(prefix) else schema.get("items", True) for i in range(count)]
            return [self.value(item, depth + 1) for item in items]
        if kind == "object":
            named = schema.get("properties", {})
            names = {*schema.get("required", []), *(name for name in named if rng.random() < 0.6)}
            if rng.random() < 0.3:
                names.add(rng.choice(NAMES))
            other = schema.get("additionalProperties", True)
            return {name: self.value(named.get(name, other), depth + 1) for name in sorted(names)[:3]}
        return {"null": None, "boolean": rng.random() < 0.5}.get(kind, rng.choice(WORDS))


def pieces(text: str, vocab: dict[str, int]) -> list[int]:
    """A text as single bytes."""
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [vocab[character] for piece, _ in split for character in piece]


def disagreement(compiler, vocab, schema: dict, instances: list[Any]) -> str | None:
    """The first instance on which the grammar of ``schema`` and jsonschema differ. Raises RequestError when the schema
    is refused."""
    text = dumped(schema)
    pristine = compiler.compile(Grammar("json_schema", text))
    for instance in instances:
        try:
            written = [dumped(order) for order in orders(instance)]
        except TooMany:
            continue
        taken = []
        for form in written:
            matcher = pristine.copy()
            if matcher.accept(pieces(form, vocab)) and matcher.is_accepting():
                taken.append(form)
        right = is_valid(written[0], text)
        if right and not taken and '"oneOf"' not in text:
            return f"{text} refuses {written[0]}"
        if not right and taken:
            return f"{text} accepts {taken[0]}"
    return None


def fuzz(compiler, vocab, examples: int) -> dict[str, int]:
    """Compare random schemas. Returns how many were served and refused. Raises Disagreement."""
    counts = {"served": 0, "refused": 0}

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schemas, st.lists(values, max_size=2), st.randoms(use_true_random=False))
    def check(schema, given_instances, rng):
        guess = Guess(schema, rng)
        instances = [exact_json(dumped(guess.value(schema))) for _ in range(8)] + given_instances
        try:
            found = disagreement(compiler, vocab, schema, instances)
        except RequestError:
            counts["refused"] += 1
            return
        counts["served"] += 1
        if found is not None:
            raise Disagreement(found)

    check()
    return counts


class Disagreement(Exception):
    """A grammar and jsonschema differ."""


def test_random_schemas_mean_what_jsonschema_says(compiler, tok):
    counts = fuzz(compiler, tok[1], 250)
    assert counts["served"] > 100, counts


@pytest.mark.slow
def test_many_random_schemas_mean_what_jsonschema_says(compiler, tok):
    counts = fuzz(compiler, tok[1], 10_000)
    assert counts["served"] > 4000, counts


def without(*words: str):
    """A translation that forgets keywords."""

    def broken(schema: Any, param: str | None, dropped: list[str] | None = None) -> Any:
        return _cut(json_schema.served_schema(schema, param, dropped), words)

    return broken


def _cut(node: Any, words: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_cut(part, words) for part in node]
    return {k: _cut(v, words) for k, v in node.items() if k not in words} if isinstance(node, dict) else node


@pytest.mark.parametrize(
    "words",
    [("minimum",), ("additionalProperties",), ("required",), ("pattern",), ("prefixItems",), ("multipleOf",)],
    ids=" ".join,
)
def test_a_translation_that_forgets_a_keyword_is_seen(words, compiler, tok, monkeypatch):
    """Negative control, with schemas that use the keyword, so that it is seen soon."""
    monkeypatch.setattr(grammar_source, "served_schema", without(*words))
    rng, found = random.Random(1), 0
    shown = {
        "minimum": {"type": "integer", "minimum": 2},
        "additionalProperties": {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        "required": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        "pattern": {"type": "string", "pattern": "^a+$"},
        "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1},
        "multipleOf": {"type": "integer", "multipleOf": 3},
    }[words[0]]
    for schema in ({"anyOf": [shown]}, {"type": "array", "items": shown}, shown):
        guess = Guess(schema, rng)
        instances = [guess.value(schema) for _ in range(60)] + [
            {},
            {"b": 1},
            1,
            4,
            "b",
            ["a"],
            [1],
            [{}],
            ["b"],
            [["a"]],
        ]
        found += disagreement(compiler, tok[1], schema, instances) is not None
    assert found == 3


def test_numbers_that_the_exact_rules_round_are_seen(compiler, tok, monkeypatch):
    """Negative control: without rules of ours the library changes what has many digits."""
    monkeypatch.setattr(grammar_source, "needs_rules", lambda schema: False)
    schema, instances = {"enum": [BIG]}, [BIG, BIG - 21]
    assert disagreement(compiler, tok[1], schema, instances) is not None


def test_branches_that_are_not_kept_apart_are_seen(compiler, tok, monkeypatch):
    """Negative control: ``anyOf`` in place of ``oneOf``."""

    def loose(branches, parent, root):
        return list(branches)

    monkeypatch.setattr(json_schema, "exclusive", loose)
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert disagreement(compiler, tok[1], schema, [1, Decimal("0.5")]) is not None
