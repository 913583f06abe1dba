"""Schemas that end the grammar library's process, sent to a server: each is one 400, and nothing restarts."""

from __future__ import annotations

import psutil
import pytest

from tests.integration.serving import served

LEAST = -(1 << 63)
CRASHES = [
    {"type": "integer", "minimum": LEAST, "maximum": LEAST},
    {"type": "integer", "minimum": LEAST - 5, "maximum": LEAST - 1},
]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), "--tool-call-parser", "hermes") as it:
        yield it


def engines(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {child.pid for child in children if "kvasir.client.engine_process" in child.cmdline()}


def test_schemas_that_crash_the_library_cost_one_400(server):
    def post(path, **body):
        return server.http.post(path, json={"model": "nano", "max_tokens": 20, **body})

    before = engines(server)
    assert len(before) == 1
    for schema in CRASHES:
        parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        function = {"name": "f", "parameters": parameters}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answers = {
            "chat": post("/v1/chat/completions", messages=CHAT, response_format=form),
            "tools": post(
                "/v1/chat/completions",
                messages=CHAT,
                tool_choice="required",
                tools=[{"type": "function", "function": function}],
            ),
            "messages": post(
                "/v1/messages",
                messages=CHAT,
                tool_choice={"type": "any"},
                tools=[{"name": "f", "input_schema": parameters}],
            ),
            "responses": post(
                "/v1/responses", input="hi", tool_choice="required", tools=[{"type": "function", **function}]
            ),
        }
        for name, answer in answers.items():
            # A library that is repaired gives the one number that fits.
            assert answer.status_code in (200, 400), (name, answer.text)
    choice = post("/v1/chat/completions", messages=CHAT, structured_outputs={"choice": ["yes", "no"]})
    assert choice.json()["choices"][0]["message"]["content"] in ("yes", "no")
    assert engines(server) == before
