"""Turns, tools and content blocks of the messages API, without a server."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.api.protocols.messages import Content, choice_of, messages_of, own_places, stop_fields, tools_of
from kvasir.api.protocols.messages_protocol import ToolChoice
from kvasir.api.text.chat import Call, Piece, check_messages
from kvasir.errors import RequestError

ASK = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}


def text(value: str, **more) -> dict:
    return {"type": "text", "text": value, **more}


def user(*blocks) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def test_a_whole_conversation():
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        user(text("weather?", **cached), text("please")),
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "whatever"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("look "),
            USE,
            {**USE, "id": "toolu_2", "input": {}, **cached},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sunny"), text("warm")], **cached},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no city", "is_error": True},
            text("and now?"),
        ),
        {"role": "assistant", "content": "bye", **cached},
        ASK,
    ]
    messages = messages_of(turns, [text("be nice", **cached), text("and short")])
    assert messages == [
        {"role": "system", "content": "be nice\nand short"},
        {"role": "user", "content": "weather?\nplease"},
        {
            "role": "assistant",
            "content": "look ",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": "weather", "arguments": arguments}}
                for i, arguments in (("toolu_1", '{"city": "Zürich"}'), ("toolu_2", "{}"))
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny\nwarm", "name": "weather"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no city", "name": "weather"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "bye"},
        {"role": "user", "content": "hi"},
    ]
    assert check_messages(messages) == messages, "nothing is left for the checks of chat to refuse"


def test_neighbours_of_one_role_are_one_message():
    """Templates of some models refuse two turns of a role in a row."""
    turns = [ASK, ASK, assistant(text("a")), assistant(text("b"), USE), ASK, user(text("c"))]
    messages = messages_of(turns, None)
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "hi\nhi"),
        ("assistant", "ab"),
        ("user", "hi\nc"),
    ]


def test_the_accounting_line_of_claude_code_does_not_reach_the_prompt():
    """It holds a new hash in every request, so that no prefix would ever be found in the cache."""
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    for system in ([text(line), text("be nice")], f"{line}\nbe nice"):
        prompts = [messages_of([ASK], json.loads(json.dumps(system).replace("{}", cch))) for cch in ("eb6c6", "0aa1f")]
        assert prompts[0] == prompts[1] and prompts[0][0]["content"].strip() == "be nice"
    assert messages_of([ASK], [text(line)]) == [ASK], "no system message is left"


def test_documents_and_search_results_that_are_text():
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
        "title": "T",
    }
    content = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {"type": "search_result", "source": "https://x", "title": "T", "content": [text("hit")]}
    assert messages_of([user(document, content, found)], None)[0]["content"] == "T\nbody\na\nb\nT\nhttps://x\nhit"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        (user(), "messages[1].content"),
        (user("x"), "messages[1].content[0].type"),
        (user({"text": "x"}), "messages[1].content[0].type"),
        (user({"type": "text", "text": 5}), "messages[1].content[0].text"),
        (user(text("x"), IMAGE), "messages[1].content[1].type"),
        (user({"type": "document", "source": {"type": "base64"}}), "messages[1].content[0].type"),
        (user({"type": "document", "source": {"type": "text"}}), "messages[1].content[0].source.data"),
        (user({"type": "tool_result"}), "messages[1].content[0].tool_use_id"),
        (user({"type": "tool_result", "tool_use_id": ""}), "messages[1].content[0].tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
            "messages[1].content[0].content[0].type",
        ),
        (user({"type": "tool_result", "tool_use_id": "a", "content": 5}), "messages[1].content[0].content"),
        (user(USE), "messages[1].content[0].type"),
        (assistant({**USE, "input": "x"}), "messages[1].content[0].input"),
        (assistant({**USE, "name": ""}), "messages[1].content[0].name"),
        (assistant({"type": "thinking"}), "messages[1].content[0].thinking"),
        (assistant({"type": "server_tool_use", "id": "a"}), "messages[1].content[0].name"),
        (assistant({"type": "web_search_tool_result"}), "messages[1].content[0].tool_use_id"),
        (assistant({**USE, "input": ""}), "messages[1].content[0].input"),
        ({"role": "system", "content": [IMAGE]}, "messages[1].content[0].type"),
    ],
)
def test_bad_turns_are_refused_at_their_place(turn, param):
    with pytest.raises(RequestError) as e:
        messages_of([ASK, turn], None)
    assert e.value.param == param and param.rpartition(".")[0] in e.value.message


def test_tools():
    schema = {"type": "object", "properties": {}}
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "g", "input_schema": schema, "input_examples": [{}], "strict": True},
    ]
    mine, ignored = tools_of(tools)
    assert [t["function"] for t in mine] == [
        {"name": "f", "description": "d", "parameters": schema},
        {"name": "g", "strict": True, "parameters": schema},
    ]
    assert ignored == ["tools[0].web_search_20250305", "tools[2].input_examples"]
    with pytest.raises(RequestError) as e, own_places(tools):
        raise RequestError("tools[1].function.parameters is bad", param="tools[1].function.name")
    assert e.value.param == "tools[2].name" and e.value.message == "tools[2].input_schema is bad", (
        "the place in the body, not among the tools that were kept"
    )
    with pytest.raises(RequestError) as e:
        tools_of([*tools, {"name": "h"}])
    assert e.value.param == "tools[3].input_schema"
    assert tools_of([]) == tools_of(None) == (None, [])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (None, True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool"}, None),
        ({"type": "any", "name": "f"}, None),
    ],
)
def test_tool_choices(choice, expected):
    choice = choice and ToolChoice(**choice)
    if expected is None:
        with pytest.raises(RequestError, match=r"tool_choice\.name"):
            choice_of(choice)
    else:
        assert choice_of(choice) == expected


def test_stop_reasons():
    assert stop_fields("stop", "END") == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert [stop_fields(r, None)["stop_reason"] for r in ("stop", "length", "tool_calls")] == [
        "end_turn",
        "max_tokens",
        "tool_use",
    ]
    assert stop_fields("stop", 7)["stop_reason"] == "end_turn", "a token id is no sequence of the client's"


# -------------------------------------------------------------------------------------------------------------- content


def call(index: int, arguments: str) -> list[Piece]:
    return [Piece("call", "", index, Call(f"call_{index}", "f")), *(Piece("call", c, index) for c in arguments)]


def grown(pieces: list[Piece], **options) -> tuple[list[dict], list[dict]]:
    """The blocks of a collected reply, and those that a client assembles from the events of a stream."""
    content = Content(**options)
    events = [e for piece in pieces for e in content.add(piece)] + list(content.finish())
    return json.loads(msgspec.json.encode(content.blocks)), assembled(events)


def assembled(events: list[dict]) -> list[dict]:
    blocks: list[dict] = []
    partial, open_ = "", False
    for e in events:
        if e["type"] == "content_block_start":
            assert not open_ and e["index"] == len(blocks), "one block is open at a time"
            blocks.append(dict(e["content_block"]))
            partial, open_ = "", True
            continue
        assert open_ and e["index"] == len(blocks) - 1
        block = blocks[-1]
        if e["type"] == "content_block_stop":
            open_ = False
            if block["type"] == "tool_use" and partial:
                block["input"] = json.loads(partial)
        elif e["delta"]["type"] == "input_json_delta":
            partial += e["delta"]["partial_json"]
        elif e["delta"]["type"] == "signature_delta":
            block["signature"] = e["delta"]["signature"]
        else:
            name = e["delta"]["type"].removesuffix("_delta")
            assert e["delta"][name], "empty deltas say nothing"
            block[name] += e["delta"][name]
    assert not open_
    return blocks


PIECES = st.lists(
    st.one_of(
        st.text(alphabet=" \nab", min_size=1, max_size=6).map(lambda t: [Piece("content", c) for c in t]),
        st.text(alphabet=" \nab", min_size=1, max_size=6).map(lambda t: [Piece("reasoning", t)]),
        st.sampled_from(['{"a": 1}', "{}", '{"a": {"b": [1, "x"]}}']),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(PIECES)
def test_a_stream_tells_what_the_collected_reply_holds(parts):
    pieces, calls = [], 0
    for part in parts:
        if isinstance(part, str):
            pieces += call(calls, part)
            calls += 1
        else:
            pieces += part
    blocks, streamed = grown(pieces)
    assert blocks == streamed and blocks
    assert all(b["text"].strip() for b in blocks if b["type"] == "text") or len(blocks) == 1
    assert [b["input"] for b in blocks if b["type"] == "tool_use"] == [json.loads(p) for p in parts if type(p) is str]


def test_white_space_around_calls_is_no_block():
    pieces = [Piece("reasoning", "hm"), Piece("content", "\n"), *call(0, "{}"), Piece("content", "\n"), *call(1, "{}")]
    assert [b["type"] for b in grown(pieces)[0]] == ["thinking", "tool_use", "tool_use"]
    assert grown([Piece("content", "\n"), Piece("content", " a\n")])[0] == [text("\n a\n")], "before a text it counts"
    assert grown([])[0] == [text("")] and grown([Piece("content", " ")])[0] == [text(" ")]


def test_thinking_has_a_signature_and_can_be_left_out():
    shown, hidden = (
        grown([Piece("reasoning", "hm"), Piece("content", "a")], hide_thinking=h)[0] for h in (False, True)
    )
    assert shown[0]["thinking"] == "hm" and hidden[0]["thinking"] == "" and shown[1:] == hidden[1:] == [text("a")]
    assert shown[0]["signature"] == hidden[0]["signature"] != "", "clients drop blocks without one"
    assert grown([Piece("reasoning", "ho")])[0][0]["signature"] != shown[0]["signature"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Par', {}),
        ('{"city": "Paris", "days": [1, 2', {"city": "Paris", "days": [1, 2]}),
        ("", {}),
        ("{", {}),
        ("[1]", {}),
        ("nonsense", {}),
        ('{"n": NaN}', {"n": None}),
        (r'{"s": "\ud800"}', None),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
    ],
)
def test_arguments_that_were_cut_or_are_odd_give_an_object(arguments, expected):
    content = Content()
    for piece in call(0, arguments):
        list(content.add(piece))
    list(content.finish())
    found = json.loads(msgspec.json.encode(content.blocks[0]))["input"]
    assert isinstance(found, dict) and (expected is None or found == expected)
