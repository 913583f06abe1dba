"""Requests that no route serves: the reply says what is wrong with the path or method, and what is served. HEAD."""

from __future__ import annotations

import threading

import httpx
import pytest

from kvasir.api.http.not_found import explain_path, served
from tests.api.running import Running, running

CHAT = "/v1/chat/completions"
LACKS, TWICE, DOUBLE, SLASH, NAMES = (
    "the base URL lacks /v1",
    "it has /v1 twice",
    "it has a double slash",
    "it ends in a slash",
    "the base URL names a route",
)


def message(r: httpx.Response, status: int = 404) -> str:
    assert r.status_code == status, r.text[:300]
    return r.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "causes", "route"),
    [
        ("/chat/completions", [LACKS], "POST /v1/chat/completions"),
        ("/models", [LACKS], "GET /v1/models"),
        ("/v1/v1/chat/completions", [TWICE], "POST /v1/chat/completions"),
        ("/v1/v1/messages", [TWICE], "POST /v1/messages"),
        ("/v1/v1/v1/models", [TWICE], "GET /v1/models"),
        ("//v1/chat/completions", [DOUBLE], "POST /v1/chat/completions"),
        ("/v1//chat/completions", [DOUBLE], "POST /v1/chat/completions"),
        ("/v1/chat/completions/", [SLASH], "POST /v1/chat/completions"),
        ("/v1/messages/count_tokens/", [SLASH], "POST /v1/messages/count_tokens"),
        ("/metrics/", [SLASH], "GET /metrics"),
        ("//chat//completions/", [DOUBLE, SLASH, LACKS], "POST /v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", [NAMES], "POST /v1/chat/completions"),
        ("/v1/chat/completions/v1/models", [NAMES], "GET /v1/models"),
    ],
)
def test_each_mistake_in_a_base_url_has_its_sentence(server, path, causes, route):
    text = message(httpx.post(server.url + path, timeout=120))
    assert path in text and f"The route is {route}." in text
    found = [cause for cause in (LACKS, TWICE, DOUBLE, SLASH, NAMES) if cause in text]
    assert sorted(found) == sorted(causes)


@pytest.mark.parametrize(
    ("path", "whose", "route"),
    [
        ("/api/chat", "Ollama's", "POST /v1/chat/completions"),
        ("/api/generate", "Ollama's", "POST /v1/completions"),
        ("/v1/api/chat", "Ollama's", "POST /v1/chat/completions"),
        ("/api/tags", "Ollama's", "GET /v1/models"),
        ("/generate_stream", "TGI's", "POST /v1/completions"),
        ("/completion", "llama.cpp's", "POST /v1/completions"),
        ("/openai/deployments/gpt-4/chat/completions", "Azure's", "POST /v1/chat/completions"),
        ("/v1beta/models/gemini:generateContent", "Gemini's", "POST /v1/chat/completions"),
    ],
)
def test_the_apis_of_other_servers_are_known(http, path, whose, route):
    text = message(http.post(path, json={}))
    assert f"that is {whose}" in text and f"Use {route} " in text and "http://HOST:PORT/v1" in text


def test_everything_that_is_served_is_listed_with_the_nearest(http, server):
    text = message(http.get("/v1/chat/completion"))
    assert "The nearest route is POST /v1/chat/completions." in text
    for route in served(server.app.routes):
        assert route.path.replace(":path", "") in text.partition("Served: ")[2], route.path
    assert "nearest" not in message(http.get("/qwertz")) and "it is the base URL" in message(http.get("/v1/"))
    assert "enable-tokenizer-info-endpoint" in message(http.get("/tokenizer_info"))


def test_models_with_a_slash_at_the_end(http):
    assert "The route is GET /v1/models." in message(http.get("/v1/models/"))
    assert "The route is GET /v1/models/fake." in message(http.get("/v1/models/fake/"))


def test_a_path_is_repeated_in_short_and_a_wild_one_is_quick(server):
    routes = served(server.app.routes)
    for path in ("/" + "a" * 5000, "/v1" * 1500, "/" * 5000, "/v1/chat/completions" * 200, "/\x00\udcff"):
        assert len(explain_path(path, routes)) < 2500


def test_405_names_the_methods(http):
    r = http.get(CHAT)
    assert message(r, 405) == f"GET is not served at {CHAT}; use POST" and r.headers["allow"] == "POST"
    r = http.put("/v1/scaling/runs/x")
    assert message(r, 405).endswith("use DELETE or GET") and r.headers["allow"] == "DELETE, GET, HEAD"


def test_head_is_get_without_the_body(http, server):
    paths = {r.path.replace("{name:path}", "fake") for r in served(server.app.routes) if "GET" in r.methods}
    assert {"/", "/v1/models", "/v1/models/fake", "/health", "/metrics", "/ping"} <= paths
    for path in sorted(paths):
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code and head.content == b"", path
        assert head.headers["content-type"] == get.headers["content-type"] if get.content else True, path
    assert http.head(CHAT).status_code == 405
    # The connection stays usable: no body was sent that a reader would take for the next reply.
    assert http.get("/version").status_code == 200


def test_head_of_a_stream_ends_it():
    """The route streams for ever; the reader is gone after the head."""
    from kvasir.api.http.streaming import EventStream

    ended = threading.Event()

    async def events():
        import asyncio

        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0.01)

    async def close() -> None:
        ended.set()

    async def route():
        return EventStream(events(), close, {})

    server: Running
    with running() as server:
        server.app.add_api_route("/forever", route, methods=["GET"])
        r = httpx.head(server.url + "/forever", timeout=60)
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        assert ended.wait(60)


def test_ping_is_health_under_sagemakers_name():
    with running(api_key=("k",)) as server:
        for method in ("GET", "POST", "HEAD"):
            r = httpx.request(method, server.url + "/ping", timeout=120)
            assert (r.status_code, r.content) == (200, b"")
        server.engine.ready = False
        assert httpx.get(server.url + "/ping", timeout=120).status_code == 503


def test_tokenizer_info_behind_its_flag():
    with running(enable_tokenizer_info_endpoint=True, api_key=("k",)) as server:
        assert httpx.get(server.url + "/tokenizer_info", timeout=120).status_code == 401
        info = httpx.get(server.url + "/tokenizer_info", headers={"x-api-key": "k"}, timeout=120).json()
        assert info["eos_token"] == "<|im_end|>" and "<|im_start|>" in info["chat_template"] and info["tokenizer_class"]
