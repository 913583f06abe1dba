"""Grammars: every walk under the mask is valid, EOS is allowed only in accepting states, bad grammars are refused, and
failures stay with one request.
"""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest
import torch

from kvasir.decoding.grammar import (
    _LARK_BOUND,
    _LARK_REGEX,
    _REGEX_ITEM,
    MAX_ENUM_VALUES,
    GrammarCompiler,
    check_regex,
    check_schema,
)
from kvasir.decoding.sampler import Sampler
from kvasir.errors import ConfigError, RequestError
from kvasir.types import Grammar
from tests.decoding.helpers import EOS, TableModel, byte_tokenizer, decode, decode_bytes, decode_span, sequence, step

EOT = 2


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tok):
    return GrammarCompiler(tok[0], tok[2] + 9, (EOS, EOT))  # nine padding ids


def allowed(matcher, size):
    mask = np.empty(-(-size // 32), np.int32)
    assert matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids(text, vocab):
    return [vocab[c] for c in text.replace(" ", "Ġ")]


def random_walk(matcher, tok, rng, most=400):
    """Return token ids up to EOS, or None if the walk gets longer than ``most``. It prefers to end, so that walks are
    short."""
    _, vocab, size = tok
    quote = [vocab['"'], vocab["}"], vocab["]"]]
    out = []
    while len(out) < most:
        choices = allowed(matcher, size + 9)
        assert choices and max(choices) < size, "an id outside the tokenizer is allowed, or nothing is"
        ends = [c for c in choices if c in (EOS, EOT)]
        assert bool(ends) == matcher.is_accepting() or matcher.is_stopped()
        if ends and rng.random() < 0.5:
            assert matcher.accept(ends[:1]) and matcher.is_stopped()
            assert allowed(matcher, size + 9) == [EOS, EOT]
            return out
        closing = [c for c in choices if c in quote]
        token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        if token in (EOS, EOT):
            continue
        assert matcher.accept([token])
        out.append(token)
    return None


SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"type": "string", "pattern": "^[a-f]{2,5}$"},
    {
        "anyOf": [
            {"type": "integer"},
            {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": False},
        ]
    },
    {
        "$defs": {
            "list": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/list",
    },
    {"type": "number", "minimum": -1.5, "maximum": 2.5},
    {"const": 'x/y"z'},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "properties": {"kind": {"const": "π"}},
        "required": ["kind"],
        "additionalProperties": {"type": "integer"},
    },
    {},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_random_walks_give_valid_json(schema, compiler, tok):
    pristine = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    finished = 0
    for salt in range(12):
        out = random_walk(pristine.copy(), tok, random.Random(salt))
        if out is not None:
            value = json.loads(decode_bytes(out, tok[1]))
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            finished += 1
    assert finished >= 3


def test_json_object(compiler, tok):
    pristine = compiler.compile(Grammar("json_object"))
    found = [out for salt in range(20) if (out := random_walk(pristine.copy(), tok, random.Random(salt))) is not None]
    assert found and all(isinstance(json.loads(decode_bytes(out, tok[1])), dict) for out in found)


REGEXES = [
    r"[a-c]{3,6}",
    r"(yes|no)(, (yes|no)){0,3}",
    r"\d{1,3}\.\d+",
    r"^abc$",
    "π+e?",
    r"a/b\"c",
    r"[^a]{2}x",
    "(a|ab)(c|bcd)",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes(pattern, compiler, tok):
    pristine = compiler.compile(Grammar("regex", pattern))
    for salt in range(12):
        out = random_walk(pristine.copy(), tok, random.Random(salt), most=60)
        assert out is None or re.fullmatch(pattern, decode_bytes(out, tok[1]).decode())


CHOICES = ["yes", "no", "no way", "a/b", 'quo"te', "back\\slash", "new\nline", "a.b*c", "ü€", "{x}", " lead"]


def test_choices(compiler, tok):
    pristine = compiler.compile(Grammar("choice", json.dumps(CHOICES)))
    found = {
        decode_bytes(random_walk(pristine.copy(), tok, random.Random(salt)), tok[1]).decode() for salt in range(200)
    }
    assert found == set(CHOICES)


def test_lark(compiler, tok):
    pristine = compiler.compile(Grammar("lark", 'start: "(" start ")" | NAME\nNAME: /[xyz]{1,2}/'))
    for salt in range(10):
        out = random_walk(pristine.copy(), tok, random.Random(salt))
        assert out is None or re.fullmatch(r"(\(*)([xyz]{1,2})(\)*)", decode_bytes(out, tok[1]).decode())


# ------------------------------------------------------------------------------------------------- the matcher's state


def test_accept_rollback_and_copy_agree_with_a_fresh_matcher(compiler, tok):
    """Any order of moves leads to the state that replaying the remaining tokens gives, across EOS and the free part."""
    mark = ids("ab", tok[1])
    pristine = compiler.compile(Grammar("regex", "[a-c]+(!|\\?x)", after=tuple(mark)))
    rng = random.Random(0)
    matcher, held = pristine.copy(), []
    for _ in range(300):
        move = rng.random()
        if move < 0.6:
            token = rng.choice([*ids("abc!?xz", tok[1]), EOS, EOT, *mark])
            legal = token in allowed(matcher, tok[2] + 9)
            assert matcher.accept([token]) == legal
            held += [token] if legal else []
        elif move < 0.85:
            n = rng.randrange(len(held) + 1) if rng.random() < 0.2 else min(len(held), rng.randrange(3))
            matcher.rollback(n)
            held = held[: len(held) - n]
        else:
            matcher = matcher.copy()
        fresh = pristine.copy()
        assert fresh.accept(held)
        assert allowed(fresh, tok[2] + 9) == allowed(matcher, tok[2] + 9)
        assert (
            fresh.is_accepting() == matcher.is_accepting()
            and fresh.is_stopped() == matcher.is_stopped()
            and not matcher.error
        )


def test_an_illegal_token_changes_nothing(compiler, tok):
    matcher = compiler.compile(Grammar("regex", "abc")).copy()
    assert matcher.try_accept(ids("abz", tok[1])) == 2
    assert not matcher.accept([EOS]) and not matcher.accept([0]) and not matcher.error
    assert matcher.accept(ids("c", tok[1])) and matcher.is_stopped() and not matcher.accept(ids("c", tok[1]))
    assert matcher.accept([EOT, EOS]) and not matcher.accept(ids("a", tok[1]))
    matcher.rollback(3)
    assert allowed(matcher, tok[2] + 9) == ids("c", tok[1])


def test_a_copy_is_independent(compiler, tok):
    a = compiler.compile(Grammar("regex", "[ab]c|[ab]dd")).copy()
    a.accept(ids("a", tok[1]))
    b = a.copy()
    assert b.accept(ids("d", tok[1])) and a.accept(ids("c", tok[1]))
    assert b.accept(ids("d", tok[1])) and not a.accept(ids("d", tok[1]))


def test_free_text_before_the_mark_cannot_end(compiler, tok):
    mark = tok[1]["</think>"]
    matcher = compiler.compile(Grammar("choice", '["yes"]', after=(mark,))).copy()
    free = allowed(matcher, tok[2] + 9)
    assert EOS not in free and EOT not in free and set(free) >= set(range(3, tok[2]))
    assert matcher.accept(ids("zz9", tok[1])) and not matcher.constrained and not matcher.is_stopped()
    assert matcher.accept([mark]) and matcher.constrained
    assert allowed(matcher, tok[2] + 9) == ids("y", tok[1])


# --------------------------------------------------------------------------------------------------- with the sampler


def test_forks_and_healthy_neighbours(compiler, tok):
    """The n branches share one compiled grammar, and each follows its own output."""
    size = tok[2] + 9
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[0]))
    matcher = compiler.compile(grammar)
    sampler = Sampler(size, tok[2], 4, "cpu", (EOS, EOT))
    outputs = []
    for branch in range(4):
        bias = {tok[1]['"']: 8.0, tok[1]["}"]: 8.0}
        seq = sequence(0, branch=branch, matcher=matcher, grammar=grammar, logit_bias=bias)
        output, error, _ = decode(sampler, TableModel(size, seed=3), seq, 300)
        assert error is None and output[-1] == EOS or EOT in output
        jsonschema.validate(json.loads(decode_bytes(output, tok[1])), SCHEMAS[0])
        outputs.append(tuple(output))
    assert len(set(outputs)) == 4
    assert allowed(matcher, size) == allowed(compiler.compile(grammar), size), "the shared matcher was advanced"


def test_eos_only_in_accepting_states_even_when_the_model_insists(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "abc(de)?")
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, temperature=0, logit_bias={EOS: 100.0})
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS,)), TableModel(size), seq, 20)
    assert error is None and decode_bytes(output, tok[1]) == b"abc" and output[-1] == EOS


def test_allowed_ids_and_grammar_together(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "[a-z]{5}")
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, allowed_token_ids=[EOS, *ids("xq", tok[1])])
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS,)), TableModel(size), seq, 20)
    assert error is None and re.fullmatch("[xq]{5}", decode_bytes(output, tok[1]).decode())


def test_an_output_that_left_the_grammar_fails_its_own_request(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "abc")
    sampler = Sampler(size, tok[2], 2, "cpu", (EOS,))
    lost = sequence(0, emitted=ids("zz", tok[1]), matcher=compiler.compile(grammar), grammar=grammar)
    healthy = sequence(1, matcher=compiler.compile(grammar), grammar=grammar)
    for seq in (lost, healthy):
        sampler.open(seq)
    a, b = step(sampler, TableModel(size), [decode_span(lost), decode_span(healthy)])
    assert a.error.startswith("grammar_error") and b.tokens == ids("a", tok[1]) and b.error is None


class Broken:
    """A library that gives up midway."""

    def __init__(self):
        self.failed = False

    def is_error(self):
        return self.failed

    def get_error(self):
        return "out of fuel\nsecret details"

    def deep_copy(self):
        return Broken()

    def is_stopped(self):
        return False

    def unsafe_compute_mask_ptr(self, pointer, size):
        self.failed = True


def test_a_library_failure_fails_one_request(compiler, tok):
    from kvasir.decoding.grammar import Matcher

    size = tok[2] + 9
    grammar = Grammar("regex", "abc")
    sampler = Sampler(size, tok[2], 2, "cpu", (EOS,))
    broken, healthy = sequence(0, matcher=Matcher(Broken(), size, (EOS,)), grammar=grammar), sequence(1)
    for seq in (broken, healthy):
        sampler.open(seq)
    a, b = step(sampler, TableModel(size), [decode_span(broken), decode_span(healthy)])
    assert a.error == "grammar_error: out of fuel" and a.tokens == [] and len(b.tokens) == 1


class Frail:
    """A library that runs out of fuel in ``call``, on every path except one."""

    def __init__(self, inner, way, call, at=0):
        self.inner, self.way, self.call, self.at, self.lost, self.failed = inner, way, call, at, 0, False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def is_error(self):
        return self.failed

    def get_error(self):
        return "out of fuel"

    def deep_copy(self):
        return Frail(self.inner.deep_copy(), self.way, self.call, self.at)

    def try_consume_tokens(self, tokens):
        if self.inner.try_consume_tokens(tokens) != 1:
            return 0
        self.lost += bool(self.lost) or self.way[self.at : self.at + 1] != tokens
        self.at += 1
        self.failed = self.failed or bool(self.lost) and self.call == "consume"
        return int(not self.failed)

    def unsafe_compute_mask_ptr(self, pointer, size):
        self.failed = self.failed or bool(self.lost)
        self.inner.unsafe_compute_mask_ptr(pointer, size)

    def rollback(self, count):
        self.at, self.lost = self.at - count, max(0, self.lost - count)
        return not self.failed and self.inner.rollback(count)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("call", ["consume", "mask"])
def test_a_library_failure_on_the_way_of_a_draft_costs_the_draft(compiler, tok, call, tree):
    """Plain decoding never goes there, and the accepted part of the draft still counts."""
    size, grammar = tok[2] + 9, Grammar("regex", "[a-d]{30}")
    sampler, model = Sampler(size, tok[2], 1, "cpu", (EOS,)), TableModel(size)
    plain, _, steps = decode(sampler, model, sequence(0, matcher=compiler.compile(grammar), grammar=grammar), 40)
    matcher = compiler.compile(grammar)
    matcher._inner = Frail(matcher._inner, plain, call)

    def draft(seq):
        """A draft with a right and a wrong token; in a tree, with further nodes below the wrong one and a right
        sibling."""
        if seq.num_output + 2 > len(plain):
            return [], None
        first, second = plain[seq.num_output : seq.num_output + 2]
        wrong = next(t for t in ids("abcd", tok[1]) if t != second)
        return ([first, wrong, wrong, second], [-1, 0, 1, 2, 1]) if tree else ([first, wrong], None)

    output, error, drafted = decode(sampler, model, sequence(0, matcher=matcher, grammar=grammar), 40, draft=draft)
    assert error is None and output == plain and drafted < 0.6 * steps


def test_min_tokens_against_a_finished_grammar_is_an_error_not_a_crash(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "ab")
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, min_tokens=9)
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS, EOT)), TableModel(size), seq, 20)
    assert decode_bytes(output, tok[1]) == b"ab" and error.startswith("no_token_allowed")


def test_eos_ignored_goes_on_with_eos(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "ab")
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, ignore_eos=True)
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS,)), TableModel(size), seq, 7)
    assert error is None and len(output) == 7 and set(output[2:]) <= {EOS, EOT}


# -------------------------------------------------------------------------------------------------------- bad grammars

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
        assert caught.value.message == f"the grammar cannot be used: regex parse error: {reason}"
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
