"""Forced calls in each format: what the grammar allows is parsed into a call that satisfies the tool's schema."""

import functools
import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from kvasir import technique
from kvasir.api.calls import tools
from kvasir.api.calls.tools import ToolParser
from kvasir.api.text.detokenize import Detokenizer
from kvasir.api.text.text import Text
from kvasir.errors import RequestError
from kvasir.models.tokenizer import Tokenizer
from kvasir.types import SamplingParams
from tests.api.test_tools import message
from tests.models import small_tokenizers

KINDS = ("gemma4", "glm45", "mistral", "openai", "pythonic", "qwen3_coder")
# Marks that are single tokens in the models' own vocabularies.
TOKENS = {
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "glm45": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "openai": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"],
}
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string", "maxLength": 6},
        "c": {"enum": ["x/y", "two words"]},
        "d": {"type": "boolean"},
        "e": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "f": {"$ref": "#/$defs/Point"},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 2}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def function(name="add", parameters=ADD):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@functools.cache
def tokenizer(kind, tokens):
    backend = small_tokenizers.byte_level()
    if tokens:
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in TOKENS.get(kind, [])])
    return Tokenizer(backend, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def compile(tmp_path_factory):
    from kvasir.decoding.grammar import GrammarCompiler

    @functools.cache
    def of(kind, tokens):
        used, file = tokenizer(kind, tokens), tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        used._backend.save(str(file))
        return GrammarCompiler(file, used.size, used.eos_ids)

    return lambda grammar, kind, tokens: of(kind, tokens).compile(grammar)


def cls(kind):
    return technique.find(tools.PACKAGE, kind, ToolParser)[0]


def parsed(kind, text, schemas):
    content, calls = message(cls(kind)(schemas), [text])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


WRITTEN = {
    "gemma4": '<|tool_call>call:add{a:5,b:<|"|>hi<|"|>,c:<|"|>x/y<|"|>,e:[1,2],f:{x:1}}<tool_call|>',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>hi"
    "</arg_value>\n<arg_key>c</arg_key>\n<arg_value>x/y</arg_value>\n<arg_key>e</arg_key>\n<arg_value>[1, 2]"
    '</arg_value>\n<arg_key>f</arg_key>\n<arg_value>{"x": 1}</arg_value>\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 5, "b": "hi", "c": "x/y", "e": [1, 2], '
    '"f": {"x": 1}}}]',
    "openai": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 5, "b": "hi", "c": "x/y", '
    '"e": [1, 2], "f": {"x": 1}}',
    "pythonic": '[add(a=5, b="hi", c="x/y", e=[1, 2], f={"x": 1})]',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nhi\n</parameter>\n"
    "<parameter=c>\nx/y\n</parameter>\n<parameter=e>\n[1, 2]\n</parameter>\n<parameter=f>\n"
    '{"x": 1}\n</parameter>\n</function>\n</tool_call>',
}
EXPECTED = [("add", {"a": 5, "b": "hi", "c": "x/y", "e": [1, 2], "f": {"x": 1}})]


def written(kind, tokens):
    if kind == "mistral" and tokens:  # the newer form, which has a token of its own
        return f"[TOOL_CALLS]add[ARGS]{json.dumps(EXPECTED[0][1])}"
    return WRITTEN[kind]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_call(kind, tokens, compile):
    used = tokenizer(kind, tokens)
    grammar = tools.grammar([function(), function("now", None)], "required", cls(kind), used)

    def accepts(text, grammar=grammar):
        matcher = compile(grammar, kind, tokens)
        return matcher.accept(used.encode(text, add_special=False, parse_special=True)) and matcher.is_accepting()

    right = written(kind, tokens)
    assert accepts(right)
    assert parsed(kind, right, {"add": ADD, "now": {}}) == ("", EXPECTED)
    for wrong in ("", "Hello", right[:-3], right.replace("x/y", "x/z"), right.replace("5", '"5"'), right + right[:9]):
        assert not accepts(wrong), wrong
    named = tools.grammar(
        [function(), function("now", None)], {"type": "function", "function": {"name": "now"}}, cls(kind), used
    )
    assert not accepts(right, named)


@pytest.mark.parametrize("kind", ["openai"])
def test_thinking_comes_first(kind, compile):
    """The grammar of a format that frames the whole answer starts with its first token, and lets the model think."""
    used = tokenizer(kind, True)
    grammar = tools.grammar([function()], "required", cls(kind), used, after=(3,))
    assert grammar.after == ()
    text = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant" + WRITTEN[kind]
    matcher = compile(grammar, kind, True)
    assert matcher.accept(used.encode(text, add_special=False, parse_special=True)) and matcher.is_accepting()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_grammar_allows_is_parsed(kind, tokens, compile):
    """Random walks under the mask end in a call with arguments that the schema allows."""
    used = tokenizer(kind, tokens)
    grammar = tools.grammar([function()], "required", cls(kind), used, parallel=False)
    ended = 0
    for seed in range(8):
        rng, matcher, ids = random.Random(seed), compile(grammar, kind, tokens), []
        mask = np.zeros(-(-used.size // 32), np.int32)
        while not matcher.is_stopped() and len(ids) < 300:
            matcher.fill(mask)
            allowed = [i for i in range(used.size) if mask.view(np.uint32)[i // 32] >> np.uint32(i % 32) & 1]
            ids.append(rng.choice(allowed))
            assert matcher.accept([ids[-1]])
            if ids[-1] in used.eos_ids:
                ids.pop()
                break
        if not matcher.is_accepting() and not matcher.is_stopped():
            continue  # a long string or number
        ended += 1
        text = used.decode(ids, skip_special=False)
        content, calls = parsed(kind, text, {"add": ADD})
        assert len(calls) == 1 and calls[0][0] == "add", text
        assert content == "" or kind == "openai"  # its thinking
        jsonschema.validate(calls[0][1], ADD)
    assert ended


@pytest.mark.parametrize("kind", ["gemma4", "glm45", "qwen3_coder"])
def test_what_cannot_be_forced_is_refused_by_name(kind):
    for schema, word in (
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}, "pattern"),
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
    ):
        with pytest.raises(RequestError, match=f"'{word}' in the parameters of 'add'"):
            tools.grammar([function(parameters=schema)], "required", cls(kind), tokenizer(kind, False))


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_or_several(kind, compile):
    used = tokenizer(kind, False)
    call = {
        "gemma4": "<|tool_call>call:now{}<tool_call|>",
        "glm45": "<tool_call>now\n</tool_call>",
        "mistral": '{"name": "now", "arguments": {}}',
        "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        "pythonic": "now()",
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    }[kind]
    between = {"glm45": "\n", "qwen3_coder": "\n", "mistral": ", ", "pythonic": ", "}.get(kind, "")
    wrap = {"mistral": "[TOOL_CALLS][{}]", "pythonic": "[{}]"}.get(kind, "{}")
    for parallel in (True, False):
        grammar = tools.grammar([function("now", None)], "required", cls(kind), used, parallel=parallel)
        for count in (1, 2):
            matcher = compile(grammar, kind, False)
            text = wrap.replace("{}", between.join([call] * count), 1)
            ids = used.encode(text, add_special=False, parse_special=True)
            allowed = matcher.accept(ids) and matcher.is_accepting()
            assert allowed == (count == 1 or (parallel and kind != "openai")), text
            if allowed:
                assert parsed(kind, text, {"now": {}}) == ("", [("now", {})] * count)


@pytest.mark.parametrize("kind", TOKENS)
def test_special_tokens_of_the_format_are_shown(kind):
    """The parsers read text, so the marks among the special tokens must not be skipped."""
    text = Text(lambda: tokenizer(kind, True), kind, "openai_gptoss" if kind == "openai" else "none")
    text.load()
    shown = {text.tokenizer.id_to_token(i) for i in text.keep_ids}
    assert set(TOKENS[kind]) <= shown | set(small_tokenizers.TAGS)
    ids = text.tokenizer.encode(written(kind, True), add_special=False, parse_special=True)
    stream = Detokenizer(text.tokenizer, (), SamplingParams(), text.keep_ids)
    assert parsed(kind, stream.push(ids, finished=True).text, {"add": ADD}) == ("", EXPECTED)
