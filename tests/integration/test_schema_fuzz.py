"""Random schemas and grammars against a whole server: each can hurt its own request only.

Every example sends several requests with a grammar at once, and a plain chat beside them. Afterwards the server and its
engine are the processes that they were, the chat has its answer, a refusal is a 4xx that names a part of the request,
and an answer that finished satisfies its schema.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.decoding import schemas
from tests.integration.serving import served

AT_ONCE = 5
CHAT = [{"role": "user", "content": "hi"}]
MODEL = {"model": "nano", "seed": 1}
# Parts of a request that a refusal may name.
PARTS = (
    "response_format",
    "structured_outputs",
    "guided_",
    "tools",
    "grammar",
    "text",
    "output_config",
)


def _format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _tool(schema):
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _text(kind, whitespace=None):
    more = {"whitespace": whitespace} if whitespace else {}
    return lambda text: {"structured_outputs": {kind: text, **more}}


there = schemas.schemas.filter(lambda schema: schema is not None)
# What a request says about its output: a field, and the schema that a finished answer satisfies, if there is one.
asked = st.one_of(
    st.tuples(schemas.schemas.map(_format), st.just("format")),
    st.tuples(there.map(_text("json")), st.just("json")),
    st.tuples(there.map(_text("json", "short")), st.just("json")),
    st.tuples(schemas.schemas.map(_tool), st.just("tool")),
    st.tuples(schemas.patterns.map(_text("regex")), st.just("text")),
    st.tuples(schemas.choices.filter(lambda given: given is not None).map(_text("choice")), st.just("choice")),
    st.tuples(st.one_of(schemas.lark, schemas.ebnf).map(_text("grammar")), st.just("text")),
    st.tuples(schemas.values.map(lambda value: {"response_format": value}), st.just("text")),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), "--tool-call-parser", "hermes", "--grammar-timeout", "2") as it:
        yield it


def engines(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {child.pid for child in children if "kvasir.client.engine_process" in child.cmdline()}


def fuzz(server, requests):
    """Send ``requests`` requests with random schemas and grammars. Returns how many of them were refused, finished and
    cut."""
    before, counts = engines(server), {"refused": 0, "finished": 0, "cut": 0}
    assert len(before) == 1
    # Short strings and lists, so that many answers finish.
    ends = {str(i): 6.0 for text in ('"', "}", "]", '"}') for i in tokens(server, text)}
    pool = ThreadPoolExecutor(AT_ONCE + 1)

    def post(fields):
        body = {**MODEL, "messages": CHAT, "max_tokens": 40, "logit_bias": ends, **fields}
        return server.http.post("/v1/chat/completions", json=body)

    @settings(max_examples=requests // AT_ONCE, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(asked, min_size=AT_ONCE, max_size=AT_ONCE))
    def check(batch):
        chat = pool.submit(post, {"max_tokens": 3})
        answers = list(pool.map(lambda one: post(one[0]), batch))
        assert chat.result().status_code == 200, chat.result().text
        for (fields, kind), answer in zip(batch, answers):
            counts[judged(fields, kind, answer)] += 1
        assert server.process.poll() is None
        assert engines(server) == before, "the engine was replaced"

    check()
    return counts


def tokens(server, text):
    return server.http.post("/tokenize", json={"model": "nano", "prompt": text}).json()["tokens"]


def judged(fields, kind, answer):
    """Assert that an answer is right, and return what became of its request."""
    told = (json.dumps(fields), answer.status_code, answer.text)
    body = answer.json()
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, told
        error = body["error"]
        # Bodies that nest too deep, and tools that fill the context, do not reach their schema.
        whole = error["code"] in ("invalid_json", "context_length_exceeded")
        assert error["message"] and (whole or str(error["param"]).startswith(PARTS)), told
        return "refused"
    choice = body["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    text = choice["message"]["content"]
    if kind == "format":
        right(text, fields["response_format"]["json_schema"]["schema"], told)
    elif kind == "json":
        right(text, fields["structured_outputs"]["json"], told)
    elif kind == "choice":
        assert text in fields["structured_outputs"]["choice"], told
    elif kind == "tool":
        [call] = choice["message"]["tool_calls"]
        right(call["function"]["arguments"], fields["tools"][0]["function"]["parameters"], told)
    return "finished"


def right(text, schema, told):
    if isinstance(schema, str):  # a schema as text
        schema = json.loads(schema)
    try:
        found = schemas.is_valid(text, json.dumps(schema))
    except Exception as e:  # the schema means nothing to jsonschema
        raise AssertionError((told, repr(e))) from e
    assert found, told


def test_schemas_at_random(server):
    counts = fuzz(server, 300)
    assert min(counts.values()) > 0, counts


@pytest.mark.slow
def test_many_schemas_at_random(server):
    counts = fuzz(server, 10_000)
    assert min(counts.values()) > 100, counts
