"""The open-loop client: its counts, however the bytes are split; failures; its own lateness and speed."""

import asyncio
import io
import json
import time
import urllib.error

import pytest

from kvasir.bench import client
from kvasir.bench.client import Call, Reply, _Stream, capacity, replay, served_model, summarise
from kvasir.errors import ConfigError
from tests.bench.test_online import chunk, fake, usage  # noqa: F401 (a fixture)


class Transport:
    def __init__(self):
        self.sent, self.closed = b"", False

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = True


class Done:
    def done(self):
        return False

    def set_result(self, value):
        pass


def framed(*events):
    """A chunked reply, framed as a server does it."""
    parts = [f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode() for e in events]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def fed(data, size):
    reply = Reply(0.0)
    stream = _Stream(b"GET", reply, Done())
    stream.connection_made(Transport())
    for i in range(0, len(data), size):
        stream.data_received(data[i : i + size])
    stream.connection_lost(None)
    return reply, stream.transport


USAGE = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}}
TEXT = framed(
    {"choices": [{"text": 'a "usage" and a data: {'}], "usage": None}, chunk("b"), chunk("\n\n"), USAGE, "[DONE]"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_tokens_are_counted_however_the_bytes_are_cut(size):
    reply, transport = fed(TEXT, size)
    assert (reply.status, len(reply.events), reply.completion, reply.cached) == (200, 3, 3, 16)
    assert transport.closed and transport.sent == b"GET"


@pytest.mark.parametrize("size", [1, 10_000])
def test_an_error_in_the_stream_is_a_failure(size):
    assert fed(framed(chunk("a"), {"error": {"message": "fell over"}}), size)[0].status == 500
    assert fed(framed(chunk('"error"'), usage(1), "[DONE]"), size)[0].status == 200, "the word alone is none"
    assert fed(framed(chunk("a")), size)[0].status == 0, "cut off"
    assert fed(b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}", size)[0].status == 429


def calls(count, gap=0.0, output=3):
    return [Call(i * gap, [300 + i, 301], output) for i in range(count)]


def test_every_request_is_sent_as_said(fake):  # noqa: F811
    made = calls(4)
    replies, lags = asyncio.run(replay(fake.url, "m", made, "k"))
    assert [r.status for r in replies] == [200] * 4 and lags
    assert sorted(b["prompt"] for b in fake.bodies) == sorted(c.prompt for c in made)
    assert all(
        (b["model"], b["max_tokens"], b["stream"], b["ignore_eos"], b["temperature"]) == ("m", 3, True, True, 0)
        for b in fake.bodies
    )
    assert set(fake.keys) == {b"Bearer k"}
    found = summarise(replies, made, lags)
    assert (found["requests"], found["failed"], found["short"], found["tokens_per_event"]) == (4, 0, 0, 1.0)


@pytest.mark.parametrize(
    "url, to, line",
    [
        ("https://some.host/v1/", ("some.host", 443, True), b"POST /v1/completions"),
        ("https://h:8443/gate", ("h", 8443, True), b"POST /gate/v1/completions"),
        ("http://h/gate/v1", ("h", 80, None), b"POST /gate/v1/completions"),
        ("http://[::1]:8000", ("::1", 8000, None), b"POST /v1/completions"),
    ],
)
def test_addresses_of_every_form(monkeypatch, url, to, line):
    met = []

    async def connect(loop, protocol, host, port, *, ssl):
        stream = protocol()
        stream.connection_made(transport := Transport())
        met.append(((host, port, ssl), transport.sent.split(b" HTTP")[0]))
        stream.connection_lost(None)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    asyncio.run(replay(client.root(url), "m", calls(1)))
    assert met == [(to, line)]


def test_failures(fake):  # noqa: F811
    answers = [503, [chunk("a"), {"error": {"message": "engine fell over"}}], [chunk("a"), "cut"]]
    fake.behaviour = lambda number: answers[number] if number < len(answers) else [chunk("a"), usage(1)]
    made = calls(6)
    replies, lags = asyncio.run(replay(fake.url, "m", made))
    assert sorted(r.status for r in replies) == [0, 200, 200, 200, 500, 503]
    found = summarise(replies, made, lags)
    assert (found["failed"], found["short"]) == (3, 3), "and three answers have fewer tokens than were asked for"


def test_no_server():
    replies, _ = asyncio.run(replay("http://127.0.0.1:1", "m", calls(2)))
    assert [r.status for r in replies] == [0, 0]
    with pytest.raises(ConfigError, match="no server"):
        served_model("http://127.0.0.1:1")


def test_another_server(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: io.BytesIO(b"[]"))
    with pytest.raises(ConfigError, match="no server with an OpenAI API"):
        served_model("http://127.0.0.1:1")


def test_a_server_that_wants_a_key(monkeypatch):
    def refuse(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 401, "Unauthorized", {}, None)

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(ConfigError, match="answers 401 .* KVASIR_API_KEY"):
        served_model("http://127.0.0.1:1")


def test_arrivals_do_not_wait_for_answers(fake):  # noqa: F811
    fake.hold = 20
    replies, _ = asyncio.run(asyncio.wait_for(replay(fake.url, "m", calls(20, 0.005)), 30))
    assert [r.status for r in replies] == [200] * 20
    gaps = [b.due - a.due for a, b in zip(replies, replies[1:])]
    assert gaps == pytest.approx([0.005] * 19)
    assert all(r.sent >= r.due for r in replies)


def test_a_client_that_is_held_up_says_so(fake):  # noqa: F811
    """A task that blocks the event loop makes the client late, and its figures show that."""

    async def hogged():
        async def hog():
            for _ in range(3):
                time.sleep(0.05)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(hog())
        out = await replay(fake.url, "m", calls(10, 0.01))
        await task
        return out

    replies, lags = asyncio.run(hogged())
    assert summarise(replies, calls(10, 0.01), lags)["client_lag_ms_p99"] > 20


def test_it_reads_far_more_events_than_an_engine_makes():
    """Reading 20,000 tokens a second, the rate of one GPU, leaves most of a core idle."""
    data = framed(
        *[
            chunk(f" word{i}") | {"id": "cmpl-12345678", "object": "text_completion", "created": 1, "model": "m"}
            for i in range(20_000)
        ]
    )
    started = time.process_time()
    reply, _ = fed(data, 400)
    assert len(reply.events) == 20_000
    assert (time.process_time() - started) / 20_000 < 25e-6


def test_summary_by_hand():
    made = [Call(0.0, [1] * 10, 3), Call(1.0, [1] * 20, 2), Call(2.0, [1], 1), Call(4.0, [1], 1)]
    replies = [Reply(10.0, 10.001, 200), Reply(11.0, 11.001, 200), Reply(12.0, 12.001, 429), Reply(14.0, 14.001, 200)]
    for reply, events, completion in zip(replies, ([10.1, 10.2, 10.4], [11.3, 15.0], [], [14.2]), (3, 2, 0, 1)):
        reply.events.extend(events)
        reply.completion, reply.cached, reply.ended = completion, 4 * (completion > 1), max(events, default=12.5)
    found = summarise(replies, made, [0.0, 0.01])
    assert (found["requests"], found["failed"], found["window_s"], found["prompt_tokens"], found["cached_tokens"]) == (
        4,
        1,
        4.0,
        32,
        8,
    )
    assert found["output_tok_s"] == 1.0, "four of the six tokens came before the last request was due"
    assert (found["ttft_ms_p50"], found["itl_ms_p50"], found["tpot_ms_p50"]) == pytest.approx((200.0, 200.0, 1925.0))
    assert found["client_late_ms_p50"] == pytest.approx(1.0, abs=0.01) and found["client_lag_ms_p50"] == 5.0


def test_several_tokens_an_event():
    reply = Reply(0.0, 0.0, 200, completion=4, ended=2.0)
    reply.events.extend([1.0, 2.0])
    found = summarise([reply], [Call(0.0, [1], 4)], [])
    assert (
        found["tokens_per_event"] == 2.0
        and found["output_tok_s"] == 2.0
        and found["tpot_ms_p50"] == pytest.approx(333.333)
    )


def test_capacity_is_the_rate_while_the_server_is_full(caplog):
    """Fifty requests of four tokens at 40 tokens a second, between a slow start and a long tail."""
    times = [*(0.5 * i for i in range(40)), *(20.0 + 0.025 * i for i in range(120)), *(23.0 + i for i in range(40))]
    replies = [Reply(0.0, 0.0, 200) for _ in range(50)]
    for i, t in enumerate(times):
        replies[i % 50].events.append(t)
    assert capacity(replies) == pytest.approx(10.0) and not caplog.records
    assert (
        capacity([*replies, Reply(0.0, 0.0, 429)]) == pytest.approx(10.0) and "1 of 51 requests failed" in caplog.text
    )
    with pytest.raises(ConfigError, match="at least 10 good replies"):
        capacity([Reply(0.0, 0.0, 429, ended=1.0)] * 20)


def test_file_limit_and_collector_come_back(fake):  # noqa: F811
    import gc
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    asyncio.run(replay(fake.url, "m", calls(1)))
    assert gc.isenabled() and resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert client.TICK > 0
