"""Numbers beyond 64-bit floats in schemas: exact in every output, or refused by name."""

from __future__ import annotations

import json
import random
from decimal import Decimal

import jsonschema
import pytest

from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import ids, random_walk
from tests.decoding.helpers import decode_bytes

BIG = 1234567890123456789
OBJECT = {"type": "object", "additionalProperties": False}
SCHEMAS = [
    {"const": BIG},
    {"enum": [BIG, -BIG, "x", {"a": [BIG, 1.5]}]},
    {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
    {"type": "integer", "minimum": 2**63 - 2, "exclusiveMaximum": 2**63 + 2},
    {"type": "number", "minimum": 10**30, "maximum": 10**30},
    {"type": "number", "minimum": -0.5, "maximum": 2**60},
    {"type": "array", "items": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 0.5}},
    {**OBJECT, "properties": {"id": {"enum": [BIG]}, "n": {"type": "null"}}, "required": ["id"]},
    {
        **OBJECT,
        "properties": {"o": {"type": ["integer", "null"], "maximum": -(10**20)}, "z": {"$ref": "#/$defs/q"}},
        "required": ["z"],
        "$defs": {"q": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"const": BIG}, "maxItems": 2}]}},
    },
]


@pytest.mark.parametrize("whitespace", ["fixed", "short"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_walks_are_exact(schema, whitespace, compiler, tok):
    pristine = compiler.compile(Grammar("json_schema", json.dumps(schema), whitespace=whitespace))
    finished = 0
    for salt in range(15):
        if (out := random_walk(pristine.copy(), tok, random.Random(salt))) is not None:
            jsonschema.validate(json.loads(decode_bytes(out, tok[1]), parse_float=Decimal), schema)
            finished += 1
    assert finished >= 3


def test_in_a_lark_grammar(compiler, tok):
    matcher = compiler.compile(Grammar("lark", 'start: "a" %json {"const": 1234567890123456789} "b"'))
    assert not matcher.copy().accept(ids("a1234567890123456768", tok[1]))
    assert matcher.accept(ids("a1234567890123456789b", tok[1])) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema, word",
    [
        ({"type": "integer", "minimum": 2**60, "multipleOf": 3}, "multipleOf"),
        ({"type": "number", "minimum": 1e-120, "maximum": 2**60}, "minimum"),
        ({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.25}, "multipleOf"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}], "type": "number"}, "type"),
        ({"$ref": "#/$defs/n", "maximum": 0.5, "$defs": {"n": {"exclusiveMinimum": 0}}}, "maximum"),
        ({"type": "object", "properties": {"a": {"const": BIG}}, "minProperties": 1}, "minProperties"),
        ({"allOf": [{"minimum": 2**60}, {"maximum": 2**61}]}, "allOf"),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**59}, "minimum"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema, word, compiler):
    with pytest.raises(RequestError, match=f"'{word}' at #.* cannot be kept exactly"):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_keys_that_stand_twice_are_refused(compiler):
    with pytest.raises(RequestError, match="stands twice"):
        compiler.compile(Grammar("json_schema", '{"type": "null", "type": "string"}'))


def test_what_allows_nothing_is_left_out_or_refused(compiler, tok):
    served = {
        '{"anyOf": [false, {"const": 1234567890123456789}]}': ["1234567890123456789"],
        '{"enum": [[], [1234567890123456789]]}': ["[]", "[1234567890123456789]"],
        '{"type": "array", "items": false, "minimum": 1234567890123456789}': ["[]"],
    }
    for schema, texts in served.items():
        pristine = compiler.compile(Grammar("json_schema", schema))
        for text in ["1", "[]", "[1]", "null", "1234567890123456789", "[1234567890123456789]"]:
            matcher = pristine.copy()
            assert (matcher.accept(ids(text, tok[1])) and matcher.is_accepting()) == (text in texts), (schema, text)
    for schema in (
        '{"type": [], "minimum": 1234567890123456789}',
        '{"anyOf": [], "minimum": 1234567890123456789}',
        '{"items": false, "type": "array", "minItems": 1, "minimum": 1234567890123456789}',
        '{"$ref": "#/$defs/a", "$defs": {"a": false, "b": {"const": 1234567890123456789}}}',
    ):
        with pytest.raises(RequestError):
            compiler.compile(Grammar("json_schema", schema))


def test_other_keys_may_hold_escapes(compiler, tok):
    schema = {"type": "object", "additionalProperties": {"const": BIG}, "properties": {'"': {"type": "null"}}}
    pristine = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    for key, value, right in (
        (r"\n\u0001", BIG, True),
        (r"\"", BIG, False),
        (r"\"", "null", True),
        (r"\u0022", BIG, False),
    ):
        matcher = pristine.copy()
        text = f'{{"{key}": {value}}}'
        assert (matcher.accept(ids(text, tok[1])) and matcher.is_accepting()) == right, text
