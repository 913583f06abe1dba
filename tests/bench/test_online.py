"""``kvasir bench serve`` against a small server with scripted answers: arrivals, latencies, failures."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest
import uvicorn

from kvasir.bench import online
from kvasir.bench.online import Sample, summarise
from kvasir.errors import ConfigError


class Fake:
    """An ASGI app with scripted replies.

    ``behaviour(number)`` returns a status or the chunks of the stream; "cut" breaks the connection.
    """

    def __init__(self):
        self.bodies, self.keys, self.hold = [], [], 0
        self.models = (200, {"data": [{"id": "m"}]})
        self.behaviour = lambda number: [*(chunk(text) for text in "abc"), usage(3)]

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.keys.append(dict(scope["headers"]).get(b"authorization"))
        if scope["method"] == "GET":
            return await self.reply(send, *self.models)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(json.loads(body))
        answer = self.behaviour(len(self.bodies) - 1)
        while len(self.bodies) < self.hold:
            await asyncio.sleep(0.005)
        if isinstance(answer, int):
            return await self.reply(send, answer, {"error": {"message": "no"}})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for part in answer:
            if part == "cut":
                raise ConnectionError("as the test asked")
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(part)}\n\n".encode(), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def reply(self, send, status, value):
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})


def chunk(text):
    return {"choices": [{"index": 0, "text": text}]}


def usage(count):
    return {"choices": [], "usage": {"completion_tokens": count}}


@pytest.fixture
def fake():
    app = Fake()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(512)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    app.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    yield app
    server.should_exit = True
    thread.join(60)
    sock.close()


def load(app, num_requests=4, rate=0.0, key=None):
    return asyncio.run(online.load(app.url, rate, num_requests, 5, 3, key))


def test_every_request_is_sent_as_said(fake):
    found = load(fake, key="k")
    assert found["requests_by_status"] == {"200": 4}
    assert set(fake.keys) == {b"Bearer k"}
    for body in fake.bodies:
        assert (body["model"], len(body["prompt"]), body["max_tokens"], body["stream"], body["ignore_eos"]) == (
            "m",
            5,
            3,
            True,
            True,
        )
    assert len({tuple(b["prompt"]) for b in fake.bodies}) == 4, "no two prompts are the same"
    assert found["output_tok_s"] / found["requests_s"] == pytest.approx(3, rel=0.02)
    assert {f"{m}_p{p}" for m in ("ttft_ms", "itl_ms", "e2e_ms") for p in (50, 90, 99)} <= set(found)


def test_failures_are_counted_and_not_timed(fake):
    answers = [503, 429, [chunk("a"), {"error": {"message": "engine fell over"}}], [chunk("a"), "cut"], [usage(0)]]
    fake.behaviour = lambda number: answers[number] if number < len(answers) else [chunk("a"), usage(1)]
    found = load(fake, num_requests=7)
    assert found["requests_by_status"] == {"200": 3, "503": 1, "429": 1, "500": 1, "0": 1}
    assert found["output_tok_s"] == pytest.approx(found["requests_s"], rel=0.05, abs=0.11), "the two that gave a token"


def test_arrivals_do_not_wait_for_answers(fake):
    """The server answers only after all requests have arrived, so a client that waited for an answer would hang."""
    fake.hold = 20
    found = asyncio.run(asyncio.wait_for(online.load(fake.url, 200.0, 20, 5, 3, None), 30))
    assert found["requests_by_status"] == {"200": 20}


@pytest.mark.parametrize(
    "models, message",
    [
        ((401, {}), "--api-key"),
        ((404, {}), "answers 404"),
        ((500, {}), "answers 500"),
        ((200, {"hello": 1}), "not with the OpenAI API"),
        ((200, []), "not with the OpenAI API"),
    ],
)
def test_another_kind_of_server(fake, models, message):
    fake.models = models
    with pytest.raises(ConfigError, match=message):
        load(fake)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "foo", "http://[", "http://no.such.host.invalid"])
def test_no_server(url):
    with pytest.raises(ConfigError, match="no server answers"):
        asyncio.run(online.load(url, 0.0, 1, 1, 1, None))


def test_nothing_succeeded(fake):
    fake.behaviour = lambda number: 400
    with pytest.raises(ConfigError, match="no request succeeded.*'400': 2"):
        online.run(fake.url, rate=0.0, num_requests=2, prompt_tokens=1, output_tokens=1, api_key=None, output=None)


def test_summary_by_hand():
    samples = [
        Sample(200, 0.1, [0.01, 0.03], 0.2, 3),
        Sample(200, 0.3, [0.02], 0.4, 2),
        Sample(429),
        Sample(0),
        Sample(200),
    ]
    found = summarise(samples, 2.0)
    assert found["requests_by_status"] == {"200": 3, "429": 1, "0": 1}
    assert (found["seconds"], found["output_tok_s"], found["requests_s"]) == (2.0, 2.5, 1.0)
    assert (found["ttft_ms_p50"], found["itl_ms_p50"], found["e2e_ms_p50"]) == (200.0, 20.0, 300.0)
    assert found["ttft_ms_p90"] == 280.0


def test_summary_of_nothing():
    found = summarise([Sample(0)], 1.0)
    assert found["requests_by_status"] == {"0": 1} and "ttft_ms_p50" not in found


def test_httpx_is_asked_for(monkeypatch):
    import sys

    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "httpx")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match="pip install httpx"):
        asyncio.run(online.load("http://127.0.0.1:1", 0.0, 1, 1, 1, None))
