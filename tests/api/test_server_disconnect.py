"""Clients that leave in any phase, are slow, do not read, or are too many: their requests are cancelled and nothing
stays open."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import socket
import threading

import httpx
import pytest

from tests.api.fake_client import FakeClient, tokenizer
from tests.api.running import Running, running
from tests.api.test_server import listening_at, serving

BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "n": 3,
        "max_tokens": 500,
        "ignore_eos": True,
    },
    "/v1/completions": {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 500, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 500, "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "ignore_eos": True},
}


def send(
    server: Running, path: str, body: dict | bytes, cut: int | None = None, headers: dict[str, str] | None = None
) -> socket.socket:
    """Send a raw request, so that the test decides when the client leaves. ``cut``: send only so many bytes of the
    body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
    head += f"content-length: {len(data)}\r\n\r\n".encode()
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":")[-1])))
    connection.sendall(head + data[:cut])
    return connection


def fine(server: Running) -> None:
    """Assert that the server still serves and then has nothing open."""
    server.idle()
    r = httpx.post(server.url + "/v1/completions", json={"prompt": "say: fine"}, timeout=120)
    assert r.json()["choices"][0]["text"] == "fine"
    server.idle()


def be_patient(server: Running, monkeypatch) -> None:
    """Give connections their usual time again: a busy machine may need longer than the limits that a test has
    shortened."""
    monkeypatch.setattr("kvasir.api.http.connections.HEADER_SECONDS", 10.0)
    server.service.settings = dataclasses.replace(server.service.settings, request_timeout=600.0)


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
    connections = [
        send(slow, "/v1/completions", {**BODIES["/v1/completions"], "stream": bool(i % 2)}) for i in range(30)
    ]
    slow.until(lambda: len(slow.engine.open) >= 60)
    for connection in connections:
        connection.close()
    fine(slow)


def test_reset(slow):
    reset = send(slow, "/v1/completions", {**BODIES["/v1/completions"], "stream": True})
    slow.until(lambda: len(slow.engine.open) == 3)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    fine(slow)


def test_slow_heads_and_slow_bodies_are_cut_off(monkeypatch):
    from kvasir.api.http import limits

    monkeypatch.setattr("kvasir.api.http.connections.HEADER_SECONDS", 0.5)
    monkeypatch.setattr(limits, "CHUNK_TIMEOUT", 0.5)
    with running() as server:
        address = ("127.0.0.1", int(server.url.rsplit(":")[-1]))
        with socket.create_connection(address, timeout=60) as slow:
            slow.sendall(b"POST /v1/completions HT")
            assert slow.recv(100) == b"", "closed without a word"
        with socket.create_connection(address, timeout=60) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            assert b" 408 " in slow.recv(4000)
        with httpx.Client(base_url=server.url, timeout=120) as http:  # a slow answer is not a slow head
            server.call(server.engine.gate.clear)
            threading.Timer(1.5, lambda: server.call(server.engine.gate.set)).start()
            assert (
                http.post(
                    "/v1/chat/completions", json={"messages": [{"role": "user", "content": "say: hello world"}]}
                ).status_code
                == 200
            )


def test_a_reader_that_never_reads_is_cut_off(monkeypatch):
    """The stream stalls when the socket's buffers are full; after ``request_timeout`` the server cancels the request
    and closes the connection."""
    monkeypatch.setattr("kvasir.api.http.connections.HEADER_SECONDS", 0.1)
    engine = FakeClient(max_model_len=1 << 20, kv_capacity_tokens=1 << 21)
    with running(engine, request_timeout=0.3) as server:
        connection = send(
            server,
            "/v1/completions",
            {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True, "logprobs": 20},
        )
        server.until(lambda: bool(engine.open))
        server.until(lambda: not engine.open)
        assert engine.seen[-1].max_tokens == 20_000 and engine.num_ended == 1
        server.until(lambda: not server.server.server_state.connections)
        connection.close()
        be_patient(server, monkeypatch)
        fine(server)


def test_a_whole_reply_that_nobody_reads_is_given_up(monkeypatch):
    """The reply is larger than the kernel's buffers. A client that reads it in time gets all of it."""
    monkeypatch.setattr("kvasir.api.http.connections.HEADER_SECONDS", 0.1)
    word = max(range(tokenizer().size), key=lambda i: len(tokenizer().token_text(i)))
    body = {"tokens": [word] * (1 << 20)}
    with running() as server:
        late, never = send(server, "/detokenize", body), send(server, "/detokenize", body)
        server.until(
            lambda: (
                server.service.metrics.registry.get_sample_value(
                    "kvasir:http_requests_total", {"route": "/detokenize", "status": "200"}
                )
                == 2
            )
        )
        got = b""
        while piece := late.recv(1 << 20):
            got += piece
        assert len(got) > len(tokenizer().token_text(word)) << 20 and got.endswith(b'"}')
        server.until(lambda: len(server.server.server_state.connections) == 1)
        server.service.settings = dataclasses.replace(server.service.settings, request_timeout=0.3)
        server.until(lambda: not server.server.server_state.connections)
        for connection in (late, never):
            connection.close()
        be_patient(server, monkeypatch)
        fine(server)


def test_more_connections_than_files():
    """The limit of open files is raised to what is allowed: 128 files are 96 connections. One more is refused and not
    left waiting, and neither it nor garbage fills the log."""
    process = serving(0, "well", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128)))
    url = listening_at(process)
    connections = [socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), timeout=60) for _ in range(97)]
    refused = connections[96].recv(1000)
    assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
    connections[95].sendall(b"\x16\x03\x01 garbage\r\n\r\n")
    assert b" 400 " in connections[95].recv(100)
    for connection in connections:
        connection.close()
    Running.until(lambda: httpx.get(url + "/health/ready", timeout=120).status_code == 200)
    assert 'route="none",status="503"' in httpx.get(url + "/metrics", timeout=120).text
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert "Traceback" not in said and "Invalid" not in said, said


def test_pipelined_requests_are_answered_in_order(slow):
    one = send(slow, "/v1/completions", {"prompt": "say: one"})
    data = json.dumps({"prompt": "say: two"}).encode()
    head = b"host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n".encode()
    one.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + data)
    got = b""
    while piece := one.recv(65536):
        got += piece
    one.close()
    assert got.index(b'"text":"one"') < got.index(b'"text":"two"')
    fine(slow)


def test_a_huge_head_is_refused(slow):
    connection = socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":")[-1])), timeout=60)
    try:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n" + b"x-junk: " + b"a" * (1 << 20) + b"\r\n\r\n")
        assert connection.recv(100).split(b" ")[1][:1] == b"4"
    except (ConnectionResetError, BrokenPipeError):
        pass  # it hung up while we were still sending
    connection.close()
    fine(slow)
