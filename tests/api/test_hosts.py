"""A server without a key answers by its own names only, and the text of clients forges no line of its log."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
import uvicorn

from kvasir.api.http import limits
from kvasir.api.http.connections import Server
from kvasir.api.http.hosts import names_of
from kvasir.config import ServerConfig
from kvasir.errors import RequestError
from tests.api.running import key, running


def answer(url: str, head: str) -> bytes:
    """The first line of the reply to a raw head."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(head.encode("latin-1") + b"\r\n\r\n")
        return sock.recv(4096).split(b"\r\n")[0]


GOOD = ["localhost", "LOCALHOST:99", "a.localhost", "127.0.0.1", "127.9.9.9:1", "[::1]", "[::1]:8000", "localhost."]
REFUSED = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "10.0.0.1",
    "[2001:db8::1]",
    "127.0.0.1.nip.io",
]
BAD = ["", "a b", "localhost@evil.example", "localhost/x", "localhost:x", "[::1", "\xe4.example"]


def test_a_rebound_name_reads_nothing(server):
    for path in ("/v1/models", "/", "/metrics", "/health/live"):
        for hosts, status in ((GOOD, b"403"), (REFUSED, b"403"), (BAD, b"400")):
            for host in hosts:
                got = answer(server.url, f"GET {path} HTTP/1.1\r\nHost: {host}")
                assert (status in got) == (hosts is not GOOD), (path, host, got)


def test_a_host_must_be_there_once(server):
    assert b"400" in answer(server.url, "GET /health HTTP/1.1")
    assert b"400" in answer(server.url, "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost")
    assert b"400" in answer(server.url, "GET /health HTTP/1.1\r\nHost: localhost\r\nhost: evil.example")
    assert b"200" in answer(server.url, "GET /health HTTP/1.0"), "health checks of load balancers"


def test_names_can_be_allowed():
    with running(allowed_hosts=("Chat.example", "*.inner.example")) as server:
        for host in ("chat.example", "chat.example:80", "a.inner.example", "localhost"):
            assert b"200" in answer(server.url, f"GET /v1/models HTTP/1.1\r\nHost: {host}"), host
        for host in ("inner.example", "evilinner.example", "evil.example"):
            assert b"403" in answer(server.url, f"GET /v1/models HTTP/1.1\r\nHost: {host}"), host


def test_deployments_behind_other_names_go_on():
    """With a key, or on an address of the network, a rebound name opens nothing."""
    with running(api_key=("secret",)) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/v1/models", headers={"host": "kvasir.default.svc", **key("secret")}).status_code == 200
    assert names_of(ServerConfig(host="0.0.0.0", insecure=True)) is None
    assert names_of(ServerConfig(uds="/run/kvasir")) is None
    assert names_of(ServerConfig(allowed_hosts=("*",))) is None
    assert names_of(ServerConfig(api_key=("k",), allowed_hosts=("x",))) == ("127.0.0.1", "x")
    assert names_of(ServerConfig()) == ("127.0.0.1",) and names_of(ServerConfig(host="::1")) == ("::1",)


FORGED = "INFO ready to serve forged"
LOGGING = """
import logging, sys
from kvasir import logs
from tests.api.running import running
logs.setup()
with running(log_requests=True) as server:
    logs.log.info("listening on %s", server.url)
    sys.stdin.read()
    logging.getLogger("uvicorn.error").error("bad %s", sys.argv[1])
    try:
        raise ValueError(sys.argv[1])
    except ValueError:
        logs.log.exception("a bug with %s", sys.argv[1])
"""


@pytest.mark.parametrize("mark", ["\n", "\r", "\x1b[31m", "\x85", "\u2028", "\u202e"])
def test_clients_forge_no_line_of_the_log(mark):
    text = f"x{mark}{FORGED}"
    process = subprocess.Popen([sys.executable, "-c", LOGGING, text], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    url = process.stderr.readline().decode().split()[-1]
    with httpx.Client(base_url=url, timeout=60) as http:
        http.get(f"/{quote(text)}")
        http.get("/v1/models", headers={"x-request-id": "a b", "x-y": b"\xff"})
        tool = {"type": "function", "function": {"name": text, "parameters": {}}}
        message = {"role": "user", "content": "say: x"}
        http.post("/v1/chat/completions", json={"model": text, "messages": [message]})
        http.post("/v1/chat/completions", json={"messages": [message], "tools": [tool]})
        http.get(f"/v1/responses/{quote(text)}")
    told = process.communicate()[1].decode()
    lines = [line for line in told.split("\n") if line]
    assert any(FORGED in line for line in lines), "the text is there"
    assert not any(line.startswith(FORGED) for line in lines)
    assert not any(c in told for c in "\r\x1b\x85\u2028\u202e")
    assert all(line[:2].isdigit() or line.startswith("    ") for line in lines), told
    for path in ("/x", "/v1/responses/x"):
        assert sum(f"GET {path}" in line and line[:2].isdigit() for line in lines) == 1


def test_numbers_are_counted_and_commas_of_text_are_not(monkeypatch):
    monkeypatch.setattr(limits, "MAX_MEMBERS", 100)
    many = b",".join([b"1"] * 100)
    assert limits.decode_json(b'{"prompt":[%s],"text":"%s"}' % (many[:-2], b',\\",' * 200))
    for body in (b'{"p":[%s,1]}' % many, b'{"p":[%s,null],"q":"x"}' % many, b'{"p":[[%s],[%s]]}' % (many, many)):
        with pytest.raises(RequestError) as refused:
            limits.decode_json(body)
        assert refused.value.status == 413


def test_eight_million_ids_are_refused_before_they_are_decoded(server, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("it was decoded"))
    body = b'{"prompt":[' + b"1," * 7_000_000 + b"1]}"
    r = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert r.status_code == 413 and "more than 1048576" in r.json()["error"]["message"]


AT_THE_LIMIT = """
import resource, socket, sys, time, urllib.request
from kvasir import logs
from tests.api.running import running
logs.setup()
with running() as server:
    address = server.socket.getsockname()
    def ask():
        assert urllib.request.urlopen(server.url + "/health", timeout=60).status == 200
    ask()
    waiting = socket.create_connection(address)
    server.until(lambda: server.server.server_state.connections)
    hoard = [socket.socket() for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hoard[-1].fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    hoard[0].connect(address)
    hoard[1].connect(address)
    time.sleep(1.5)
    [s.close() for s in hoard]
    ask()
"""


@pytest.mark.parametrize("stopping", [True, False])
def test_a_server_that_stops_at_the_limit_does_not_listen_again(stopping):
    """asyncio tries again after a second; by then the server may have closed its socket."""
    server, told = Server(uvicorn.Config(app=None, log_config=None, access_log=False)), []
    server.should_exit = stopping
    loop = SimpleNamespace(time=lambda: 0.0, default_exception_handler=told.append)
    closed = {
        "exception": ValueError("Invalid file descriptor: -1"),
        "message": "Exception in callback X._start_serving()",
    }
    server._on_loop_error(loop, closed)
    assert bool(told) == (not stopping)
    server._on_loop_error(loop, {"exception": ValueError("other"), "message": "Exception in callback f()"})
    assert told, "other errors are told as ever"


def test_at_the_limit_of_open_files_one_line_is_logged_and_serving_goes_on():
    done = subprocess.run([sys.executable, "-c", AT_THE_LIMIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Too many open files") == 1, done.stderr
