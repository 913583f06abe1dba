"""/v1/messages and /v1/messages/count_tokens on the wire: bodies, events, errors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest

from kvasir.api.protocols.messages_protocol import CountTokensBody
from kvasir.api.protocols.routes_messages import AskedPrompt, MessagesJob
from kvasir.errors import RequestError
from tests.api.fake_client import FakeClient, tokenizer
from tests.api.running import Running, key, running
from tests.api.test_bad_input import RAW
from tests.api.test_messages_translation import assembled

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
THINKING = f"<think>first think\n</think>\n\nhello wörld 日本 {CALL}\n{CALL}"


def say(text: str, **more) -> dict:
    return {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": f"say: {text}"}], **more}


def ask(http: httpx.Client, text: str, **more) -> dict:
    r = http.post(PATH, json=say(text, **more))
    assert r.status_code == 200, r.text
    return r.json()


def events_of(http: httpx.Client, body: dict) -> list[dict]:
    r = http.post(PATH, json={**body, "stream": True})
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), r.text
    events = []
    for block in r.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(server: Running) -> str:
    return tokenizer().decode(server.engine.seen[-1].prompt_ids, skip_special=False)


def refused(r: httpx.Response, status: int, kind: str, *words: str) -> None:
    assert r.status_code == status, r.text[:300]
    body = r.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"] == r.headers["request-id"] == r.headers["x-request-id"]
    for word in words:
        assert word in body["error"]["message"]


# ------------------------------------------------------------------------------------------------------------- messages


def test_the_whole_reply(http):
    r = http.post(PATH, json=say("hello world"), headers={"anthropic-version": "2023-06-01", "x-request-id": "mine"})
    body = r.json()
    assert r.headers["request-id"] == r.headers["x-request-id"] == "mine" and body.pop("id").startswith("msg-mine-")
    prompt = len(tokenizer().encode_chat(say("hello world")["messages"]))
    usage = body.pop("usage")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == len(tokenizer().encode("hello world")) + 1
    assert http.post(PATH + "?beta=true", json=say("x"), headers={"anthropic-beta": "a,b"}).status_code == 200


@pytest.mark.parametrize("group", [1, 3, 50])
def test_a_stream_equals_the_collected_reply(http, server, group):
    body = say(THINKING, tools=[WEATHER], seed=1)
    whole = http.post(PATH, json=body).json()
    server.engine.group = group
    try:
        events = events_of(http, body)
    finally:
        server.engine.group = 1
    start, ping, *content, delta, stop = events
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert (
        delta["delta"]
        == {k: whole[k] for k in ("stop_reason", "stop_sequence")}
        == {
            "stop_reason": "tool_use",
            "stop_sequence": None,
        }
    )
    counts = ("output_tokens", "output_tokens_details")
    assert {k: delta["usage"][k] for k in counts} == {k: whole["usage"][k] for k in counts}
    blocks = [{**b, "id": ""} if "id" in b else b for b in assembled(content)]
    assert blocks == [{**b, "id": ""} if "id" in b else b for b in whole["content"]]
    assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "first think" and blocks[2]["input"] == {"city": "Paris"}
    ids = [b["id"] for b in whole["content"] if "id" in b]
    assert len(set(ids)) == 2 and all(i.startswith("toolu_") for i in ids)


def test_a_reply_goes_back_in(http, server):
    first = ask(http, THINKING, tools=[WEATHER])
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "sunny"}
        for b in first["content"]
        if b["type"] == "tool_use"
    ]
    turns = [
        *say("x")["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "say: bye"}]},
    ]
    assert ask(http, "", messages=turns)["content"] == [{"type": "text", "text": "bye"}]
    prompt = prompt_of(server)
    assert prompt.count("<|im_start|>assistant") == 2 and prompt.count("<|im_start|>tool\nsunny") == 2
    assert prompt.count('{"name": "weather", "arguments": {"city": "Paris"}}') == 2


def test_usage_tells_the_cached_tokens_from_the_first_event_on(http):
    body = say("several cached words")
    first, second = (events_of(http, body) for _ in range(2))
    prompt = first[0]["message"]["usage"]["input_tokens"]
    for usage in (second[0]["message"]["usage"], second[-2]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, prompt - 1)
        assert usage["cache_creation_input_tokens"] == 0


def test_how_it_stops(http, server):
    stopped = ask(http, "hello world of words", stop_sequences=["zzz", " of"])
    assert stopped["content"][0]["text"] == "hello world"
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " of")
    assert server.engine.cancelled, "the engine must be told"
    assert events_of(http, say("a world of", stop_sequences=[" of"]))[-2]["delta"]["stop_sequence"] == " of"
    cut = ask(http, "hello world hello world", max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 2)


def test_a_call_that_is_cut_is_not_to_be_made(http):
    body = say(CALL, tools=[WEATHER], max_tokens=len(tokenizer().encode(CALL, parse_special=True)) - 4)
    whole = http.post(PATH, json=body).json()
    assert whole["stop_reason"] == events_of(http, body)[-2]["delta"]["stop_reason"] == "max_tokens"
    assert whole["content"][0]["name"] == "weather" and whole["content"][0]["input"] == {}


def test_an_empty_answer_has_a_text(http):
    assert ask(http, "hello", stop_sequences=["h"])["content"] == [{"type": "text", "text": ""}]


# ----------------------------------------------------------------------------------------------------------- parameters


def test_system_and_cache_control_on_anything(http, server):
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = say(
        "fine",
        system=[{"type": "text", "text": "be nice", **cached}],
        tools=[{**WEATHER, **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "say: fine", **cached}]}],
        metadata={"user_id": "u"},
        service_tier="auto",
        **cached,
    )
    r = http.post(PATH, json=body)
    assert r.status_code == 200 and r.json()["content"][0]["text"] == "fine" and "warning" not in r.headers
    assert "<|im_start|>system\nbe nice" in prompt_of(server) and "ephemeral" not in prompt_of(server)
    ask(http, "x", system="be brief")
    assert "<|im_start|>system\nbe brief" in prompt_of(server)


@pytest.mark.parametrize(
    ("choice", "forced", "offered"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "weather"}, True, True),
    ],
)
def test_tool_choice(http, server, choice, forced, offered):
    found = ask(http, CALL * 2, tools=[WEATHER], tool_choice=choice, thinking={"type": "disabled"})
    grammar = server.engine.seen[-1].params.grammar
    assert (grammar is not None) == forced and ("Weather of a city" in prompt_of(server)) == offered
    if not offered:
        assert found["content"][0]["type"] == "text"
    alone = choice.get("disable_parallel_tool_use")
    assert [b["type"] for b in found["content"]].count("tool_use") == (0 if not offered else 1 if alone else 2)


def test_parallel_calls_can_be_ruled_out_with_auto(http):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(http, CALL * 2, tools=[WEATHER], tool_choice=choice)["content"]) == 1


def test_thinking(http, server):
    off = ask(http, "answer", thinking={"type": "disabled"})
    assert off["content"] == [{"type": "text", "text": "answer"}]
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")
    for thinking in ({"type": "enabled"}, {"type": "adaptive"}, None):
        on = ask(http, "<think>hm</think>answer", **({"thinking": thinking} if thinking else {}))
        assert [b["type"] for b in on["content"]] == ["thinking", "text"] and on["content"][0]["thinking"] == "hm"
        assert (
            not prompt_of(server).endswith("</think>\n\n") and on["usage"]["output_tokens_details"]["thinking_tokens"]
        )
    hidden = say("<think>hm</think>answer", thinking={"type": "adaptive", "display": "omitted"})
    events = events_of(http, hidden)
    assert http.post(PATH, json=hidden).json()["content"][0]["thinking"] == ""
    assert "thinking_delta" not in [e.get("delta", {}).get("type") for e in events]
    both = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    ask(http, "x", **both)
    assert not prompt_of(server).endswith("</think>\n\n"), "the template's own variable is the more exact word"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].web_search_20250305"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)
def test_what_is_ignored_stands_in_a_header(http, more, named):
    for path in (PATH, COUNT):
        body = say("x", **more)
        r = http.post(path, json=body if path == PATH else {k: v for k, v in body.items() if k != "max_tokens"})
        assert r.status_code == 200 and f"ignored parameters: {named}" in r.headers["warning"], r.text


@pytest.mark.parametrize(
    ("reads", "thinks", "thinking", "variables", "ignored"),
    [
        ({"enable_thinking"}, True, "disabled", {"enable_thinking": False}, []),
        ({"thinking", "reasoning_effort"}, True, "enabled", {"thinking": True, "reasoning_effort": "low"}, []),
        (set(), True, "disabled", {}, ["thinking.type"]),
        (set(), True, "adaptive", {}, []),
        (set(), False, "enabled", {}, ["thinking.type"]),
        (set(), False, "disabled", {}, []),
    ],
)
def test_templates_get_the_variables_that_they_read(reads, thinks, thinking, variables, ignored):
    service = SimpleNamespace(text=SimpleNamespace(reads=reads, reasoning=lambda ids: object() if thinks else None))
    body = CountTokensBody(messages=[{"role": "user"}], thinking={"type": thinking}, output_config={"effort": "low"})
    asked = AskedPrompt.__new__(AskedPrompt)
    asked.ignored = []
    assert asked._thinking(service, body) == variables
    assert asked.ignored == ignored + ([] if "reasoning_effort" in reads else ["output_config.effort"])


def test_output_format_is_a_grammar(http, server):
    ask(http, "{}", output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    grammar = server.engine.seen[-1].params.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.text) == SCHEMA


def test_sampling_parameters(http, server):
    ask(http, "x", temperature=0.25, top_p=0.5, top_k=7, seed=3, min_p=0.1)
    p = server.engine.seen[-1].params
    assert (p.temperature, p.top_p, p.top_k, p.seed, p.min_p, p.max_tokens) == (0.25, 0.5, 7, 3, 0.1, 200)


def test_a_last_message_of_the_assistant_is_continued(http, server):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say: the rest"}]
    ask(http, "", messages=turns)
    prompt = prompt_of(server)
    assert prompt.endswith("<|im_start|>assistant\nsay: the rest"), "the turn is open, and the text is its beginning"
    choice = {"type": "tool", "name": "weather"}
    ask(http, "", messages=turns, tools=[WEATHER], tool_choice=choice)
    assert server.engine.seen[-1].params.grammar.after == (), "there is no thinking to wait for"
    turns[1]["content"] = "<|im_end|>"
    ask(http, "", messages=turns)
    assert tokenizer().token_to_id("<|im_end|>") not in server.engine.seen[-1].prompt_ids[-8:], "text, not a token"
    turns[1]["content"] = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
    refused(http.post(PATH, json=say("", messages=turns)), 400, "invalid_request_error", "which thinking rules out")


# --------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "be nice", "tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so far"}]},
    ],
)
def test_the_count_is_that_of_the_prompt(http, more):
    body = say("hello", **more)
    usage = http.post(PATH, json=body).json()["usage"]
    r = http.post(COUNT, json={k: v for k, v in body.items() if k != "max_tokens"})
    assert r.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert r.headers["request-id"]


def test_a_conversation_longer_than_the_context_is_counted(http):
    turns = [{"role": "user", "content": "hello world " * 1000}]
    assert http.post(COUNT, json={"messages": turns}).json()["input_tokens"] > 1024
    refused(http.post(PATH, json={"messages": turns, "max_tokens": 5}), 400, "invalid_request_error", "1024")
    huge = [{"role": "user", "content": "x" * (1 << 20)}]
    refused(http.post(COUNT, json={"messages": huge}), 400, "invalid_request_error", "far more than the context")


# --------------------------------------------------------------------------------------------------------------- errors

BAD = {
    "no body": (b"", ["empty"]),
    "array": (b"[]", ["object"]),
    "not json": (b"{", ["JSON"]),
    "no messages": ({"max_tokens": 5}, ["'messages' is required"]),
    "empty messages": ({"max_tokens": 5, "messages": []}, ["messages"]),
    "no max_tokens": ({"messages": say("x")["messages"]}, ["'max_tokens' is required"]),
    "max_tokens 0": (say("x", max_tokens=0), ["max_tokens"]),
    "max_tokens bool": (say("x", max_tokens=True), ["max_tokens"]),
    "max_tokens beyond": (say("x", max_tokens=5000), ["max_tokens", "1024"]),
    "temperature": (say("x", temperature=-1), ["temperature"]),
    "unknown": (say("x", stop_sequence=["a"]), ["'stop_sequence'", "Did you mean 'stop_sequences'?"]),
    "n": (say("x", n=2), ["'n'"]),
    "stop empty": (say("x", stop_sequences=[""]), ["stop_sequences"]),
    "stop many": (say("x", stop_sequences=["a"] * 99), ["stop_sequences"]),
    "both stops": (say("x", stop_sequences=["a"], stop=["b"]), ["stop"]),
    "image": (
        say("x", messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ["image", "text only"],
    ),
    "role": (
        say("x", messages=[{"role": "assistent", "content": "x"}]),
        ["messages[0].role", "Did you mean 'assistant'"],
    ),
    "system": (say("x", system=[{"type": "image"}]), ["system[0]"]),
    "tool name": (say("x", tools=[{**WEATHER, "name": "a b"}]), ["tools[0].name"]),
    "tool schema": (say("x", tools=[{"name": "f"}]), ["tools[0].input_schema"]),
    "tool twice": (say("x", tools=[WEATHER, WEATHER]), ["weather"]),
    "tool type": (say("x", tools=[{**WEATHER, "input_schema": {"type": "array"}}]), ["tools[0].input_schema"]),
    "choice word": (say("x", tool_choice={"type": "required"}), ["tool_choice.type"]),
    "choice string": (say("x", tool_choice="auto"), ["tool_choice"]),
    "choice absent": (say("x", tools=[WEATHER], tool_choice={"type": "tool", "name": "f"}), ["tool_choice", "'f'"]),
    "choice without tools": (say("x", tool_choice={"type": "any"}), ["there are no tools"]),
    "thinking": (say("x", thinking={"type": "on"}), ["thinking.type"]),
    "budget": (say("x", thinking={"type": "enabled", "budget_tokens": 0}), ["thinking.budget_tokens"]),
    "format": (say("x", output_config={"format": {"type": "json_schema"}}), ["output_config.format"]),
    "two grammars": (
        say("{}", output_config={"format": {"type": "json_schema", "schema": {}}}, guided_regex="a"),
        ["only one constraint"],
    ),
    "priority": (say("x", priority="high"), ["priority"]),
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_raw_bodies(http, server, path, name):
    """The catalogue of the other routes, in this form."""
    body, status = RAW[name]
    kind = "request_too_large" if status == 413 else "invalid_request_error"
    refused(http.post(path, content=body, headers={"content-type": "application/json"}), status, kind)
    server.idle()


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(http, server, name):
    body, words = BAD[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for stream in (False, True):
        if stream and not isinstance(body, bytes):
            content = json.dumps({**body, "stream": True}).encode()
        r = http.post(PATH, content=content, headers={"content-type": "application/json"})
        refused(r, 400, "invalid_request_error", *words)
    assert ask(http, "fine")["content"][0]["text"] == "fine"
    server.idle()


def test_every_status_has_anthropics_form(http, server):
    refused(http.post(PATH, json=say("x", model="other")), 404, "not_found_error", "'other'", "'fake'")
    refused(http.get(PATH), 405, "invalid_request_error", "use POST")
    refused(http.post("/v1/messages/batches", json={}), 404, "not_found_error", "no route serves")
    refused(http.post("/v1/v1/messages", json={}), 404, "not_found_error", "/v1 twice")
    refused(httpx.post(f"{server.url}//v1/messages/", json={}, timeout=120), 404, "not_found_error", "double slash")
    for path in ("/v1/models/messages", "/v1/messages2"):
        assert set(http.get(path).json()["error"]) == {"message", "type", "param", "code"}, "OpenAI's form"
    refused(http.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
    big = b'{"a": "' + b"x" * (17 << 20) + b'"}'
    for path in (PATH, COUNT):
        r = http.post(path, content=big, headers={"content-type": "application/json"})
        refused(r, 413, "request_too_large", "bytes")
    for status, ours, kind in (
        (429, 429, "rate_limit_error"),
        (503, 529, "overloaded_error"),
        (422, 400, "invalid_request_error"),
        (500, 500, "api_error"),
    ):
        server.engine.refusal = RequestError("full", status=status, code="x")
        for stream in (False, True):
            r = http.post(PATH, json=say("x", stream=stream))
            refused(r, ours, kind, "full")
            assert ("retry-after" in r.headers) == (status in (429, 503))
    server.engine.refusal = None


def test_an_error_in_a_stream_is_an_event(http, server):
    server.engine.failure, server.engine.fail_after = RequestError("broke", status=500, code="internal_error"), 2
    try:
        r = http.post(PATH, json=say("hello world of words", stream=True))
        collected = http.post(PATH, json=say("hello world of words"))
    finally:
        server.engine.failure = None
    name, data = r.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "broke"},
        "request_id": r.headers["request-id"],
    }
    refused(collected, 500, "api_error", "broke")
    server.idle()


def test_a_bug_in_a_stream_is_an_event_too(http, server, monkeypatch):
    async def broken(self, generation):
        yield {"type": "ping"}
        raise KeyError("x")

    monkeypatch.setattr(MessagesJob, "_steps", broken)
    last = http.post(PATH, json=say("x", stream=True)).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and "internal error" in last and "KeyError" not in last
    server.idle()


def test_keys_limits_and_phases():
    engine = FakeClient()
    with (
        running(engine, api_key=("k",), max_concurrent_per_key=1) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        for path in (PATH, COUNT):
            r = http.post(path, json=say("x"), headers={"x-api-key": "no"})
            refused(r, 401, "authentication_error", "x-api-key: KEY")
        assert http.post(PATH, json=say("x"), headers={"x-api-key": "k"}).status_code == 200
        assert http.post(PATH, json=say("x"), headers=key("k")).status_code == 200
        engine.delay = 0.05
        with http.stream("POST", PATH, json=say("several words here", stream=True), headers={"x-api-key": "k"}) as r:
            lines = r.iter_lines()
            next(lines)
            refused(http.post(PATH, json=say("x"), headers={"x-api-key": "k"}), 429, "rate_limit_error", "1 requests")
        server.idle()
        server.call(lambda: server.loop.create_task(server.service.stop(0.0)))
        server.until(lambda: server.service.phase == "draining")
        r = http.post(PATH, json=say("x"), headers={"x-api-key": "k"})
        refused(r, 529, "overloaded_error", "shutting down")
        assert int(r.headers["retry-after"]) >= 1


def test_a_silent_stream_is_pinged(monkeypatch):
    monkeypatch.setattr("kvasir.api.http.streaming.PING_SECONDS", 0.02)
    engine = FakeClient()
    engine.delay = 0.3
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        kinds = [e["type"] for e in events_of(http, say("hello world"))]
        chat = http.post("/v1/chat/completions", json={"messages": say("hello")["messages"], "stream": True}).text
    assert kinds.index("message_start") > 1 and set(kinds[: kinds.index("message_start")]) == {"ping"}
    assert kinds.count("ping") > 4 and kinds[-1] == "message_stop"
    assert "ping" not in chat, "the other protocols have no such event"


def test_the_prompt_is_that_of_the_same_conversation_over_chat(http, server):
    """Both protocols meet one model: the same tokens, and so one prefix in the cache."""
    function = {"name": "weather", "description": WEATHER["description"], "parameters": SCHEMA}
    arguments = json.dumps({"city": "Zürich"}, ensure_ascii=False)
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat = {
        "messages": [
            {"role": "system", "content": "be nice"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "look", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
            {"role": "user", "content": "say: fine"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "look"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]},
        {"role": "user", "content": "say: fine"},
    ]
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert ask(http, "", messages=turns, system="be nice", tools=[WEATHER])["content"][0]["text"] == "fine"
    assert server.engine.seen[-1].prompt_ids == server.engine.seen[-2].prompt_ids
    ask(http, "", messages=turns, system="be nicer", tools=[WEATHER])
    assert server.engine.seen[-1].prompt_ids != server.engine.seen[-2].prompt_ids
