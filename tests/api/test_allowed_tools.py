"""``tool_choice`` of the type allowed_tools, as OpenAI documents it for chat and for responses."""

from __future__ import annotations

import json

import pytest

from kvasir.api.calls.choice import MAX_ALLOWED, validate
from kvasir.errors import RequestError
from tests.api.fake_client import tokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NAMES = ("weather", "clock", "mail")
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": EMPTY}} for name in NAMES]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def allowed(mode: str, *names: str, flat: bool = False) -> dict:
    if flat:
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}
    named = [{"type": "function", "function": {"name": n}} for n in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def asked(http, server, route: str, choice, text: str = "say: hello", **more):
    """The grammar and the prompt that the engine got, and the answer."""
    if route == CHAT:
        body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "max_tokens": 300}
    else:
        body = {"input": text, "tools": FLAT, "max_output_tokens": 300}
    r = http.post(route, json={**body, "tool_choice": choice, **more})
    assert r.status_code == 200, r.text
    seen = server.engine.seen[-1]
    return seen.params.grammar, tokenizer().decode(seen.prompt_ids, skip_special=False), r.json()


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_required_calls_some_of_the_allowed_and_keeps_the_prompt(http, server, route):
    flat = route == RESPONSES
    grammar, prompt, found = asked(http, server, route, allowed("required", "clock", "mail", flat=flat))
    every, same, _ = asked(http, server, route, "required")
    assert prompt == same, "the cached prefix would be lost"
    assert [name for name in NAMES if name in grammar.text] == ["clock", "mail"]
    assert all(name in every.text for name in NAMES), "negative control"
    if flat:
        assert found["tool_choice"] == allowed("required", "clock", "mail", flat=True)


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_auto_shows_the_allowed_alone(http, server, route):
    flat = route == RESPONSES
    grammar, prompt, _ = asked(http, server, route, allowed("auto", "clock", flat=flat))
    assert grammar is None and [name for name in NAMES if name in prompt] == ["clock"]
    _, prompt, _ = asked(http, server, route, allowed("auto", flat=flat))
    assert not any(name in prompt for name in NAMES)
    _, prompt, _ = asked(http, server, route, "auto")
    assert all(name in prompt for name in NAMES), "negative control"


def test_auto_with_a_format_calls_the_allowed_or_answers(http, server):
    asks = {"response_format": {"type": "json_object"}}
    grammar, _, _ = asked(http, server, CHAT, allowed("auto", "mail"), **asks)
    assert "only_text" in grammar.text and [name for name in NAMES if name in grammar.text] == ["mail"]
    bad = [*TOOLS[:2], {"type": "function", "function": {"name": "mail", "parameters": {"not": {}, "type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": bad, "tool_choice": allowed("auto", "mail")}
    r = http.post(CHAT, json={**body, **asks})
    assert r.status_code == 400 and r.json()["error"]["param"].startswith("tools[2]"), "the client's own place"


def test_tools_of_other_kinds_are_left_out(http, server):
    choice = allowed("auto", "clock", flat=True)
    choice["tools"].append({"type": "mcp", "server_label": "x"})
    _, prompt, _ = asked(http, server, RESPONSES, choice)
    assert [name for name in NAMES if name in prompt] == ["clock"]


@pytest.mark.parametrize(
    "choice, param",
    [
        (allowed("auto", "telegraph"), "tool_choice.allowed_tools.tools"),
        (allowed("required"), "tool_choice.allowed_tools.tools"),
        (allowed("always", "clock"), "tool_choice.allowed_tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": {}}}, "tool_choice.allowed_tools"),
        (allowed("auto", *["clock"] * (MAX_ALLOWED + 1)), "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": ["function"]}]}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else json.dumps(x)[:60],
)
def test_what_it_cannot_mean(choice, param):
    with pytest.raises(RequestError) as e:
        validate(TOOLS, choice)
    assert (e.value.status, e.value.param) == (400, param)
    with pytest.raises(RequestError):
        validate(None, allowed("required", "clock"))


def test_errors_of_responses_name_places_there(http):
    for choice, says in (
        (allowed("auto", "telegraph", flat=True), "telegraph"),
        (allowed("x", flat=True), "{type: 'f"),
    ):
        r = http.post(RESPONSES, json={"input": "x", "tools": FLAT, "tool_choice": choice})
        error = r.json()["error"]
        assert (
            r.status_code == 400 and error["param"] in ("tool_choice", "tool_choice.tools") and says in error["message"]
        )
        assert "function: {name}" not in error["message"]


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_a_body_may_begin_with_a_byte_order_mark(http, route):
    body = {"messages": [{"role": "user", "content": "é"}]} if route == CHAT else {"input": "é"}
    sent = json.dumps(body, ensure_ascii=False).encode("utf-8-sig")
    r = http.post(route, content=sent, headers={"content-type": "application/json"})
    assert r.status_code == 200, r.text
    for bad in (sent[:3], sent[:3] + sent, json.dumps(body).encode("utf-16")):
        r = http.post(route, content=bad, headers={"content-type": "application/json"})
        assert r.status_code == 400 and r.json()["error"]["code"] == "invalid_json"
