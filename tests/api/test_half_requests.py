"""Connections that one side has ended: a client that closed its writing side gets its answer, one that is gone does
not; an answer to half a request reaches a client that is still sending."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from kvasir.api.http import connections
from tests.api.fake_client import FakeClient
from tests.api.running import Running, key, running
from tests.api.test_server_disconnect import BODIES, be_patient, fine, send

MIB = 1 << 20
ANSWER = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say: fine"}]},
    "/v1/completions": {"prompt": "say: fine"},
    "/v1/responses": {"input": "say: fine"},
    "/v1/messages": {"messages": [{"role": "user", "content": "say: fine"}], "max_tokens": 50},
}


@pytest.fixture(scope="module")
def server():
    engine = FakeClient()
    engine.delay = 0.01
    with running(engine, max_body_bytes=MIB) as it:
        yield it


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    got = b""
    while piece := connection.recv(1 << 16):
        got += piece
    connection.close()
    while got.startswith(b"HTTP/1.1 100 "):  # whether a client is there is asked after a second
        got = got.partition(b"\r\n\r\n")[2]
    return got


# ----------------------------------------------------------------------------------------------- half-closed by clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWER)
def test_a_half_closed_request_gets_its_answer(server, path, stream):
    connection = send(server, path, {**ANSWER[path], "stream": stream})
    connection.shutdown(socket.SHUT_WR)
    head, _, body = rest(connection).partition(b"\r\n\r\n")  # whole, since the server closes then
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"fine" in body.replace(b'"f"', b"fine") or stream and body.endswith(b"\r\n0\r\n\r\n")
    fine(server)


def test_other_routes_and_pipelined_requests_are_answered_too(server):
    connection = send(server, "/tokenize", {"prompt": "x"})
    connection.sendall(
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
    )
    connection.shutdown(socket.SHUT_WR)
    got = rest(connection)
    places = [got.index(status) for status in (b'"tokens"', b"200 OK\r\n", b"404 Not Found")]
    assert got.count(b"HTTP/1.1 200 ") == 2 and places[0] < places[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_and_waits_is_not_taken_for_gone(server, stream, monkeypatch):
    """It is asked, by an interim response, while the engine has not begun; the answer then comes whole."""
    monkeypatch.setattr(connections, "FIRST_PROBE_SECONDS", 0.0)
    server.call(server.engine.gate.clear)
    connection = send(server, "/v1/completions", {"prompt": "say: fine", "stream": stream})
    server.until(lambda: bool(server.engine.open))
    connection.shutdown(socket.SHUT_WR)
    interim = connection.recv(100)
    assert interim == connections.PROBE
    server.call(server.engine.gate.set)
    assert rest(connection).startswith(b"HTTP/1.1 200 ")
    assert not server.engine.cancelled
    fine(server)


@pytest.mark.parametrize("how", ["at once", "after half"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_is_gone_cancels_its_request(server, how, stream, begun):
    if not begun:
        server.call(server.engine.gate.clear)
    connection = send(server, "/v1/completions", {**BODIES["/v1/completions"], "stream": stream})
    server.until(lambda: len(server.engine.open) == 3)
    if begun and stream:
        assert b" 200 " in connection.recv(100)
    ended = server.engine.num_ended
    if how == "after half":
        connection.shutdown(socket.SHUT_WR)
    connection.close()
    server.until(lambda: server.engine.num_ended == ended + 3)
    server.call(server.engine.gate.set)
    fine(server)


@pytest.mark.parametrize("cut", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", None])
def test_half_a_request_that_is_half_closed_ends(server, cut):
    if cut is None:
        connection = send(server, "/v1/completions", {"prompt": "x"}, cut=5)
    else:
        connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=60)
        connection.sendall(cut)
    connection.shutdown(socket.SHUT_WR)
    assert rest(connection) == b""
    server.until(lambda: not server.server.server_state.connections)


def test_http_1_0_has_no_half_closed_requests(server):
    """Nothing could be sent to see whether somebody still listens."""
    server.call(server.engine.gate.clear)
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=60)
    body = json.dumps({"prompt": "x"}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    server.until(lambda: bool(server.engine.open))
    connection.shutdown(socket.SHUT_WR)
    assert rest(connection) == b""
    server.call(server.engine.gate.set)
    fine(server)


# --------------------------------------------------------------------------------------- answers to half of a request


def begin(server: Running, path: str, length: int, headers: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=60)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
        f"content-length: {length}\r\n\r\n".encode()
    )
    return connection


@pytest.mark.parametrize("headers", ["", "connection: close\r\n", "transfer-encoding: chunked\r\n"])
def test_413_reaches_a_client_that_is_still_sending(server, headers):
    """It sends eight times what the server reads, and only then looks for an answer."""
    total = 8 * MIB
    if "chunked" in headers:
        connection = begin(server, "/v1/completions", 0, headers)
        connection.close()
        connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=60)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        pieces = [b"%x\r\n" % MIB + b" " * MIB + b"\r\n"] * 8 + [b"0\r\n\r\n"]
    else:
        connection = begin(server, "/v1/completions", total, headers)
        pieces = [b" " * MIB] * 8
    for piece in pieces:
        connection.sendall(piece)
    connection.shutdown(socket.SHUT_WR)
    got = rest(connection)
    assert got.startswith(b"HTTP/1.1 413 ") and b"connection: close" in got.lower()
    assert got.endswith(b"}") and json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
    fine(server)


def test_a_slow_sender_gets_413_at_once_and_may_go_on(server):
    connection = begin(server, "/v1/completions", 8 * MIB)
    assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    for _ in range(8):
        connection.sendall(b" " * MIB)
    rest(connection)


@pytest.mark.parametrize("kind", ["no key", "not found", "content type", "garbage", "head"])
def test_other_refusals_reach_it_as_well(kind):
    with running(api_key=("alpha",)) as server:
        allowed = "".join(f"{name}: {value}\r\n" for name, value in key("alpha").items())
        if kind in ("garbage", "head"):
            connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=60)
            start = b"\x16\x03\x01 garbage\r\n" if kind == "garbage" else b"GET / HTTP/1.1\r\nx-junk: "
            connection.sendall(start)
        elif kind == "content type":
            connection = begin(server, "/v1/completions", 8 * MIB, allowed + "content-encoding: gzip\r\n")
        else:
            connection = begin(server, "/nowhere", 8 * MIB, "" if kind == "no key" else allowed)
        for _ in range(8):
            connection.sendall(b"a" * MIB)
        connection.shutdown(socket.SHUT_WR)
        status = {"no key": 401, "not found": 404, "content type": 415}.get(kind, 400)
        assert rest(connection).startswith(b"HTTP/1.1 %d " % status)


def test_a_body_that_was_read_keeps_its_connection(server):
    with httpx.Client(base_url=server.url, timeout=120) as http:
        first = http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
        assert first.status_code == 400 and "connection" not in first.headers
        before = set(server.server.server_state.connections)
        assert http.post("/v1/completions", json={"prompt": "say: x"}).status_code == 200
        assert set(server.server.server_state.connections) == before


@pytest.mark.parametrize("bound", ["bytes", "pause", "time"])
def test_what_is_read_after_an_answer_is_bounded(server, monkeypatch, bound):
    connection = None
    if bound == "bytes":
        monkeypatch.setattr(connections, "LINGER_BODIES", 1)
    else:
        monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.2)
        monkeypatch.setattr(connections, "LINGER_SECONDS", 600.0 if bound == "pause" else 0.5)
    connection = begin(server, "/v1/completions", 1 << 40)
    assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    stop = threading.Event()

    def flood() -> None:
        try:
            while not stop.wait(0.01):
                connection.sendall(b" " * (MIB if bound == "bytes" else 10))
        except OSError:
            stop.set()

    sender = threading.Thread(target=flood)
    if bound != "pause":
        sender.start()
    server.until(lambda: not server.server.server_state.connections)
    if bound != "pause":
        assert stop.wait(60), "its connection is gone"
        sender.join()
    connection.close()
    be_patient(server, monkeypatch)
    fine(server)


def test_a_server_that_ends_does_not_wait_for_senders():
    with running() as server:
        connection = begin(server, "/v1/completions", 1 << 40)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        server.stop()
        connection.close()
