"""Grammars whose text is that of an added token: it is spelled with ordinary tokens, and the token only by its name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import kvasir
from kvasir.decoding.grammar import GrammarCompiler
from kvasir.errors import RequestError
from kvasir.types import Grammar
from tests.decoding.grammars import allowed

FILE = Path(kvasir.__file__).parent / "assets/base/tokenizer.json"
SIZE, EOS = 2048, 2


@pytest.fixture(scope="module")
def base():
    return GrammarCompiler(FILE, SIZE, (EOS,)), Tokenizer.from_file(str(FILE))


def schema(value):
    return Grammar("json_schema", json.dumps(value))


GRAMMARS = {
    "choice": Grammar("choice", '["<think> no", "<think> no thanks"]'),
    "ebnf": Grammar("ebnf", 'root ::= "<tool_call>" [a-c]{3} "</tool_call>"'),
    "lark": Grammar("lark", 'start: "<tool_call>" /[a-c]{3}/ "</tool_call>"'),
    "regex": Grammar("regex", "<[|]im_start[|]>(<think>){2}"),
    "const": schema({"const": "<tool_call>"}),
    "enum": schema({"enum": ["<think>", "</think>"]}),
    "pattern": schema({"type": "string", "pattern": "^<think>$"}),
    "key": schema(
        {
            "type": "object",
            "properties": {"<think>": {"const": 1}},
            "required": ["<think>"],
            "additionalProperties": False,
        }
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_text_of_added_tokens_is_made_of_ordinary_ones(name, base):
    compiler, backend = base
    added = set(backend.get_added_tokens_decoder()) - {EOS}
    for salt in range(4):
        rng, out = random.Random(salt), []
        matcher = compiler.compile(GRAMMARS[name])
        while not matcher.is_stopped():
            choices = allowed(matcher, SIZE)
            assert added.isdisjoint(choices) and not matcher.error
            forced = matcher.forced()
            assert not forced or choices == forced[:1]
            token = rng.choice(choices)
            assert matcher.accept([token])
            out.append(token)
        text = backend.decode([t for t in out if t != EOS], skip_special_tokens=False)
        assert "<" in text and ">" in text and not matcher.error


def test_lark_names_an_added_token(base):
    compiler, backend = base
    matcher = compiler.compile(Grammar("lark", 'start: <tool_call> "<think>" <[7]>'))
    assert allowed(matcher, SIZE) == [backend.token_to_id("<tool_call>")]
    assert matcher.forced()[-1] == 7 and backend.token_to_id("<think>") not in matcher.forced()
    with pytest.raises(RequestError, match='unknown special token: "<nope>"$'):
        compiler.compile(Grammar("lark", "start: <nope>"))
