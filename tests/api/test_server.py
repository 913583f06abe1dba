"""The server's life and its refusals: start-up, readiness, drain, limits, logs."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

import kvasir
from kvasir.config import ServerConfig
from kvasir.errors import ConfigError, RequestError
from tests.api.fake_client import FakeClient
from tests.api.running import Running, key, running

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "say: hello world"}]}


# ------------------------------------------------------------------------------------------------------------- start-up


def test_liveness_answers_before_the_model_is_loaded():
    engine = FakeClient()
    engine.start_gate.clear()
    server = Running(engine)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            assert http.get("/health/live").status_code == 200
            for method, path in (
                ("GET", "/health/ready"),
                ("GET", "/v1/models"),
                ("POST", CHAT),
                ("POST", "/tokenize"),
            ):
                r = http.request(method, path, json=SAY if method == "POST" else None)
                assert (
                    r.status_code == 503
                    and int(r.headers["retry-after"]) >= 1
                    and r.json()["error"]["code"] == "not_ready"
                ), path
            assert http.get("/metrics").status_code == 200
            server.call(engine.start_gate.set)
            server.wait_ready()
            assert http.get("/health/ready").json() == {"status": "ready", "model": "fake"}
            assert http.post(CHAT, json=SAY).status_code == 200
            engine.ready = False
            r = http.get("/health/ready")
            assert r.status_code == 503 and r.json()["error"]["message"] == "the engine restarts"
            assert http.get("/health/live").status_code == 200
            engine.live = False
            assert http.get("/health/live").status_code == 503, "given up: only a restart of the server helps"
    finally:
        server.stop()


def test_metrics_are_there_when_a_start_is_broken_off():
    engine = FakeClient()
    engine.start_gate.clear()
    server = Running(engine)
    try:
        server.call(lambda: server.loop.create_task(server.service.stop(0.0)))
        server.until(lambda: server.service.phase == "draining")
        r = httpx.get(server.url + "/metrics", timeout=120)
        assert r.status_code == 200 and "kvasir:build_info" in r.text
    finally:
        server.stop()


def test_the_probes_of_vllm_work():
    """/health gives only the status and needs no key, as load balancers expect; /version gives the version."""
    engine = FakeClient()
    with running(engine, api_key=("k",)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        r = http.get("/health")
        assert (r.status_code, r.content) == (200, b"")
        assert http.get("/version", headers=key("k")).json() == {"version": kvasir.__version__}
        engine.ready = False
        r = http.get("/health")
        assert r.status_code == 503 and r.json()["error"]["message"] == "not ready", "why is for those who have a key"


def test_a_failed_start_says_why():
    engine = FakeClient()
    engine.start_failure = ConfigError("no such model")
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert "no such model" in http.get("/health/ready").json()["error"]["message"]
        assert http.post(CHAT, json=SAY).status_code == 503 and isinstance(server.service.failure, ConfigError)


def test_the_http_process_does_not_import_torch():
    code = (
        "import sys, kvasir.api.server, kvasir.api.protocols.routes_chat;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "fine"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "127.1.2.3"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "example.org"}, False),
        ({"host": ""}, False),
        ({"host": "0.0.0.0", "api_key": ("k",)}, True),
        ({"host": "0.0.0.0", "insecure": True}, True),
        ({"host": "0.0.0.0", "uds": "/tmp/x"}, True),
    ],
)
def test_open_addresses_need_a_key(settings, fine):
    from kvasir.api.server import check_address

    if fine:
        check_address(ServerConfig(**settings))
    else:
        with pytest.raises(ConfigError, match="--api-key"):
            check_address(ServerConfig(**settings))


# ---------------------------------------------------------------------------------------------------------------- drain


def test_draining_finishes_streams_and_refuses_new_requests():
    engine = FakeClient()
    engine.delay = 0.05
    with (
        running(engine) as server,
        httpx.stream("POST", server.url + CHAT, json={**SAY, "stream": True}, timeout=120) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        server.call(lambda: server.loop.create_task(server.service.stop(120.0)))
        server.until(lambda: server.service.phase == "draining")
        with httpx.Client(base_url=server.url, timeout=120) as other:
            assert other.get("/health/ready").status_code == 503 and other.get("/health/live").status_code == 200
            refusal = other.post(CHAT, json=SAY)
            assert refusal.status_code == 503 and "retry-after" in refusal.headers
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_what_does_not_finish_in_time_ends_with_an_error_event():
    engine = FakeClient()
    engine.delay = 1.0
    with running(engine) as server:
        with httpx.stream("POST", server.url + CHAT, json={**SAY, "stream": True}, timeout=120) as r:
            lines = r.iter_lines()
            next(lines)
            server.call(lambda: server.loop.create_task(server.service.stop(0.0)))
            last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down" and last["error"]["type"] == "overloaded_error"
        server.idle()


SERVE = """
import sys
from kvasir import logs
from kvasir.api import server
from kvasir.api.text.text import Text
from kvasir.config import Settings
from kvasir.errors import ConfigError
from tests.api.fake_client import FakeClient, tokenizer
logs.setup()
server.open_text = lambda settings: Text(tokenizer)
import kvasir.config as c
engine = FakeClient()
engine.delay = 0.1
if sys.argv[2] == "broken":
    engine.start_failure = ConfigError("no such model")
try:
    server.serve(c.compose(Settings, {"port": int(sys.argv[1]), "drain_timeout": 60.0}), engine)
except ConfigError as e:
    sys.exit(f"ConfigError: {e}")
"""


def serving(port: int, how: str, **more) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SERVE, str(port), how], stderr=subprocess.PIPE, text=True, **more)


def listening_at(process: subprocess.Popen) -> str:
    for line in process.stderr:
        if "listening on" in line:
            return line.split()[-1]
    raise AssertionError("it never listened")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])  # stopped, and its terminal closed
def test_serve_drains_on(number):
    process = serving(0, "well")
    url = listening_at(process)
    with httpx.Client(base_url=url, timeout=120) as http:
        Running.until(lambda: http.get("/health/ready").status_code == 200)
        with http.stream("POST", CHAT, json={**SAY, "stream": True}) as r:
            lines = r.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(60) == 0
    process.stderr.close()


def test_a_closed_terminal_is_nothing_under_nohup():
    process = serving(0, "well", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with httpx.Client(base_url=listening_at(process), timeout=120) as http:
        Running.until(lambda: http.get("/health/ready").status_code == 200)
        process.send_signal(signal.SIGHUP)
        assert http.get("/health/live").status_code == http.get("/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
    assert "draining" in process.communicate(timeout=120)[1]


def test_serve_says_why_it_cannot(server):
    broken = serving(0, "broken")
    assert "ConfigError: no such model" in broken.communicate(timeout=120)[1] and broken.returncode == 1
    taken = serving(int(server.url.rsplit(":")[-1]), "well")
    assert "is the port taken?" in taken.communicate(timeout=120)[1] and taken.returncode == 1


# ----------------------------------------------------------------------------------------------------- limits, refusals


def test_refusals_of_the_engine_stay_statuses(http, server):
    for refusal in (
        RequestError("queue full", status=429, code="queue_full", retry_after=2.4),
        RequestError("down", status=503, code="engine_down"),
        RequestError("bad schema", status=400, param="grammar", code="bad_grammar"),
        RequestError("twice", status=409),
    ):
        server.engine.refusal = refusal
        try:
            for stream in (False, True):
                r = http.post(CHAT, json={**SAY, "stream": stream, "guided_regex": "("})
                assert r.status_code == refusal.status and r.headers["content-type"] == "application/json"
                assert ("retry-after" in r.headers) == (refusal.status in (429, 503))
                if refusal.retry_after:
                    assert r.headers["retry-after"] == "3"
                if refusal.status == 400:
                    assert r.json()["error"]["param"] == "guided_regex"
            many = http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
            assert many.status_code == refusal.status
        finally:
            server.engine.refusal = None
    server.idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_an_error_after_the_first_tokens(http, server, path):
    body = {
        CHAT: SAY,
        "/v1/completions": {"prompt": ["say: hello world", "x"], "n": 2},
        "/v1/responses": {"input": "say: hello world"},
    }[path]
    server.engine.failure, server.engine.fail_after = RequestError("NaN", status=500, code="internal_numeric_error"), 2
    try:
        r = http.post(path, json=body)
        assert r.status_code == 500 and r.json()["error"]["code"] == "internal_numeric_error"
        streamed = http.post(path, json={**body, "stream": True})
        assert streamed.status_code == 200
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data: ")
        ]
        if path == "/v1/responses":
            assert (
                events[-1]["type"] == "response.failed"
                and events[-1]["response"]["error"]["code"] == "internal_numeric_error"
            )
        else:
            assert events[-1]["error"]["code"] == "internal_numeric_error" and "[DONE]" not in streamed.text
            assert sum("error" in e for e in events) == 1
    finally:
        server.engine.failure = None
    server.idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_an_error_after_the_headers_names_what_the_client_wrote(http, server, path):
    body = {
        CHAT: SAY,
        "/v1/completions": {"prompt": "say: hello world"},
        "/v1/responses": {"input": "say: hello world"},
    }[path]
    server.engine.failure = RequestError(
        "grammar='(' does not compile", status=400, param="grammar", code="invalid_grammar"
    )
    server.engine.fail_after = 0
    try:
        streamed = http.post(path, json={**body, "guided_regex": "(", "stream": True})
        assert streamed.status_code == 200
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data: ")
        ]
        error = next(e for e in events if e["type"] == "error") if path == "/v1/responses" else events[-1]["error"]
        assert error["param"] == "guided_regex" and error["message"] == "guided_regex='(' does not compile"
    finally:
        server.engine.failure = None
    server.idle()


def test_a_bug_is_a_logged_500(http, server, monkeypatch, caplog):
    monkeypatch.setattr(server.service.text, "check_size", lambda *a, **b: 1 / 0)
    r = http.post(CHAT, json=SAY)
    assert r.status_code == 500 and r.json()["error"]["message"] == "internal error", "no details leave the server"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert http.post(CHAT, json=SAY).status_code == 200
    server.idle()


def test_requests_at_once_per_key():
    with (
        running(max_concurrent_per_key=2, api_key=("alpha", "beta")) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        server.call(server.engine.gate.clear)
        held = [
            threading.Thread(
                target=httpx.post,
                args=(server.url + CHAT,),
                kwargs={"json": SAY, "headers": key("alpha"), "timeout": 120},
            )
            for _ in range(2)
        ]
        for thread in held:
            thread.start()
        server.until(lambda: len(server.engine.open) == 2)
        r = http.post(CHAT, json=SAY, headers=key("alpha"))
        assert r.status_code == 429 and r.headers["retry-after"]
        other = threading.Thread(
            target=httpx.post, args=(server.url + CHAT,), kwargs={"json": SAY, "headers": key("beta"), "timeout": 120}
        )
        other.start()
        server.until(lambda: len(server.engine.open) == 3)
        server.call(server.engine.gate.set)
        for thread in (*held, other):
            thread.join(60)
        server.idle()
        assert http.post(CHAT, json=SAY, headers=key("alpha")).status_code == 200


def test_the_help_and_the_docs_say_how_long_a_body_may_pause():
    from kvasir.api.http.limits import CHUNK_TIMEOUT

    [help] = [f.metadata["help"] for f in dataclasses.fields(ServerConfig) if f.name == "request_timeout"]
    docs = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text()
    assert (
        f"A body that stalls for {CHUNK_TIMEOUT:g} seconds gets 408" in help
        and f"{CHUNK_TIMEOUT:g} s without a byte are a 408" in docs
    )


def test_a_priority_that_nobody_looks_at_is_refused():
    with running(FakeClient(priorities=False)) as server:
        for path, body in ((CHAT, SAY), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
            r = httpx.post(server.url + path, json={**body, "priority": 2}, timeout=120)
            assert (
                r.status_code == 400
                and r.json()["error"]["param"] == "priority"
                and "--scheduling-policy" in r.json()["error"]["message"]
            )
            assert httpx.post(server.url + path, json={**body, "priority": 0}, timeout=120).status_code == 200


def test_what_the_queue_can_never_hold_is_not_told_to_come_back():
    """429 means "try again later", so a body that is larger than the whole queue gets 400."""
    with running(FakeClient(max_queued_requests=8, max_queued_tokens=100)) as server:

        def ask(path: str, **body) -> httpx.Response:
            return httpx.post(server.url + path, json=body, timeout=120)

        fewer, shorter = "Send fewer prompts at a time.", "Shorten it."
        for path, body, param, cure in (
            ("/v1/completions", {"prompt": ["x"] * 3, "n": 3}, "n", "Lower 'n' or send fewer prompts."),
            ("/v1/completions", {"prompt": ["x"] * 9}, "prompt", fewer),
            ("/v1/completions", {"prompt": ["x"] * 9, "n": 2}, "prompt", fewer),
            ("/v1/completions", {"prompt": [[300] * 60] * 2}, "prompt", fewer),
            ("/v1/completions", {"prompt": [300] * 101}, "prompt", shorter),
            (CHAT, {**SAY, "n": 9}, "n", "Lower 'n'."),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 150}]}, "messages", shorter),
        ):
            r = ask(path, **body)
            error = r.json()["error"]
            assert (
                r.status_code == 400
                and error["param"] == param
                and "at once" in error["message"]
                and error["message"].endswith(cure)
            ), r.text
        assert (
            ask("/v1/completions", prompt=["x"] * 2, n=4).status_code
            == ask("/v1/completions", prompt=[[300] * 50] * 2).status_code
            == 200
        )


def test_requests_are_logged_only_when_asked_and_without_the_query(http, caplog):
    caplog.set_level("INFO", "kvasir")
    http.get("/health/live")
    assert "/health/live" not in caplog.text
    with running(log_requests=True) as server:
        httpx.get(server.url + "/health/live?api_key=secret", timeout=120)
        server.until(lambda: "GET /health/live 200" in caplog.text)
    assert "secret" not in caplog.text


def test_live_requests_are_many():
    """Forty requests at once with answers of different length get their own answers."""
    engine = FakeClient()
    engine.delay = 0.001
    with running(engine) as server:
        results: dict[int, str] = {}

        def ask(i: int) -> None:
            body = {"messages": [{"role": "user", "content": f"say: number {i}"}], "stream": bool(i % 2)}
            r = httpx.post(server.url + CHAT, json=body, timeout=60)
            if i % 2:
                chunks = [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: {")]
                results[i] = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            else:
                results[i] = r.json()["choices"][0]["message"]["content"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {i: f"number {i}" for i in range(40)}
        server.idle()
