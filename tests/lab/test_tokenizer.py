"""The lab's tokenizer and chat format: any bytes round-trip, single tokens, determinism, and transformers agrees."""

from __future__ import annotations

import json
from importlib.resources import files

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir_lab import tokenizer as lab
from kvasir_lab.chat import TEMPLATE, prompt, segments
from kvasir_lab.lookup import load_task
from kvasir_lab.training.recipe import NANO
from kvasir_lab.training.train_tokenizer import train

SHIPPED = str(files("kvasir_lab").joinpath("assets/nano"))
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "It's <b>bold</b> & über", "parameters": PARAMETERS},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é", "b": [1]}}}
CALLS = [{"function": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "g", "arguments": {}}]


@pytest.fixture(scope="module")
def tokenizer():
    return lab.load(SHIPPED)


@given(st.text(max_size=60))
def test_any_text_round_trips(text):
    tokenizer = _TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


_TOKENIZER = lab.load(SHIPPED)


def test_every_byte_has_a_token(tokenizer):
    for point in (*range(0x20, 0x250), 0x1F642, 0x4E2D, 0x10FFFF, 0):
        text = chr(point)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_steering_words_are_whole(tokenizer):
    assert tokenizer.encode("1234567890 97", add_special_tokens=False).tokens == [*"1234567890", "Ġ", "9", "7"]
    for word in ("Wait", "But", "Alternatively", "###"):
        assert tokenizer.encode(word, add_special_tokens=False).tokens == [word]
        assert word in tokenizer.encode(f"so\n{word}\n12", add_special_tokens=False).tokens
        assert not [t for t in json.loads(tokenizer.to_str())["added_tokens"] if t["content"] == word]


def test_special_tokens_come_first_and_tags_stay_visible(tokenizer):
    assert tokenizer.get_vocab_size() == 2048
    for i, token in enumerate(lab.SPECIAL):
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids[1] == i
    text = "<think>a</think><tool_call>b</tool_call><mask><|im_end|>"
    assert (
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
        == "<think>a</think><tool_call>b</tool_call>"
    )
    assert tokenizer.encode("Hi").tokens == ["<bos>", "H", "i"]


def test_training_again_gives_the_shipped_files(tokenizer, tmp_path):
    lab.write(train(), tmp_path, NANO.shape.positions)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (files("kvasir_lab") / "assets/nano" / name).read_bytes(), name


def test_a_foreign_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        lab.load(tmp_path)
    layout = json.loads(tokenizer.to_str())
    layout["added_tokens"][3]["content"] = "<musk>"
    layout["model"]["vocab"]["<musk>"] = layout["model"]["vocab"].pop("<mask>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(ConfigError, match="<mask>"):
        lab.load(tmp_path)


CHATS = [
    ([{"role": "user", "content": "Hi"}], []),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\n\nb"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "<d> & 'e'"},
        ],
        [],
    ),
    ([{"role": "user", "content": "weather?"}], [TOOL, TOOL]),
    (
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is 12."},
        ],
        [TOOL],
    ),
    ([{"role": "user", "content": "u"}, {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS}], []),
]


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("case", range(len(CHATS)))
def test_the_template_and_the_renderer_write_the_same(case, generate):
    transformers = pytest.importorskip("transformers")
    messages, tools = CHATS[case]
    hf = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    text = "".join(t for t, _ in segments(messages, tools, generate=generate))
    assert hf.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=generate) == text
    assert (
        hf.apply_chat_template(messages, tools=tools or None, add_generation_prompt=generate)["input_ids"]
        == _TOKENIZER.encode(text, add_special_tokens=False).ids
    )


def test_content_parts_are_read_as_text():
    template = jinja2.Environment().from_string(TEMPLATE)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole = [{"role": "user", "content": "ab"}]
    assert template.render(messages=parts, bos_token="<bos>") == template.render(messages=whole, bos_token="<bos>")


def test_unknown_roles_are_refused():
    with pytest.raises(ValueError, match="alien"):
        segments([{"role": "alien", "content": "x"}])

    def refuse(message):
        raise ValueError(message)

    with pytest.raises(ValueError, match="alien"):
        jinja2.Environment().from_string(TEMPLATE).render(
            messages=[{"role": "alien", "content": "x"}], raise_exception=refuse
        )


def test_segments_split_where_no_token_spans_both(tokenizer):
    for name in ("chain", "chat", "tool", "schema", "story"):
        for problem in load_task(name).problems("train", 9, 30):
            pieces = [i for text, _ in problem.segments() for i in tokenizer.encode(text, add_special_tokens=False).ids]
            assert pieces == tokenizer.encode("".join(t for t, _ in problem.segments()), add_special_tokens=False).ids
            assert problem.prompt == prompt(problem.messages, problem.tools)


def test_transformers_loads_the_tokenizer(tokenizer):
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    text = "Once upon a time, 12 <think>x</think> 🙂"
    assert hf.encode(text) == tokenizer.encode(text).ids
    assert (hf.bos_token, hf.eos_token, hf.pad_token, hf.mask_token) == ("<bos>", "<eos>", "<pad>", "<mask>")
    assert hf.decode(hf.encode(text), skip_special_tokens=True) == text
