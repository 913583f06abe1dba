"""``oneOf``: every output satisfies exactly one branch, or the schema is refused by name."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from kvasir.decoding.json_schema import served_schema
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import random_walk
from tests.decoding.helpers import decode_bytes


def kind(name, **more):
    return {"type": "object", "properties": {name: {"type": "boolean"}, **more}, "required": [name]}


SERVED = [
    {"oneOf": [kind("a"), kind("b")]},
    {"oneOf": [kind("a"), kind("b"), kind("c", a={"type": "null"})]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b")}},
    {"oneOf": [kind("a", k={"const": 1}), kind("a", k={"const": 2})]},
    {"oneOf": [{"const": 1}, {"const": "1"}, {"type": "null"}]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{**kind("a", b={}), "additionalProperties": False}, {**kind("a", c={}), "additionalProperties": False}]},
]
REFUSED = [
    {"oneOf": [kind("a"), kind("a")]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
]


@pytest.mark.parametrize("schema", SERVED, ids=json.dumps)
def test_outputs_satisfy_one_branch(schema, compiler, tok):
    pristine = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    finished = 0
    for salt in range(25):
        if (out := random_walk(pristine.copy(), tok, random.Random(salt))) is not None:
            jsonschema.validate(json.loads(decode_bytes(out, tok[1])), schema)
            finished += 1
    assert finished >= 3


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_branches_that_cannot_be_kept_apart_are_refused_by_name(schema):
    with pytest.raises(RequestError, match="'oneOf' at #.*branch 0 and branch 1"):
        served_schema(schema, "tools")
    dropped: list[str] = []
    served_schema(schema, None, dropped)
    assert dropped == ["#/oneOf"]
