"""OpenAI's own client against a real port: the server behaves as its documentation says."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from kvasir.api.text.logprobs import completion_logprobs, namer, prompt_offsets
from kvasir.types import TokenLogprob
from tests.api.fake_client import tokenizer
from tests.api.running import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def say(text: str, **more) -> dict:
    return {"model": "fake", "messages": [{"role": "user", "content": f"say: {text}"}], **more}


def joined(stream) -> dict:
    """The message of each choice, assembled from a chat stream."""
    choices: dict[int, dict] = {}
    for chunk in stream:
        for c in chunk.choices:
            out = choices.setdefault(
                c.index, {"content": "", "reasoning": "", "calls": {}, "finish": None, "logprobs": [], "roles": 0}
            )
            out["content"] += c.delta.content or ""
            out["reasoning"] += getattr(c.delta, "reasoning_content", None) or ""
            assert getattr(c.delta, "reasoning", None) == getattr(c.delta, "reasoning_content", None), (
                "vLLM's name for it"
            )
            out["roles"] += c.delta.role is not None
            for call in c.delta.tool_calls or []:
                held = out["calls"].setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                held["id"] += call.id or ""
                held["name"] += call.function.name or ""
                held["arguments"] += call.function.arguments or ""
            out["logprobs"] += c.logprobs.content if c.logprobs else []
            assert out["finish"] is None, "nothing may follow the finish reason"
            out["finish"] = c.finish_reason
    return choices


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["fake"] and models[0].max_model_len == 1024
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_chat(client):
    r = client.chat.completions.create(**say("hello world"))
    assert r.choices[0].message.content == "hello world" and r.choices[0].message.role == "assistant"
    assert r.choices[0].finish_reason == "stop" and r.object == "chat.completion" and r.model == "fake"
    assert r.usage.completion_tokens == len(tokenizer().encode("hello world")) + 1
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def test_stream_equals_collected_with_every_part(client, server):
    body = say(
        f"<think>first think\n</think>\n\nhello wörld 日本 {CALL} {CALL}",
        tools=[WEATHER],
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    whole = client.chat.completions.create(**body)
    for group in (1, 3, 50):
        server.engine.group = group
        try:
            parts = joined(client.chat.completions.create(**body, stream=True))
        finally:
            server.engine.group = 1
        assert sorted(parts) == [0, 1, 2]
        for choice in whole.choices:
            part, message = parts[choice.index], choice.message
            assert part["roles"] == 1
            assert (
                part["content"] == message.content
                and part["reasoning"] == message.reasoning_content == message.reasoning == "first think"
            )
            assert [(c["name"], json.loads(c["arguments"])) for c in part["calls"].values()] == [
                ("weather", {"city": "Paris"})
            ] * 2
            assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
                (c["name"], c["arguments"]) for c in part["calls"].values()
            ]
            assert len({c["id"] for c in part["calls"].values()}) == 2
            assert part["finish"] == choice.finish_reason == "tool_calls"
            assert part["logprobs"] == choice.logprobs.content


def test_usage_in_streams(client):
    chunks = list(
        client.chat.completions.create(**say("hello world"), stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert all(c.usage is None for c in chunks[:-1])
    running = list(
        client.chat.completions.create(
            **say("hello world"), stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
    )
    assert [c.usage.completion_tokens for c in running][0] == 1 and running[-1].usage.completion_tokens == 4
    assert all(c.usage is None for c in client.chat.completions.create(**say("hello"), stream=True))


def test_cached_and_reasoning_tokens(client):
    body = say("<think>several words</think>answer")
    first, second = (client.chat.completions.create(**body).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1
    thought = tokenizer().encode("<think>several words</think>", add_special=False, parse_special=True)
    assert first.completion_tokens_details.reasoning_tokens == len(thought)
    assert client.chat.completions.create(**say("answer")).usage.completion_tokens_details.reasoning_tokens == 0


def test_thinking_switched_off(client):
    body = say("answer", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    message = client.chat.completions.create(**body).choices[0].message
    assert message.content == "answer" and not hasattr(message, "reasoning_content")


def test_stop_string_ends_and_cancels(client, server):
    server.engine.cancelled.clear()
    r = client.chat.completions.create(**say("hello world of several words"), stop=[" of", "xyz"])
    assert (r.choices[0].message.content, r.choices[0].finish_reason, r.choices[0].stop_reason) == (
        "hello world",
        "stop",
        " of",
    )
    assert [branch for _, branch in server.engine.cancelled] == [0], "the engine must be told"
    tokens = tokenizer().encode("hello world of", add_special=False)
    assert r.usage.completion_tokens == len(tokens), "every token up to the one that completed the stop"
    kept = client.chat.completions.create(
        **say("hello world of words"), stop=" of", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == "hello world of"


def test_max_tokens_and_their_two_names(client):
    for name in ("max_tokens", "max_completion_tokens"):
        r = client.chat.completions.create(**say("hello world hello world"), **{name: 2})
        assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 2


def test_truncated_tool_call_is_valid_and_ends_with_length(client):
    body = say(CALL, tools=[WEATHER], max_tokens=len(tokenizer().encode(CALL, parse_special=True)) - 8)
    whole = client.chat.completions.create(**body).choices[0]
    part = joined(client.chat.completions.create(**body, stream=True))[0]
    assert whole.finish_reason == part["finish"] == "length"
    assert (whole.message.content or "") == part["content"]


def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(client):
    body = say(CALL * 2, tools=[WEATHER], stop=['"}}</tool_call><'])
    whole = client.chat.completions.create(**body).choices[0]
    part = joined(client.chat.completions.create(**body, stream=True))[0]
    assert whole.message.tool_calls[0].function.arguments == part["calls"][0]["arguments"] == '{"city": "Paris"}'
    assert whole.finish_reason == part["finish"] == "stop", "closed to valid JSON, and not said to be complete"
    tool = {"type": "function", **WEATHER["function"]}
    asked = {"model": "fake", "input": f"say: {CALL * 2}", "tools": [tool], "extra_body": {"stop": body["stop"]}}
    [call] = client.responses.create(**asked).output
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"city": "Paris"}')


def test_one_call_when_parallel_calls_are_off(client):
    r = client.chat.completions.create(**say(CALL + CALL, tools=[WEATHER], parallel_tool_calls=False))
    assert len(r.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("auto", None),
        ("none", None),
        ("required", "lark"),
        ({"type": "function", "function": {"name": "weather"}}, "lark"),
    ],
)
def test_tool_choice(client, server, choice, kind):
    r = client.chat.completions.create(**say(CALL, tools=[WEATHER], tool_choice=choice))
    grammar = server.engine.seen[-1].params.grammar
    assert (grammar.kind if grammar else None) == kind
    assert bool(r.choices[0].message.tool_calls) == (choice != "none")


def test_tool_conversation_goes_back_in(client):
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "developer", "content": [{"type": "text", "text": "be nice"}]},
        {"role": "user", "content": [{"type": "text", "text": "say: thanks"}]},
    ]
    assert (
        client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER]).choices[0].message.content
        == "thanks"
    )


@pytest.mark.parametrize(
    ("response_format", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}, "json_schema"),
    ],
)
def test_response_format(client, server, response_format, kind):
    client.chat.completions.create(**say("{}"), response_format=response_format)
    grammar = server.engine.seen[-1].params.grammar
    assert (grammar.kind if grammar else None) == kind
    if grammar:
        assert grammar.after == tuple(tokenizer().encode("</think>", parse_special=True)), (
            "the grammar starts after the reasoning"
        )


def test_parse_helper_of_the_client(client):
    class City(BaseModel):
        city: str

    r = client.chat.completions.parse(**say('{"city": "Paris"}'), response_format=City)
    assert r.choices[0].message.parsed == City(city="Paris")


def test_logprobs_are_exact_bytes(client):
    r = client.chat.completions.create(**say("日本 wörld"), logprobs=True, top_logprobs=20)
    content = r.choices[0].logprobs.content
    assert bytes(b for t in content[:-1] for b in t.bytes).decode() == "日本 wörld"
    assert all(len(t.top_logprobs) == 20 and t.top_logprobs[-1].logprob == -9999.0 for t in content)
    none = client.chat.completions.create(**say("hello"), logprobs=True).choices[0].logprobs.content
    assert none[0].top_logprobs == []


def test_sampling_parameters_reach_the_engine(client, server):
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "ignore_eos": False,
        "bad_words": ["fox"],
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "logprobs_mode": "processed",
        "priority": 3,
        "prompt_logprobs": 1,
    }
    client.chat.completions.create(
        **say("x"),
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        n=2,
        logit_bias={"5": 1},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body=extra,
    )
    request = server.engine.seen[-1]
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (0.5, 0.9, 7, 0.1, 1.5)
    assert (p.presence_penalty, p.frequency_penalty, p.n, p.min_tokens, p.stop_token_ids) == (1, -1, 2, 1, (5,))
    assert (p.logit_bias, p.allowed_token_ids, p.skip_special_tokens, p.logprobs_mode) == (
        {5: 1.0},
        (1, 2),
        False,
        "processed",
    )
    assert request.priority == 3 and request.seed == (1 << 64) - 1 and request.bad_words and p.prompt_logprobs == 1


def test_completion_forms_of_prompt(client):
    ids = tokenizer().encode("say: hello world")
    for prompt, number in (("say: hello world", 1), (["say: hello world"] * 3, 3), (ids, 1), ([ids, ids], 2)):
        r = client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=30)
        assert [(c.index, c.text, c.finish_reason) for c in r.choices] == [
            (i, "hello world", "stop") for i in range(2 * number)
        ]
        assert r.usage.prompt_tokens == len(ids) * number, "a prompt counts once, however many branches"
        chunks = list(client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=30, stream=True))
        for i in range(2 * number):
            assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) == "hello world"
    assert len({c.text for c in client.completions.create(model="fake", prompt=["a", "b"], n=2, seed=1).choices}) == 4


def test_completion_default_is_16_tokens(client, server):
    client.completions.create(model="fake", prompt="say: x")
    assert server.engine.seen[-1].max_tokens == 16


def test_echo_and_old_logprobs(client):
    r = client.completions.create(model="fake", prompt="say: hello", echo=True, logprobs=2, best_of=1).choices[0]
    assert r.text == "say: hellohello"
    lp = r.logprobs
    assert "".join(lp.tokens[:-1]) == r.text and lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert all(r.text[o:].startswith(t) for t, o in zip(lp.tokens[:-1], lp.text_offset, strict=False))
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset)
    chunks = list(client.completions.create(model="fake", prompt="say: hello", echo=True, logprobs=2, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == r.text
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == lp.tokens
    assert [o for c in chunks for o in c.choices[0].logprobs.text_offset] == lp.text_offset


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(2, 0), (0, 2), (1, 3)])
def test_echo_and_prompt_logprobs_have_the_alternatives_that_each_was_asked_for(client, logprobs, prompt_logprobs):
    asked = dict(model="fake", prompt="say: hello", max_tokens=2, echo=True, logprobs=logprobs)
    alone = client.completions.create(**asked).choices[0]
    both = client.completions.create(**asked, extra_body={"prompt_logprobs": prompt_logprobs}).choices[0]
    assert both.logprobs == alone.logprobs
    asked |= dict(echo=False, extra_body={"prompt_logprobs": prompt_logprobs})
    assert both.prompt_logprobs == client.completions.create(**asked).choices[0].prompt_logprobs


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echoed_logprobs_are_whole_where_another_branch_is_ahead(client, server, max_tokens):
    """The prompt's log-probabilities come with branch 0, although on a busy engine other branches may be first."""
    asked = dict(model="fake", prompt=["say: hello", "x"], n=3, echo=True, logprobs=2, max_tokens=max_tokens)
    usual = client.completions.create(**asked)
    server.engine.backwards = True
    try:
        whole, chunks = client.completions.create(**asked), list(client.completions.create(**asked, stream=True))
    finally:
        server.engine.backwards = False
    assert whole.choices == usual.choices and whole.usage.completion_tokens == usual.usage.completion_tokens
    for choice in usual.choices:
        told = [c.logprobs.token_logprobs for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert sum(told, []) == choice.logprobs.token_logprobs and None not in choice.logprobs.token_logprobs[1:]


def test_offsets_of_an_echoed_prompt_point_into_its_text():
    ids = [*tokenizer().special_ids, *tokenizer().encode("hello wörld")]
    number = len(tokenizer().special_ids)
    hidden = prompt_offsets(tokenizer(), ids, number)
    assert hidden[: number + 1] == [0] * (number + 1), "tokens that the tokenizer added take no room in the text"
    shown = prompt_offsets(tokenizer(), ids, 0)
    assert len(shown) == len(ids) and shown == sorted(shown)


def test_parts_of_characters_share_a_name_and_the_likeliest_still_shows():
    first, other = tokenizer().encode("語", add_special=False)[0], tokenizer().encode("🎉", add_special=False)[0]
    assert first != other and tokenizer().token_text(first) == tokenizer().token_text(other) == "\ufffd"
    for own, likeliest in ((-5.0, -0.5), (-0.25, -4.0)):
        told = completion_logprobs(
            namer(tokenizer()), [TokenLogprob(first, own, 2, [(other, likeliest)])], [first], [0]
        )
        assert told["token_logprobs"] == [own] and told["top_logprobs"] == [{"\ufffd": max(own, likeliest)}]


def test_echo_of_the_prompt_alone(client):
    r = client.completions.create(model="fake", prompt="say: hello", echo=True, logprobs=1, max_tokens=0)
    assert (
        r.choices[0].text == "say: hello" and r.usage.completion_tokens == 0 and r.choices[0].finish_reason == "length"
    )
    assert "".join(r.choices[0].logprobs.tokens) == "say: hello"


def test_prompt_logprobs(client):
    r = client.completions.create(
        model="fake", prompt="say: hello", extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    ).choices[0]
    ids = tokenizer().encode("say: hello")
    assert r.prompt_token_ids == ids and r.prompt_logprobs[0] is None
    assert all(
        str(i) in table and table[str(i)]["rank"] == 1 for i, table in zip(ids[1:], r.prompt_logprobs[1:], strict=True)
    )


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
        {"guided_json": {"type": "object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_grammar": 'start: "a"'},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_structured_outputs(client, server, extra):
    client.completions.create(model="fake", prompt="say: a", extra_body=extra)
    grammar = server.engine.seen[-1].params.grammar
    expected = {
        "json": ("json_schema", '{"type":"object"}'),
        "regex": ("regex", "a+"),
        "choice": ("choice", '["a", "b"]'),
        "grammar": ("lark", 'start: "a"'),
        "json_object": ("json_object", ""),
    }
    name = next(iter(extra.get("structured_outputs") or {next(iter(extra)).removeprefix("guided_"): 0}))
    assert (grammar.kind, grammar.text) == expected[name]


def test_responses(client):
    r = client.responses.create(
        model="fake",
        input="say: <think>hm</think>hello world",
        instructions="be nice",
        max_output_tokens=60,
        store=False,
    )
    assert (
        r.output_text == "hello world"
        and r.status == "completed"
        and [o.type for o in r.output] == ["reasoning", "message"]
    )
    assert r.output[0].content[0].text == "hm" and r.usage.output_tokens_details.reasoning_tokens > 0
    short = client.responses.create(model="fake", input="say: hello world hello", max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"


def test_responses_logprobs_cover_the_text_and_nothing_else(client):
    wanted = dict(
        model="fake",
        input="say: <think>hm</think>hello wörld",
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    r = client.responses.create(**wanted)
    part = r.output[1].content[0]
    covered = b"".join(bytes(t.bytes) for t in part.logprobs).decode()
    assert covered.endswith(part.text) and len(covered) <= len("</think>") + len(part.text), (
        "but for a token that ends the reasoning"
    )
    assert all(len(t.top_logprobs) == 3 for t in part.logprobs)
    events = list(client.responses.create(**wanted, stream=True))
    streamed = [t for e in events if e.type == "response.output_text.delta" for t in e.logprobs]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert (
        [(t.token, t.logprob) for t in streamed]
        == [(t.token, t.logprob) for t in done.logprobs]
        == [(t.token, t.logprob) for t in part.logprobs]
    )
    assert client.responses.create(model="fake", input="say: hello").output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    "more", [{}, {"extra_body": {"stop": ["wör", "zz"]}}, {"max_output_tokens": 9}], ids=["", "stop string", "cut"]
)
def test_responses_logprobs_do_not_depend_on_how_many_tokens_come_at_once(client, server, more):
    """A collected reply comes in pieces of thinking, text, calls and the end together."""
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    asked = dict(
        model="fake",
        input=f"say: <think>hm</think>hello wörld {CALL}",
        tools=[tool],
        include=["message.output_text.logprobs"],
        **more,
    )
    found = []
    for group in (1, 3, 50):
        server.engine.group = group
        try:
            whole = client.responses.create(**asked).output
            events = list(client.responses.create(**asked, stream=True))
        finally:
            server.engine.group = 1
        for output in (whole, events[-1].response.output):
            found.append(
                [
                    (
                        o.type,
                        [
                            (p.text, [(t.token, t.logprob) for t in getattr(p, "logprobs", ())])
                            for p in getattr(o, "content", ())
                        ],
                    )
                    for o in output
                ]
            )
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert [[("".join(e.delta for e in deltas), [(t.token, t.logprob) for e in deltas for t in e.logprobs])]] == [
            parts for kind, parts in found[-1] if kind == "message"
        ]
    assert all(other == found[0] for other in found) and found[0][1][1][0][1], "all alike, and there are some"


def test_responses_stream_tells_the_same_story(client):
    tool = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": f"say: <think>hm</think>calling {CALL}"},
    ]
    whole = client.responses.create(model="fake", input=items, tools=[tool])
    events = list(client.responses.create(model="fake", input=items, tools=[tool], stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events][:2] == ["response.created", "response.in_progress"] and events[
        -1
    ].type == "response.completed"
    final = events[-1].response
    assert [o.type for o in final.output] == [o.type for o in whole.output] == ["reasoning", "message", "function_call"]
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == whole.output_text
        == final.output_text
    )
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == json.loads(whole.output[2].arguments) == {"city": "Paris"}
    added, done = (
        [e.item.id for e in events if e.type == f"response.output_item.{word}"] for word in ("added", "done")
    )
    assert added == done == [o.id for o in final.output]


def test_responses_output_goes_back_in(client, server):
    first = client.responses.create(
        model="fake",
        input=f"say: <think>hm</think>calling {CALL}",
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    )
    again = [
        {"role": "user", "content": "x"},
        *(o.model_dump(exclude_none=True) for o in first.output),
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"},
        {"role": "user", "content": "say: bye"},
    ]
    assert client.responses.create(model="fake", input=again).output_text == "bye"
    prompt = tokenizer().decode(server.engine.seen[-1].prompt_ids, skip_special=False)
    assert prompt.count("<|im_start|>assistant") == 2, "reasoning, text and call are one message"


def test_responses_stream_helper(client):
    with client.responses.stream(model="fake", input="say: hello") as stream:
        assert stream.get_final_response().output_text == "hello"


def test_errors_have_types_the_client_knows(client, server):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(**say("x"), temperature=-1)
    assert e.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert e.value.param == "model" and e.value.code == "model_not_found"


def test_async_client(server):
    asyncio.run(_async_client(server))


async def _async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(**say("hello"), stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream if c.choices]) == "hello"
