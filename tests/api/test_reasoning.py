"""Thinking and answer: the same two texts for any cut of the stream, wherever the thinking begins."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import technique
from kvasir.api.calls import reasoning, tools
from kvasir.api.calls.reasoning_parsers.deepseek_r1 import DeepSeekR1
from kvasir.api.calls.reasoning_parsers.qwen3 import Qwen3
from kvasir.api.text.chat import Message
from kvasir.errors import ConfigError
from tests.api.call_texts import FORMATS, SCHEMAS
from tests.models.small_tokenizers import make

PARSERS = {"qwen3": Qwen3, "deepseek_r1": DeepSeekR1}
OPENED, CLOSED, PLAIN = (
    "<|im_start|>assistant\n<think>\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<|im_start|>assistant\n",
)


def split(kind, pieces, prompt=PLAIN):
    parser, thought, content = PARSERS[kind](prompt), "", ""
    for i, piece in enumerate(pieces):
        for delta in parser.push(piece, i == len(pieces) - 1):
            assert not (delta.reasoning and content), "reasoning after content"
            thought, content = thought + delta.reasoning, content + delta.content
    return thought, content


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "prompt, text, expected",
    [
        (PLAIN, "<think>\nhm, 1 < 2\n</think>\n\nYes.\n", ("hm, 1 < 2", "Yes.\n")),
        (PLAIN, "\n<think>a</think>b", ("a", "b")),
        (PLAIN, "Yes.", ("", "Yes.")),
        (PLAIN, "\n\n Yes.", ("", "\n\n Yes.")),
        (PLAIN, "<thin air", ("", "<thin air")),
        (PLAIN, "<think>never ends\n", ("never ends", "")),
        (PLAIN, "<think>a</thi", ("a</thi", "")),
        (PLAIN, "a </think> b", ("", "a </think> b")),
        (PLAIN, "<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d")),
        (PLAIN, "<think>\n\n</think>\n\nb", ("", "b")),
        (PLAIN, "", ("", "")),
        (OPENED, "hm\n\nwell\n</think>\n\nYes.", ("hm\n\nwell", "Yes.")),
        (OPENED, "<think>\nhm</think>Yes.", ("hm", "Yes.")),
        (OPENED, "</think>Yes.", ("", "Yes.")),
        (PLAIN, "<think><think>a</think>b", ("<think>a", "b")),
        (CLOSED, "<think>no</think>Yes.", ("", "<think>no</think>Yes.")),
        (CLOSED, "Yes.", ("", "Yes.")),
    ],
)
def test_formats(kind, prompt, text, expected):
    assert split(kind, [text], prompt) == expected
    assert split(kind, [*text, ""], prompt) == expected


CALL = "<tool_call>\n<function=ls>\n</function>\n</tool_call>"


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "text, content",
    [
        (f"hm\n{CALL}", CALL),
        (f"hm\n{CALL}\n</think>\n\nDone.", f"{CALL}\n\n\nDone."),
        ('hm<tool_call>\n{"name": "ls", "arguments": {"a": "</think>"}}\n</tool_call></think>',
         '<tool_call>\n{"name": "ls", "arguments": {"a": "</think>"}}\n</tool_call>'),
    ],
)  # fmt: skip
def test_a_call_ends_the_thinking(kind, text, content):
    assert split(kind, [text], OPENED) == ("hm", content)
    for cut in range(len(text) + 1):
        assert split(kind, [text[:cut], text[cut:]], OPENED) == ("hm", content)
    assert split(kind, [*text, ""], OPENED) == ("hm", content)


@pytest.mark.parametrize("label", [label for label in FORMATS if label != "openai"])
def test_a_call_of_any_format_ends_the_thinking(label):
    call = FORMATS[label].one("save", {"path": "a </think> b", "n": 5})
    for tail, left in (("", ""), ("\n</think>\n\nDone.", "\n\n\nDone.")):
        text = f"I will\n\nsave it.\n{call}{tail}"
        expected = ("I will\n\nsave it.", call + left)
        assert split("qwen3", [text], OPENED) == expected
        assert split("qwen3", [*text, ""], OPENED) == expected
        for cut in range(len(text) + 1):
            assert split("qwen3", [text[:cut], text[cut:]], OPENED) == expected
        parser = technique.find(tools.PACKAGE, FORMATS[label].kind, tools.ToolParser)[0]
        message = Message(Qwen3(OPENED), parser(SCHEMAS))
        message.push(text, [], True)
        assert [(c.name, json.loads(c.arguments)) for c in message.calls] == [
            ("save", {"path": "a </think> b", "n": 5})
        ]
        assert message.content.strip() == left.strip()


@pytest.mark.parametrize(
    "thought",
    [
        "I write <tool_call> here.",
        "[TOOL_CALLS] is a mark, like <|tool_call> and <|python_tag|>",
        'A call is <tool_call>{...}</tool_call>, and {"name": "x"} is JSON.',
        "```python\nnow()\n``` is no ```tool_code",
        '{"name": "Bob", "age": 5}',
    ],
)
def test_thinking_about_the_format_is_no_call(thought):
    text = f"{thought}</think>Yes."
    assert split("qwen3", [text], OPENED) == split("qwen3", [*text, ""], OPENED) == (thought, "Yes.")


def test_without_a_prompt():
    assert split("deepseek_r1", ["a</think>b"], None) == ("a", "b")
    assert split("deepseek_r1", ["<think>a</think>b"], None) == ("a", "b")
    assert split("qwen3", ["<think>a</think>b"], None) == ("a", "b") and split("qwen3", ["b"], None) == ("", "b")


SCRAPS = ["<think>", "</think>", "<th", "ink>", "</", "think", ">", "<", "\n", "\n\n", " ", "a", "words", "é🙂"]


@pytest.mark.parametrize("kind", PARSERS)
@given(
    st.lists(st.sampled_from(SCRAPS), max_size=14).map("".join),
    st.sampled_from([PLAIN, OPENED, CLOSED, None]),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same_texts(kind, text, prompt, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    expected = split(kind, [text], prompt)
    assert split(kind, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], prompt) == expected
    assert split(kind, [*text, ""], prompt) == expected
    kept = "".join(expected).replace("\n", "")
    assert (
        kept in (text.replace("\n", "").strip(), text.replace("\n", "")) or "think>" in text
    )  # nothing but marks and line breaks is lost


def test_thinking_streams():
    parser = Qwen3(PLAIN)
    assert parser.push("<think>one") == [("one", "")]
    assert parser.push(" two</") == [(" two", "")]
    assert parser.push("b>") == [("</b>", "")]
    assert parser.push("\n") == [("", "")]
    assert parser.push("x</think>") == [("\nx", "")]
    assert parser.push("\n\nyes") == [("", "yes")]


def test_end_ids():
    tokenizer = make("byte_level")
    end = tokenizer.token_to_id("</think>")
    assert (
        Qwen3(PLAIN).end_ids(tokenizer) == (end,)
        and Qwen3(OPENED).end_ids(tokenizer) == (end,)
        and Qwen3(CLOSED).end_ids(tokenizer) == ()
    )


def test_choose():
    assert reasoning.choose("auto", make("byte_level")) is Qwen3
    assert reasoning.choose("auto", make("byte_level", "{{ messages[0].content }}")) is None
    assert (
        reasoning.choose("auto", make("byte_level", None)) is None
        and reasoning.choose("none", make("byte_level")) is None
    )
    assert reasoning.choose("auto", make("byte_level", "{{ '<｜Assistant｜><think>' }}")) is DeepSeekR1
    assert reasoning.choose("deepseek-r1", make("byte_level")) is DeepSeekR1
    with pytest.raises(ConfigError, match="qwen3"):
        reasoning.choose("qwen", make("byte_level"))


def test_the_prompt_decides():
    tokenizer = make("byte_level")
    message = [{"role": "user", "content": "<think>"}]  # as text of the user it opens nothing
    open_prompt = tokenizer.encode_chat(message)
    closed = tokenizer.encode_chat(message, enable_thinking=False)
    assert reasoning.parser(Qwen3, tokenizer, open_prompt).push("<think>a</think>b", True) == [("a", "b")]
    assert reasoning.parser(Qwen3, tokenizer, open_prompt).push("b", True) == [("", "b")]
    assert reasoning.parser(Qwen3, tokenizer, closed).disabled and reasoning.parser(None, tokenizer, closed) is None
