"""Long texts in any field of a request: refused before they are encoded, and other threads run while one is encoded."""

import httpx
import pytest

from kvasir import LLM, SamplingParams
from kvasir.errors import RequestError
from kvasir.models.guarded import Guarded
from kvasir.types import Grammar
from tests.api.fake_client import tokenizer
from tests.api.running import running

LONG = "x" * 200_000
USER = {"role": "user", "content": "hello"}


def called(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


BODIES = {
    "arguments as text": {"messages": called(f'{{"a": "{LONG}"}}')},
    "arguments as an object": {"messages": called({"a": LONG})},
    "description of a tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
    },
    "template": {"messages": [USER], "chat_template": "{% for _ in range(20000) %}xxxxxxxxxx{% endfor %}"},
    "variable": {"messages": [USER], "chat_template": "{{ more }}", "chat_template_kwargs": {"more": LONG}},
}


@pytest.fixture(scope="module")
def http():
    with running(enable_client_chat_template=True) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_prompt_that_cannot_fit_is_never_encoded(body, http, monkeypatch):
    monkeypatch.setattr(Guarded, "encode", None)
    reply = http.post("/v1/chat/completions", json={"max_tokens": 1, **body})
    assert reply.status_code == 400 and "far more than the context" in reply.json()["error"]["message"], reply.text


def test_arguments_of_too_many_values_are_not_decoded(http):
    reply = http.post("/v1/chat/completions", json={"messages": called(f"[{'1,' * (1 << 20)}1]")})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "messages[1].tool_calls[0].function.arguments", error
    assert "more than 1048576 values" in error["message"]


@pytest.mark.parametrize("text", ['{"enum": [' + "1," * (1 << 20) + "1]}", '{"a":' * 100 + "1" + "}" * 100])
def test_a_schema_as_text_has_the_limits_of_a_body(text, http):
    reply = http.post("/v1/chat/completions", json={"messages": [USER], "guided_json": text})
    error = reply.json()["error"]
    assert reply.status_code in (400, 413) and error["param"] == "guided_json" and "'guided_json'" in error["message"]


def test_other_threads_run_while_a_text_is_encoded(monkeypatch):
    """The library keeps the interpreter to itself while it encodes a text that is not in a batch."""
    backend, batches = tokenizer()._backend._backend, []

    class Watched:
        def encode_batch(self, texts, **options):
            batches.append(list(texts))
            return backend.encode_batch(texts, **options)

        def __getattr__(self, name):
            assert name != "encode"
            return getattr(backend, name)

    made = tokenizer()
    monkeypatch.setattr(made._backend, "_backend", Watched())
    assert made.encode("hello world") == backend.encode("hello world", add_special_tokens=False).ids
    made.prompt_ids("hello")
    made.encode_chat([USER])
    assert len(batches) >= 3


def test_annotations_of_a_schema_do_not_count_in_python():
    note = "x" * (1 << 16)
    short = Grammar("json_schema", f'{{"description": "{note}", "const": "fox"}}')
    with LLM(max_model_len=64) as llm:
        found = llm.generate("Say", SamplingParams(temperature=0, max_tokens=20, grammar=short))
        assert found[0].outputs[0].text == '"fox"'
        for bad, why in (
            (f'{{"enum": ["{note}"]}}', "at most 65536 bytes"),
            (f'{{"description": "{note}", "const": 0.1000000000000000055}}', "at most 65536 bytes"),
            (f'{{"description": "{note}", "type": "null", "type": "array"}}', "stands twice"),
        ):
            with pytest.raises(RequestError, match=why):
                llm.check("Say", SamplingParams(grammar=Grammar("json_schema", bad)))
