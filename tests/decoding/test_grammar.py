"""Grammars: every walk under the mask is valid, EOS is allowed only in accepting states, bad grammars are refused, and
failures stay with one request.
"""

from __future__ import annotations

import json
import random
import re

import jsonschema
import llguidance
import numpy as np
import pytest

from kvasir.decoding import matcher as matcher_module
from kvasir.decoding.sampler import Sampler
from kvasir.types import Grammar
from tests.decoding.grammars import EOT, allowed, ids, random_walk
from tests.decoding.helpers import EOS, TableModel, decode, decode_bytes, decode_span, sequence, step

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


@pytest.mark.parametrize("threads", [False, True])
def test_masks_computed_together_are_those_computed_alone(compiler, tok, threads, monkeypatch):
    """Free, ended, constrained and failed matchers, in any mixture."""
    size = tok[2] + 9
    monkeypatch.setattr(matcher_module, "_threads", lambda: llguidance.LLExecutor(2) if threads else None)
    matchers = [compiler.compile(Grammar("regex", f"[a-{c}]{{1,3}}")) for c in "cdefg"]
    matchers.append(compiler.compile(Grammar("regex", "abc", after=(5,))))
    matchers[1].error = "gave up"
    assert matchers[2].accept([*ids("ab", tok[1]), EOS])
    together = np.empty((len(matchers), -(-size // 32)), np.int32)
    good = matcher_module.fill_all(matchers, together)
    alone = np.empty_like(together)
    assert good == [matcher.fill(mask) for matcher, mask in zip(matchers, alone)] and good.count(False) == 1
    assert (together == alone).all() and len(np.unique(together, axis=0)) == len(matchers)


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
    from kvasir.decoding.matcher import Matcher

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


@pytest.mark.parametrize("pattern, right", [("ab", b"ab"), ("ab?c{0,4}", b"")])
def test_min_tokens_never_outlast_a_finished_grammar(pattern, right, compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", pattern)
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, min_tokens=9)
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS, EOT)), TableModel(size), seq, 20)
    assert error is None and output[-1] in (EOS, EOT)
    text = decode_bytes(output, tok[1])
    assert text == right or (not right and text.endswith(b"cccc")), "EOS waits while the grammar can go on"


def test_eos_ignored_goes_on_with_eos(compiler, tok):
    size = tok[2] + 9
    grammar = Grammar("regex", "ab")
    seq = sequence(0, matcher=compiler.compile(grammar), grammar=grammar, ignore_eos=True)
    output, error, _ = decode(Sampler(size, tok[2], 1, "cpu", (EOS,)), TableModel(size), seq, 7)
    assert error is None and len(output) == 7 and set(output[2:]) <= {EOS, EOT}
