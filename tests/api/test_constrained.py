"""Constrained output as clients ask for it: a format next to tools, EBNF, whitespace, and schemas served in part."""

from __future__ import annotations

import pytest

from kvasir.types import Grammar
from tests.api.fake_client import tokenizer

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
THINKING = tuple(tokenizer().encode("</think>", parse_special=True))


def asked(http, server, **body) -> tuple[Grammar | None, str]:
    """The grammar that the engine was given, and the warning header."""
    r = http.post(CHAT, json={"messages": [{"role": "user", "content": "say: {}"}], "max_tokens": 4, **body})
    assert r.status_code == 200, r.text
    return server.engine.seen[-1].params.grammar, r.headers.get("warning", "")


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def test_strict_false_leaves_out_what_no_grammar_holds(http, server):
    r = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], "response_format": json_schema(SCHEMA)})
    assert r.status_code == 400 and "#/properties/tags/uniqueItems" in r.json()["error"]["message"]
    assert r.json()["error"]["param"] == "response_format"
    grammar, warning = asked(http, server, response_format=json_schema(SCHEMA, strict=False))
    assert "uniqueItems" not in grammar.text and "response_format/properties/tags/uniqueItems" in warning
    grammar, warning = asked(http, server, structured_outputs={"json": SCHEMA, "strict": False})
    assert "uniqueItems" not in grammar.text and "structured_outputs.json/properties/tags/uniqueItems" in warning
    _, warning = asked(http, server, response_format=json_schema({"type": "string", "format": "color"}))
    assert not warning, "an unknown format is an annotation"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_tool_comes_before_the_format(http, server, choice):
    alone, _ = asked(http, server, tools=[TOOL], tool_choice=choice)
    both, _ = asked(http, server, tools=[TOOL], tool_choice=choice, response_format=json_schema({"type": "object"}))
    assert both == alone and both.kind == "lark"


def test_tools_on_offer_and_a_format(http, server):
    grammar, _ = asked(http, server, tools=[TOOL], response_format=json_schema({"type": "object"}))
    assert grammar.kind == "lark" and "only_calls | only_text" in grammar.text and grammar.after == THINKING
    grammar, _ = asked(http, server, tools=[TOOL], tool_choice="none", response_format={"type": "json_object"})
    assert grammar.kind == "json_object"
    assert asked(http, server, tools=[TOOL])[0] is None
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    offered = [{"type": "function", "function": {"name": "g", "parameters": bad, "strict": False}}]
    _, warning = asked(http, server, tools=offered, response_format={"type": "json_object"})
    assert "tools[0].function.parameters/properties/a/not" in warning


@pytest.mark.parametrize(
    "constraint, whitespace",
    [
        ({}, "fixed"),
        ({"whitespace": "any"}, "any"),
        ({"whitespace": "fixed"}, "fixed"),
        ({"disable_any_whitespace": True}, "fixed"),
        ({"disable_any_whitespace": False}, "short"),
    ],
)
def test_whitespace(http, server, constraint, whitespace):
    grammar, _ = asked(http, server, response_format={"type": "json_object"}, structured_outputs=constraint)
    assert grammar == Grammar("json_object", "", THINKING, whitespace)
    grammar, _ = asked(http, server, structured_outputs={"json": {"type": "object"}, **constraint})
    assert grammar.whitespace == whitespace


def test_ebnf_and_lark_are_told_apart(http, server):
    for text, kind in {
        'root ::= "a" | b\nb ::= "::="': "ebnf",
        '  root  ::= "a"': "ebnf",
        'start: "a"': "lark",
        'start: "x ::= y"': "lark",
    }.items():
        for body in ({"guided_grammar": text}, {"structured_outputs": {"grammar": text}}):
            assert asked(http, server, **body)[0].kind == kind


def test_the_responses_route(http, server):
    offered = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}]
    body = {"input": "say: {}", "store": False, "text": {"format": {"type": "json_object"}}, "tools": offered}
    r = http.post("/v1/responses", json=body)
    assert r.status_code == 400 and r.json()["error"]["param"] == "tools[0].parameters"
    offered[0]["parameters"] = TOOL["function"]["parameters"]
    assert http.post("/v1/responses", json=body).status_code == 200
    assert "only_calls | only_text" in server.engine.seen[-1].params.grammar.text


def test_tools_with_branches_and_large_numbers(http, server):
    branches = [{"type": "object", "properties": {n: {"type": "string"}}, "required": [n]} for n in "ab"]
    parameters = {"type": "object", "properties": {"x": {"oneOf": branches}, "n": {"enum": [1234567890123456789]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar, _ = asked(http, server, tools=[tool], tool_choice="required")
    assert "oneOf" not in grammar.text and "1234567890123456789" in grammar.text
