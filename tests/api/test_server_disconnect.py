"""A client that goes away, in whatever phase: what it asked for is cancelled and everything is given back."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.api.fake_client import FakeClient
from tests.api.running import Running, running

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 500, "ignore_eos": True},
    "/v1/completions": {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 500, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 500, "ignore_eos": True},
}


def send(server: Running, path: str, body: dict | bytes, cut: int | None = None) -> socket.socket:
    """A raw request, so that leaving is ours to time. ``cut``: send only that many bytes of the body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    connection = socket.socket()
    connection.settimeout(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":")[-1])))
    connection.sendall(head + data[:cut])
    return connection


def fine(server: Running) -> None:
    server.idle()
    r = httpx.post(server.url + "/v1/completions", json={"prompt": "say: fine"}, timeout=20)
    assert r.json()["choices"][0]["text"] == "fine"
    server.idle()


@pytest.fixture(scope="module")
def slow():
    engine = FakeClient()
    engine.delay = 0.01
    with running(engine) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_while_generating(slow, path, stream):
    connection = send(slow, path, {**BODIES[path], "stream": stream})
    wanted = 3 if path == "/v1/completions" else 1
    slow.until(lambda: len(slow.engine.open) == wanted)
    if stream:
        assert b" 200 " in connection.recv(100)
    before = slow.engine.num_ended
    connection.close()
    slow.until(lambda: slow.engine.num_ended == before + wanted)
    fine(slow)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_while_waiting_to_be_accepted(slow, path, stream):
    slow.call(slow.engine.gate.clear)
    connection = send(slow, path, {**BODIES[path], "stream": stream})
    slow.until(lambda: len(slow.engine.open) == (3 if path == "/v1/completions" else 1))
    connection.close()
    slow.until(lambda: not slow.engine.open)
    slow.call(slow.engine.gate.set)
    fine(slow)


def test_in_the_middle_of_a_head_and_of_a_body(slow):
    head = socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":")[-1])))
    head.sendall(b"POST /v1/comp")
    body = send(slow, "/v1/completions", BODIES["/v1/completions"], cut=20)
    head.close()
    body.close()
    fine(slow)


def test_many_requests_and_all_hang_up(slow):
    connections = [send(slow, "/v1/completions", {**BODIES["/v1/completions"], "stream": bool(i % 2)}) for i in range(30)]
    slow.until(lambda: len(slow.engine.open) >= 60)
    for connection in connections:
        connection.close()
    fine(slow)


def test_half_closed_and_reset(slow):
    half = send(slow, "/v1/completions", {**BODIES["/v1/completions"], "stream": True})
    slow.until(lambda: len(slow.engine.open) == 3)
    half.shutdown(socket.SHUT_WR)
    slow.until(lambda: not slow.engine.open)
    half.close()
    reset = send(slow, "/v1/completions", {**BODIES["/v1/completions"], "stream": True})
    slow.until(lambda: len(slow.engine.open) == 3)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    fine(slow)


def test_a_reader_that_never_reads_is_cut_off():
    """The stream stalls when the socket's buffers are full; after ``request_timeout`` its request is cancelled."""
    engine = FakeClient(max_model_len=1 << 20, kv_capacity_tokens=1 << 21)
    with running(engine, request_timeout=0.3) as server:
        connection = send(server, "/v1/completions", {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True, "logprobs": 20})
        server.until(lambda: bool(engine.open))
        server.until(lambda: not engine.open, 30)
        assert engine.seen[-1].max_tokens == 20_000 and engine.num_ended == 1
        connection.close()
        fine(server)


def test_pipelined_requests_are_answered_in_order(slow):
    one = send(slow, "/v1/completions", {"prompt": "say: one"})
    data = json.dumps({"prompt": "say: two"}).encode()
    head = f"host: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    one.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + data)
    got = b""
    while piece := one.recv(65536):
        got += piece
    one.close()
    assert got.index(b'"text":"one"') < got.index(b'"text":"two"')
    fine(slow)


def test_a_huge_head_is_refused(slow):
    connection = socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":")[-1])), timeout=10)
    try:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n" + b"x-junk: " + b"a" * (1 << 20) + b"\r\n\r\n")
        assert connection.recv(100).split(b" ")[1][:1] == b"4"
    except (ConnectionResetError, BrokenPipeError):
        pass  # it hung up while we were still sending
    connection.close()
    fine(slow)
