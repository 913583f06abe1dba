"""Patterns of schemas mean what ECMA 262 says, whatever the grammar library's own dialect makes of them."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest

from kvasir.decoding.ecma_regex import library_patterns, library_regex
from kvasir.decoding.grammar_source import schema_source
from kvasir.decoding.json_schema import served_schema
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.test_schema_meaning import pieces

# Pattern, texts that match, and texts that do not; by ECMA 262 with the flag u where that allows it, and without it
# elsewhere. The first ones are those on which Python's dialect agrees.
AGREED = [
    (r"^[a-z&&[^b]]$", ["a]", "&]", "[]", "^]"], ["a", "b", "c", "]"]),
    (r"^[a&&b]$", ["a", "&", "b"], ["c", "&&"]),
    (r"^[a~~b]+$", ["a~b"], ["c"]),
    (r"^[+--]$", ["+", ",", "-"], ["."]),
    (r"^[[:alpha:]]$", ["a]", ":]", "[]"], ["a", "b]"]),
    (r"^[a[b]c]$", ["ac]", "[c]", "bc]"], ["a", "b", "c"]),
    (r"^[\w.-]+$", ["a-b.c_1"], ["a b", "é"]),
    (r"^\d+$", ["012"], ["٣", "a", ""]),
    (r"^\D$", ["٣", "a"], ["5"]),
    (r"^[^\d]$", ["٣", "a"], ["5"]),
    (r"^\w+$", ["aZ_9"], ["é", "а", "-"]),
    (r"^[\W]$", ["é", "-"], ["_", "a"]),
    (r"^[^\W\d]$", ["a", "_"], ["5", "-"]),
    (r"^\x41\u00e9\t$", ["Aé\t"], ["A", "41"]),
    (r"^a{2,3}b{$", ["aab{", "aaab{"], ["ab{", "aab"]),
    (r"^}]$", ["}]"], ["}", "]"]),
    (r"^\[\]\{\}\.\-\/\<\#\ \_$", ["[]{}.-/<# _"], ["x"]),
    (r"^(?:a|(b))*?c$", ["c", "abac"], ["ab"]),
    (r"b", ["b", "abc", "\nb\n"], ["a", ""]),
    (r"^(?i:ab)$", ["ab", "AB", "aB"], ["a"]),
    (r"^[\b]\0$", ["\b\0"], ["b0"]),
    (r"^[^a]$", ["b", "\n", "😀"], ["a", ""]),
]
OTHERS = [
    (r"^[\w-.]$", ["a", "-", "."], [",", "/"]),
    (r"^\u{20000}\u{1f600}$", ["\U00020000😀"], ["😀"]),
    (r"^.$", ["a", "\x85", "\x0b", "😀"], ["\n", "\r", "\u2028", "\u2029"]),
    (r"^[^]$", ["a", "\n", "\r", "]"], ["", "aa"]),
    (r"^[^]]$", ["a]", "\n]"], ["a", "]"]),
    (r"^\s$", [" ", "\t", "\n", "\u00a0", "\ufeff", "\u2029", "\u3000"], ["\x85", "\x1c", "a"]),
    (r"^\S$", ["\x85", "a"], ["\ufeff", " "]),
    (r"^[\s\S]$", ["\ufeff", "a", "\n"], [""]),
    (r"^\uD83D\uDE00\u{1F601}$", ["😀😁"], ["😀"]),
    (r"^[\uD83D\uDE00-\u{1F602}]$", ["😀", "😁", "😂"], ["😃"]),
    (r"^\cJ[\cA]$", ["\n\x01"], ["cJcA"]),
    (r"^\p{Lu}\P{L}[\p{Script=Greek}]$", ["É1α"], ["é1α", "ÉaA"]),
    (r"^(?<year>\d{4})$", ["2024"], ["24"]),
]


def accepts(compiler, tok, schema: dict):
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))

    def accept(value) -> bool:
        one = matcher.copy()
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return bool(one.accept(pieces(text, tok[1])) and one.is_accepting())

    return accept


@pytest.mark.parametrize("pattern, right, wrong", [*AGREED, *OTHERS])
def test_a_pattern_means_what_ecma_262_says(pattern, right, wrong, compiler, tok):
    accept = accepts(compiler, tok, {"type": "string", "pattern": pattern})
    assert [text for text in right if not accept(text)] == [] and [text for text in wrong if accept(text)] == []


@pytest.mark.parametrize("pattern, right, wrong", AGREED)
def test_python_reads_these_examples_alike(pattern, right, wrong):
    """The judge of the examples is no code of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reads = re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern).replace(r"\<", "<").replace(r"\_", "_"), re.ASCII)
    assert all(map(reads.search, right)) and not any(map(reads.search, wrong))


def test_random_classes_mean_what_python_reads(compiler, tok):
    """Python's classes differ from ECMA's only where a bracket comes first."""
    rng = random.Random(5)
    atoms = ["a", "c", "&", "&&", "~~", "[", "^", r"\-", r"\]", r"\d", r"\W", "a-c", "&-~", "[:", ".", "|", "(", "{1}"]
    for _ in range(60):
        body = "".join(rng.choice(atoms) for _ in range(rng.randint(1, 4)))
        pattern = f"^[{rng.choice(['', '^'])}x{body}]{rng.choice(['', '+', ']', '{2}'])}$"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judge = re.compile(pattern[:-1] + r"\Z", re.ASCII)
        accept = accepts(compiler, tok, {"type": "string", "pattern": pattern})
        for text in ("a", "b", "c", "&", "~", "[", "]", "^", "-", "5", "é", ":", "x]", "a]", "&&", "{", "1", "xx"):
            assert accept(text) == bool(judge.match(text)), (pattern, text)


@pytest.mark.parametrize(
    "pattern, why",
    [
        ("[]", "matches nothing"),
        ("a**", "nothing to repeat"),
        ("(*a)", "nothing to repeat"),
        ("a|+", "nothing to repeat"),
        (r"\Aa\Z", r"\A' is no escape of ECMA 262; the ends of a text are ^ and $"),
        (r"\x{61}", r"'\x' is no escape"),
        (r"\a", r"'\a' is no escape"),
        (r"\ud800", "is no character"),
        (r"\u{110000}", "is no character"),
        (r"(a)\1", "backreference"),
        (r"a\b", "word boundary"),
        (r"[\1]", "backreference"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        ("(?s)a", "of the flags, 'i' is served"),
        ("a{,3}", "write {0,n}"),
        ("[b-a]", "out of order"),
        ("[a", "not closed"),
        ("a\\", "ends with a backslash"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(pattern, why, compiler):
    for schema in ({"type": "string", "pattern": pattern}, {"patternProperties": {pattern: {}}}):
        with pytest.raises(RequestError, match=re.escape(why)) as e:
            compiler.compile(Grammar("json_schema", json.dumps(schema)))
        assert e.value.status == 400 and repr(pattern) in e.value.message


def test_names_of_properties_follow_the_patterns(compiler, tok):
    schema = {
        "type": "object",
        "patternProperties": {r"^[a&&b]$": {"const": 1}, r"^\d$": {"minimum": 1}, "^[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    }
    accept = accepts(compiler, tok, schema)
    assert accept({"a": 1}) and accept({"&": 1}) and accept({"5": 2})
    assert not accept({"c": 1}) and not accept({"5": 0}) and not accept({"5": 1.5}) and not accept({"٣": 2})


def test_patterns_are_found_where_they_are_keywords():
    one, two = {"pattern": r"\d"}, {"pattern": "[0-9]"}
    found = library_patterns(
        {
            "properties": {"pattern": one, "const": one, "patternProperties": {"type": "string"}},
            "$defs": {"enum": one},
            "anyOf": [one, {"items": [one]}],
            "components": {"schemas": {"x": one}},
            "const": one,
            "enum": [one],
            "default": one,
        },
        None,
    )
    assert found == {
        "properties": {"pattern": two, "const": two, "patternProperties": {"type": "string"}},
        "$defs": {"enum": two},
        "anyOf": [two, {"items": [two]}],
        "components": {"schemas": {"x": two}},
        "const": one,
        "enum": [one],
        "default": one,
    }


def test_patterns_within_exact_rules_and_lark_are_translated(compiler, tok):
    exact = {
        "type": "object",
        "properties": {"n": {"const": 12345678901234567890123}, "s": {"type": "string", "pattern": r"^[a&&b]\d$"}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    accept = accepts(compiler, tok, exact)
    assert accept({"n": 12345678901234567890123, "s": "&1"}) and not accept({"n": 12345678901234567890123, "s": "c1"})
    text = "start: %json " + json.dumps({"type": "string", "pattern": r"^[a&&b]\d$"})
    matcher = compiler.compile(Grammar("lark", text))
    assert matcher.copy().accept(pieces('"&1"', tok[1])) and not matcher.copy().accept(pieces('"c1"', tok[1]))


def test_a_class_hides_no_repeats():
    """The size is that of the regex which the library sees: ``[^]`` ends at its bracket."""
    with pytest.raises(RequestError, match="larger than|above the limit"):
        schema_source({"type": "string", "pattern": "[^](((a{99}){99}){99})]"}, "x")


@pytest.mark.parametrize("pattern", [r"^.{1,2000}$", r"^\S+(\s\S+){0,50}$", r"^[\w.%+-]+@[\w.-]+\.[A-Za-z]{2,63}$"])
def test_usual_patterns_stay_cheap(pattern, compiler, tok):
    accept = accepts(compiler, tok, {"type": "string", "pattern": pattern})
    assert accept("a@b.org") and not accept("")


def test_served_schemas_keep_the_client_s_patterns():
    """The server's process serves a schema, the compiler does again; patterns are translated once, at the end."""
    schema = {"type": "string", "pattern": r"^\uD83D\uDE00$"}
    assert served_schema(served_schema(schema, "x"), "x") == schema
    assert library_regex(schema["pattern"]) != schema["pattern"]
