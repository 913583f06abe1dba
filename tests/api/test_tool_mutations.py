"""Answers with dropped, doubled and cut marks: the same message for any cut, JSON arguments, and no word is lost."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api import tools
from kvasir.api.tools import CallDelta, ToolParser
from tests.api.test_tools import message

SCHEMAS = {"save": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}}
ONE = {
    "hermes": '<tool_call>\n{"name": "save", "arguments": {"path": "WORD", "n": 5}}\n</tool_call>',
    "llama3_json": '{"name": "save", "parameters": {"path": "WORD", "n": 5}}',
    "mistral": '[TOOL_CALLS]save[ARGS]{"path": "WORD", "n": 5}',
    "glm45": "<tool_call>save\n<arg_key>path</arg_key>\n<arg_value>WORD</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=save>\n<parameter=path>\nWORD\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:save{path:<|"|>WORD<|"|>,n:5}<tool_call|>',
    "openai": '<|channel|>commentary to=functions.save<|message|>{"path": "WORD", "n": 5}<|call|>',
    "pythonic": "```tool_code\nsave(path='WORD', n=5)\n```",
}
PIECES = re.compile(r"<[^<>\n]*>|\[[A-Z_]+\]|```\w*|[{}()\[\]\"',:]|\w+|\s|.", re.DOTALL)
WORDS = ("alpha", "beta", "é🙂ß", "</tool_call> gamma", "<parameter=", "delta")


def made(kind):
    return technique.find(tools.PACKAGE, kind, ToolParser)[0](SCHEMAS)


def check(make, text, cuts):
    """Raise AssertionError unless the parser keeps the promises for this text."""
    found = message(make(), [text])
    assert message(make(), [*text, ""]) == found
    assert message(make(), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == found
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])
    kept = found[0] + "".join(arguments for _, arguments in found[1])
    for word in ("alpha", "beta", "gamma", "delta"):  # words of values, which are no syntax
        assert kept.count(word) >= text.count(word)


@st.composite
def mutated(draw, kind):
    calls = [ONE[kind].replace("WORD", draw(st.sampled_from(WORDS))) for _ in range(draw(st.integers(1, 3)))]
    pieces = PIECES.findall("\n".join(calls))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces) - 1))
        if pieces[at].isalpha():
            continue
        pieces[at] *= draw(st.sampled_from([0, 2]))
        pieces[at] = pieces[at][: draw(st.integers(0, len(pieces[at])))] if draw(st.booleans()) else pieces[at]
    return "".join(pieces)


@pytest.mark.parametrize("kind", ONE)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_mutated_calls_keep_the_promises(kind, data):
    text = data.draw(mutated(kind))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    check(lambda: made(kind), text, cuts)


@pytest.mark.parametrize("kind", ONE)
def test_right_calls_and_every_end(kind):
    text = ONE[kind].replace("WORD", "alpha")
    content, calls = message(made(kind), [text])
    assert content == "" and json.loads(calls[0][1])["path"] == "alpha"
    for end in range(len(text)):
        assert all(isinstance(json.loads(a), dict) for _, a in message(made(kind), [text[:end]])[1])


def test_a_broken_parser_is_noticed():
    class Loses(made("hermes").__class__):
        def push(self, text, final=False):
            return [d for d in super().push(text, final) if isinstance(d, CallDelta)]

    class Unclosed(made("hermes").__class__):
        def end_call(self):
            return ""

    for broken, text in ((Loses, "alpha"), (Unclosed, '<tool_call>{"name": "save", "arguments": {"path": "a')):
        with pytest.raises((AssertionError, ValueError)):
            check(lambda cls=broken: cls(SCHEMAS), text, [])
