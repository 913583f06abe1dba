"""What becomes of the keywords of JSON Schema, of whitespace, and of grammars in EBNF."""

from __future__ import annotations

import json

import llguidance
import pytest

from kvasir.decoding.grammar import MAX_TEXT_BYTES
from kvasir.decoding.grammar_source import check_schema
from kvasir.decoding.json_schema import FORMATS, UNSERVED, served_schema
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import ids
from tests.decoding.test_schema_meaning import pieces

# A value of each keyword that constrains something, with what has to stand next to it.
UNSERVED_CASES = {
    "uniqueItems": {"uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "then": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "else": {"if": {"type": "string"}, "else": {"minimum": 1}},
    "propertyNames": {"propertyNames": {"pattern": "^a"}},
    "contains": {"contains": {"type": "integer"}},
    "minContains": {"contains": {"type": "integer"}, "minContains": 2},
    "maxContains": {"contains": {"type": "integer"}, "maxContains": 2},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
}
NEUTRAL = [
    {"uniqueItems": False},
    {"not": False},
    {"if": {"type": "string"}},
    {"then": {"minLength": 1}, "else": False},
    {"propertyNames": {"type": "string"}},
    {"contains": {"type": "integer"}, "minContains": 0},
    {"minContains": 3, "maxContains": 4},
    {"dependentRequired": {}, "unevaluatedProperties": True, "unevaluatedItems": {}},
    {"format": "color"},
    {"format": 7},
]


def test_the_cases_are_complete():
    assert set(UNSERVED_CASES) == UNSERVED


@pytest.mark.parametrize("keyword", UNSERVED_CASES)
def test_a_keyword_that_no_grammar_holds_is_refused_with_its_path_or_dropped(keyword, compiler):
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, UNSERVED_CASES[keyword]]}}}
    before = json.dumps(schema)
    with pytest.raises(RequestError, match=r"at #/properties/a~1b/anyOf/1/") as caught:
        served_schema(schema, "response_format")
    assert caught.value.status == 400 and caught.value.param == "response_format"
    with pytest.raises(RequestError, match="is not supported in a schema"):
        compiler.compile(Grammar("json_schema", before))
    dropped: list[str] = []
    served = served_schema(schema, None, dropped)
    assert f"#/properties/a~1b/anyOf/1/{keyword}" in dropped and json.dumps(schema) == before
    compiler.compile(Grammar("json_schema", json.dumps(served)))


@pytest.mark.parametrize("schema", NEUTRAL, ids=json.dumps)
def test_what_changes_nothing_is_left_out(schema, compiler):
    assert served_schema(schema, "x") == {}
    compiler.compile(Grammar("json_schema", json.dumps({"properties": {"a": schema}})))


def test_names_that_look_like_keywords_are_kept():
    schema = {"properties": {"not": {"const": {"not": 1}}, "format": {"enum": [{"uniqueItems": True}]}}}
    assert served_schema(schema, "x") == schema


def test_the_formats_are_the_library_s():
    """A format that the library comes to know should constrain, one that it forgets must not be passed on."""
    tried = [*FORMATS, "idn-email", "idn-hostname", "uri-reference", "iri", "json-pointer", "regex", "color"]
    for name in tried:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        failed, _ = llguidance.LLMatcher.validate_grammar_with_warnings(source)
        assert failed == (name not in FORMATS), name


SPACED = {
    '{"a": [1, 2]}': ("short", "any", "fixed"),
    '{"a":[1,2]}': ("short", "any"),
    '{ "a" : [ 1 , 2 ] }': ("short", "any"),
    '{\n  "a": [\n    1,\n    2\n  ]\n}': ("short", "any"),
    '{\n\t"a": [1]\n}': ("short", "any"),
    '{  "a": [1]}': ("any",),
    '{\n\n"a": [1]}': ("any",),
    '{ \n"a": [1]}': ("any",),
    "{" + " " * 41 + '"a": [1]}': (),
}


@pytest.mark.parametrize("whitespace", ["short", "any", "fixed"])
@pytest.mark.parametrize("text", SPACED, ids=repr)
def test_whitespace(text, whitespace, compiler, tok):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema), whitespace=whitespace))
    vocab = {**tok[1], "\n": tok[1]["Ċ"], "\t": tok[1]["ĉ"]}
    right = matcher.accept(ids(text, vocab)) and matcher.is_accepting()
    assert right == (whitespace in SPACED[text])


EBNF = 'root ::= "SELECT " column " FROM " [a-z]+ (" LIMIT " [0-9]{1,3})? # a comment\ncolumn ::= "*" | [a-z_]+'


@pytest.mark.parametrize(
    "text, right, wrong",
    [
        (r'root ::= "\u0041bcd"', "Abcd", "\u41bcd"),
        (r'root ::= "\U00000041b"', "Ab", "\u041b"),
        (r"root ::= [\u00e9-\u00ff]", "\u00e9", "u"),
        (r'root ::= "\u0022\u005c\u000a"', '"\\\n', "n"),
        (r'root ::= "\\u0041"', r"\u0041", "A"),
    ],
)
def test_escapes_in_ebnf(text, right, wrong, compiler, tok):
    for answer, valid in ((right, True), (wrong, False)):
        matcher = compiler.compile(Grammar("ebnf", text))
        assert (matcher.accept(pieces(answer, tok[1])) and matcher.is_accepting()) == valid, answer


@pytest.mark.parametrize("text", ["\\ud800", "\\UFFFFFFFF"])
def test_escapes_that_name_no_character(text, compiler):
    with pytest.raises(RequestError, match="is no character"):
        compiler.compile(Grammar("ebnf", f'root ::= "{text}"'))


@pytest.mark.parametrize("text", ["start: a\na: a", "start: T\nT: /a/ & /b/"])
def test_a_grammar_without_output_says_so(text, compiler):
    with pytest.raises(RequestError, match="it allows no output at all"):
        compiler.compile(Grammar("lark", text))


def test_an_empty_pattern_matches_every_string(compiler, tok):
    for schema, text in (({"type": "string", "pattern": ""}, '"ab"'), ({"patternProperties": {"": {}}}, '{"a": 1}')):
        matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
        assert matcher.accept(ids(text, tok[1])) and matcher.is_accepting()


def test_ebnf(compiler, tok):
    grammar = Grammar("ebnf", EBNF)
    for text, right in {
        "SELECT * FROM table": True,
        "SELECT a_b FROM t LIMIT 10": True,
        "SELECT * FROM": False,
        "SELECT * FROM t LIMIT 1000": False,
        "DROP": False,
    }.items():
        matcher = compiler.compile(grammar)
        assert (matcher.accept(ids(text, tok[1])) and matcher.is_accepting()) == right, text


@pytest.mark.parametrize(
    "text",
    [
        "root ::= nothing",
        'a ::= "b"',
        "root ::= (",
        "root ::= " + "(" * 4000 + '"a"' + ")" * 4000,
        'root ::= "a"{1000000}',
        "\n".join(f'r{i} ::= "a"' for i in range(501)),
        "root ::= " + '"a" ' * 5000,
        "",
    ],
    ids=lambda text: text[:20],
)
def test_bad_ebnf_is_refused(text, compiler):
    with pytest.raises(RequestError) as caught:
        compiler.compile(Grammar("ebnf", text))
    assert caught.value.status == 400 and len(caught.value.message) < 2000


@pytest.mark.parametrize(
    "schema, what",
    [
        ({"minProperties": 2}, "'minProperties' at #/minProperties cannot be kept exactly"),
        ({"required": ["a"], "minProperties": 3}, "'minProperties'"),
        ({"properties": {"a\n": {}}}, r"'properties' at #/properties/a.n cannot be kept exactly"),
        ({"properties": {"a": {"$id": "x", "items": {"$ref": "#/$defs/a"}}}}, r"'\$id' at #/properties/a/\$id"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}}, r"'\$ref': '#/\$defs/a' leads back to itself"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, r"'\$ref': .* leads back to itself"),
        ({"items": {"allOf": [{"$ref": "#/items"}]}}, r"'\$ref': .* leads back to itself"),
    ],
)
def test_what_a_text_could_get_around_is_refused_by_name(schema, what, compiler):
    with pytest.raises(RequestError, match=what):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"required": ["a"], "minProperties": 2},
        {"properties": {"a\n": {}}, "additionalProperties": False},
        {"properties": {"a": {"items": {"$ref": "#"}}}},
        {"$defs": {"a": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/a"}}]}}, "$ref": "#/$defs/a"},
    ],
    ids=json.dumps,
)
def test_what_is_near_to_that_is_served(schema, compiler):
    compiler.compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("word", ["$id", "id"])
@pytest.mark.parametrize("name", ["", "#", "x", "http://example.com/"])
def test_the_name_of_a_part_does_not_replace_the_whole(word, name, compiler, tok):
    """The library took a part whose name is empty for the schema."""
    schema = {"type": "object", "$id": "y", "properties": {"a": {"type": "number", word: name}}}
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert not matcher.copy().accept(ids("3", tok[1])) and matcher.accept(ids('{"a": 3}', tok[1]))


@pytest.mark.parametrize("multiple", [10**400, -(10**400), 10**400 + 7])
def test_a_multiple_of_any_size_is_refused_by_name(multiple, compiler):
    """The check of sizes took it for a float."""
    check_schema({"multipleOf": multiple})
    with pytest.raises(RequestError, match="'multipleOf' at # cannot be kept exactly"):
        compiler.compile(Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": multiple})))


@pytest.mark.parametrize(
    "name, kept",
    [
        ("https://example.com/schemas/mine", None),
        ("http://json-schema.org/schema#", None),
        ("https://spec.openapis.org/oas/3.1/dialect/base", None),
        ("", None),
        (5, None),
        ("https://json-schema.org/draft/2020-12/schema#", "https://json-schema.org/draft/2020-12/schema"),
        ("https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema#"),
        ("http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-04/schema#"),
    ],
)
def test_an_unknown_dialect_is_an_annotation(name, kept, compiler, tok):
    own = {"$schema": name, "type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1}
    assert served_schema(own, "x").get("$schema") == kept
    matcher = compiler.compile(Grammar("json_schema", json.dumps({"$schema": name, "type": "string"})))
    assert matcher.accept(ids('"a"', tok[1]))
    inner = {"type": "object", "properties": {"$schema": {"const": "x"}, "a": {"$schema": name, "type": "string"}}}
    compiler.compile(Grammar("json_schema", json.dumps(inner)))
    if kept is None:
        matcher = compiler.compile(Grammar("json_schema", json.dumps(own)))
        assert matcher.copy().accept(ids("[1]", tok[1])) and not matcher.copy().accept(ids("[2", tok[1]))


def test_annotations_do_not_count(compiler, tok):
    long = "x" * (MAX_TEXT_BYTES + 1)
    notes = {
        "title": long,
        "description": long,
        "examples": [long],
        "example": {"pattern": "("},
        "$comment": long,
        "default": {"not": {}},
        "deprecated": True,
        "readOnly": False,
        "writeOnly": False,
    }
    names = {name: {"const": 1} for name in notes}
    plain = {"type": "object", "properties": names, "required": ["title"], "$defs": {"description": {"const": 2}}}
    noted = {
        **plain,
        **notes,
        "properties": {name: {**schema, **notes} for name, schema in names.items()},
        "$defs": {"description": {"const": 2, **notes}},
    }
    served = served_schema(noted, "x")
    assert served == plain == served_schema(plain, "x"), "what is named like an annotation stays"
    assert served_schema({"const": {"title": "x"}, "enum": [{"description": "x"}], "title": "x"}, "x") == {
        "const": {"title": "x"},
        "enum": [{"description": "x"}],
    }
    matcher = compiler.compile(Grammar("json_schema", json.dumps(served)))
    assert matcher.copy().accept(ids('{"title": 1}', tok[1])) and not matcher.copy().accept(ids('{"title": 2', tok[1]))


def test_a_reference_into_an_annotation_finds_its_schema(compiler, tok):
    schema = {"examples": [{"const": 1}], "title": "t", "$ref": "#/examples/0", "default": 5}
    assert served_schema(schema, "x") == {"examples": [{"const": 1}], "$ref": "#/examples/0"}
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert matcher.copy().accept(ids("1", tok[1])) and not matcher.copy().accept(ids("2", tok[1]))
