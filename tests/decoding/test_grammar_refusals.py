"""Bad grammars are refused with a reason, within bounds of time and memory, and good ones still compile."""

from __future__ import annotations

import json
import re

import pytest
import torch

from kvasir.decoding.grammar import GrammarCompiler
from kvasir.decoding.grammar_source import (
    _LARK_BOUND,
    _LARK_REGEX,
    _REGEX_ITEM,
    MAX_ENUM_VALUES,
    check_regex,
    check_schema,
)
from kvasir.decoding.sampler import Sampler
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import allowed, ids
from tests.decoding.helpers import EOS, decode_span, sequence

DEEP = "[" * 1000 + "]" * 1000
BAD = {
    "not json": ("json_schema", "{"),
    "empty": ("json_schema", ""),
    "a list": ("json_schema", "[]"),
    "a number": ("json_schema", "3"),
    "false": ("json_schema", "false"),
    "unsatisfiable": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'),
    "contradiction": ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
    "only itself": ("json_schema", '{"$ref": "#"}'),
    "only each other": (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    ),
    "remote": ("json_schema", '{"$ref": "http://127.0.0.1:9/schema.json"}'),
    "remote inside": ("json_schema", '{"properties": {"a": {"items": {"$ref": "file:///etc/passwd"}}}}'),
    "missing": ("json_schema", '{"$ref": "#/$defs/none"}'),
    "unknown type": ("json_schema", '{"type": "foo"}'),
    "unsupported": ("json_schema", '{"not": {}}'),
    "library options": ("json_schema", '{"x-guidance": {"lenient": true}}'),
    "deep json": ("json_schema", DEEP),
    "deeper json": ("json_schema", '{"a":' * 9000 + "1" + "}" * 9000),
    "deep schema": ("json_schema", json.dumps(eval('{"properties": {"a": ' * 40 + "{}" + "}}" * 40))),
    "enum": ("json_schema", json.dumps({"enum": list(range(MAX_ENUM_VALUES + 1))})),
    "enums together": (
        "json_schema",
        json.dumps({"anyOf": [{"enum": list(range(1001))}, {"enum": list(range(1001))}]}),
    ),
    "64 KiB": ("json_schema", json.dumps({"description": "x" * (64 << 10)})),
    "minItems": ("json_schema", '{"type": "array", "minItems": 1000000000}'),
    "maxItems": ("json_schema", '{"type": "array", "maxItems": 1e9}'),
    "minItems of many digits": ("json_schema", '{"type": "array", "minItems": 1%s}' % ("0" * 400)),
    "maxLength": ("json_schema", '{"type": "string", "maxLength": 100000}'),
    "pattern repeat": ("json_schema", '{"type": "string", "pattern": "a{1,1000000}"}'),
    "pattern lookahead": ("json_schema", '{"type": "string", "pattern": "a(?=b)"}'),
    "patternProperties": ("json_schema", '{"patternProperties": {"(a{500}){500}": {}}}'),
    "surrogate": ("json_schema", '{"const": "\ud800"}'),
    "escaped surrogate": ("json_schema", '{"const": "\\ud800"}'),
    "nan": ("json_schema", '{"const": NaN}'),
    "open group": ("regex", "(a"),
    "lookahead": ("regex", "a(?=b)"),
    "lookbehind": ("regex", "(?<=a)b"),
    "backreference": ("regex", r"(a)\1"),
    "repeat": ("regex", "a{1,1000000}"),
    "repeat of many digits": ("regex", "a{1%s}" % ("0" * 400)),
    "nested repeats": ("regex", "(a{1000}){1000}"),
    "three nested repeats": ("regex", "((a{50}){50}){50}"),
    "long regex": ("regex", "a" * 4097),
    "empty regex": ("regex", ""),
    "regex surrogate": ("regex", "\udfff"),
    "empty class": ("regex", r"[^\x00-\x{10ffff}]"),
    "choice of none": ("choice", "[]"),
    "choice of numbers": ("choice", "[1]"),
    "choice with nothing": ("choice", '[""]'),
    "choice object": ("choice", '{"a": 1}'),
    "choice surrogate": ("choice", '["\\ud800"]'),
    "too many choices": ("choice", json.dumps([f"c{i}" for i in range(MAX_ENUM_VALUES + 1)])),
    "lark empty": ("lark", ""),
    "lark nonsense": ("lark", "]]]"),
    "lark without start": ("lark", 'a: "b"'),
    "lark undefined": ("lark", "start: nothing"),
    "lark repeats": ("lark", "start: /(a{1000}){1000}/"),
    "lark bound": ("lark", 'start: "a"{1000000}'),
    "lark bound of many digits": ("lark", 'start: "a"{1%s}' % ("0" * 5000)),
    "lark schema": ("lark", 'start: %json {"type": "integer", "multipleOf": 99999989}'),
    "lark regex in a schema": (
        "lark",
        'start: %json // of a string\n {"type": "string", "pattern": "^((((a{99}){99}){99}){99})$"}',
    ),
    "lark half a schema": ("lark", 'start: %json {"type": "integer", "multipleOf": 9973'),
    "lark import": ("lark", "%import /etc/passwd\nstart: passwd"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_are_refused(name, compiler):
    kind, text = BAD[name]
    with pytest.raises(RequestError) as caught:
        compiler.compile(Grammar(kind, text))
    assert caught.value.status == 400 and caught.value.param and len(caught.value.message) < 2000


@pytest.mark.parametrize(
    "pattern, reason",
    [
        ("(", "unclosed group"),
        ("[z-a]", "invalid character class range, the start must be <= the end"),
        ("a{2,1}", "invalid repetition count range, the start must be <= the end"),
        (r"(?<n>a)\1", "backreferences are not supported"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        ("error: a\n(?x)\n(", "unclosed group"),
    ],
)
def test_a_bad_regex_is_refused_with_the_reason_in_one_line(pattern, reason, compiler):
    for kind, text in (("regex", pattern), ("json_schema", json.dumps({"type": "string", "pattern": pattern}))):
        with pytest.raises(RequestError) as caught:
            compiler.compile(Grammar(kind, text))
        told = f"the grammar cannot be used: regex parse error: {reason}"
        if kind == "json_schema" and caught.value.message != told:  # it is no pattern of ECMA 262
            told = f"the pattern {pattern!r} cannot be used: "
            assert caught.value.message.startswith(told) and "\n" not in caught.value.message
        else:
            assert caught.value.message == told
    with pytest.raises(
        RequestError, match=r"^the grammar cannot be used: at 2\(4\): regex parse error: unclosed group$"
    ):
        compiler.compile(Grammar("lark", "start: a\na: /x(/"))


def test_a_good_grammar_compiles_after_all_of_them(compiler, tok):
    for kind, text in BAD.values():
        with pytest.raises(RequestError):
            compiler.compile(Grammar(kind, text))
    assert allowed(compiler.compile(Grammar("regex", "a")), tok[2] + 9) == ids("a", tok[1])


HARMLESS = [
    "a{10000}",
    r"[a{9999}\]{77777}]",
    r"\{99999\}",
    "(?:ab){0,400}",
    ".{0,10000}\n",
    "((a+)+)+$",
    "x{,99999}",
    r"\x{20000}\u{20000}\U{20000}[\x{20000}]",
    "{12}",
]


@pytest.mark.parametrize("pattern", HARMLESS)
def test_harmless_repeats_pass_the_size_check(pattern):
    check_regex(pattern)


@pytest.mark.parametrize(
    "pattern, text",
    [
        (_REGEX_ITEM, "[" * 99),
        (_REGEX_ITEM, "[a" * 99 + "\\"),
        (_LARK_BOUND, "{" * 99),
        (_LARK_BOUND, "{~" * 99),
        (_LARK_REGEX, "/\\" * 99),
        (_LARK_REGEX, "/" + "\\/" * 99),
    ],
)
def test_an_end_that_is_missing_is_looked_for_once(pattern, text):
    assert len(re.findall(pattern, text, re.DOTALL)) <= 2


@pytest.mark.parametrize(
    "text",
    [
        "start: /a/ | /(a{1000}){1000}/",
        'start: "a" // {\n  | "b"{1000000}',
        'start: "a"{1,2}{ ~1000000',
        "start: /a\\/(b{999}){999}/",
    ],
)
def test_bounds_and_regexes_are_found_beside_what_is_not_closed(text, compiler):
    with pytest.raises(RequestError, match="above the limit|larger than"):
        compiler.compile(Grammar("lark", text))


@pytest.mark.parametrize(
    "numbers, kind",
    [
        ([99999989], "properties"),
        ([0.1000003], "properties"),
        ([-1e-3, 3e5 + 1], "properties"),
        ([1 << 70], "properties"),
        ([9973 + i for i in range(11)], "properties"),
        ([97, 89, 83], "allOf"),
        ([97, 89, 83], "anyOf"),
    ],
)
def test_multiples_are_bounded(numbers, kind):
    """The limit prevents seconds and gigabytes in a thread that nobody can end: 9999991 took more than a minute and 3
    GB."""
    schemas = [{"type": "number", "multipleOf": number} for number in numbers]
    given = {f"p{i}": schema for i, schema in enumerate(schemas)} if kind == "properties" else schemas
    with pytest.raises(RequestError, match="multipleOf.* above the limit"):
        check_schema({kind: given})
    check_schema({"const": {"multipleOf": float("inf")}})


@pytest.mark.parametrize("number", [1, 0.01, 1000000, 2.5, 0, 1e300, 9973])
def test_multiples_that_people_ask_for_pass(number):
    check_schema({"allOf": [{"type": "number", "multipleOf": number}] * 5})


def test_a_schema_in_a_lark_grammar_is_no_repeat(compiler, tok):
    matcher = compiler.compile(
        Grammar("lark", 'start: "a" %json {"type": "integer", "minimum": 20000, "maximum": 20001} "b"{1,2}')
    ).copy()
    assert matcher.accept(ids("a20001bb", tok[1])) and matcher.is_accepting()
    with pytest.raises(RequestError, match="above the limit"):
        compiler.compile(Grammar("lark", 'start: "a" %json {"type": "integer"} "b"{1,20000}'))
    many = "".join(f'| %json {{"type": "integer", "multipleOf": {9973 + i}}}' for i in range(11))
    for text, why in (
        (many, "multipleOf.* above"),
        ('| %json {"x-guidance": {"whitespace_pattern": "((a{999}){999})"}}', "larger than"),
    ):
        with pytest.raises(RequestError, match=why):
            compiler.compile(Grammar("lark", 'start: "a"' + text))


def test_property_names_may_look_like_keywords(compiler):
    names = {name: {"type": "null"} for name in ("$ref", "enum", "pattern", "minItems", "patternProperties")}
    compiler.compile(Grammar("json_schema", json.dumps({"type": "object", "properties": names})))


def test_left_recursion_is_fine(compiler, tok):
    matcher = compiler.compile(Grammar("lark", 'start: start "a" | "b"')).copy()
    assert matcher.accept(ids("baaa", tok[1])) and matcher.is_accepting()


def test_whitespace_is_bounded(compiler, tok):
    matcher = compiler.compile(Grammar("json_object")).copy()
    assert matcher.accept(ids("{", tok[1]))
    assert matcher.try_accept(ids(" " * 500, tok[1])) < 100


def test_bad_tokenizers_are_a_start_up_error(tmp_path):
    with pytest.raises(ConfigError, match="missing.json"):
        GrammarCompiler(tmp_path / "missing.json", 10, (1,))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        GrammarCompiler(tmp_path / "tokenizer.json", 10, (1,))


def test_without_eos_there_is_no_structured_output(tok):
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(tok[0], tok[2], ()).compile(Grammar("regex", "a"))


def test_compiling_in_threads(compiler, tok):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: compiler.compile(Grammar("regex", f"a{{{n + 1}}}b")), range(20)))
    for n, matcher in enumerate(found):
        assert matcher.copy().accept([*ids("a" * (n + 1) + "b", tok[1]), EOS])


def test_the_mask_reaches_the_sampler_at_every_width(tok):
    """Vocabulary sizes around a word of the bit set."""
    for padding in (0, 1, 31, 32, 33):
        size = tok[2] + padding
        matcher = GrammarCompiler(tok[0], size, (EOS,)).compile(Grammar("choice", '["yes"]'))
        seq = sequence(0, matcher=matcher, grammar=Grammar("choice", '["yes"]'), temperature=0)
        sampler = Sampler(size, tok[2], 1, "cpu", (EOS,))
        sampler.open(seq)
        assert sampler.sample(torch.zeros(1, size), sampler.pack([decode_span(seq)])).read()[0].tokens == ids(
            "y", tok[1]
        )
