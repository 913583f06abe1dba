"""Traces of requests, as a collector receives them over OTLP/HTTP; never a word of a client's text."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from kvasir.api.http import tracing
from kvasir.config import ServerConfig
from kvasir.errors import ConfigError, RequestError
from tests.api.running import running

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "say: hello world"}]}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRETS = ("hello", "world", "secret-stop", "get_weather")


class Collector(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextlib.contextmanager
def collector():
    """A server that keeps what it is sent; yields its URL and the function that decodes it to spans by name."""
    pytest.importorskip("opentelemetry.sdk", reason="the packages of the extra [otel] are not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def spans() -> list:
        found = []
        for body in server.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                assert named["service.name"] == "kvasir"
                found += [span for scope in resource.scope_spans for span in scope.spans]
        assert not any(secret.encode() in body for body in server.bodies for secret in SECRETS)
        return found

    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span) -> dict:
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {a.key: plain(a.value) for a in span.attributes}


def traced(*requests, **changes) -> list:
    """The spans of requests, each a path, a body and headers, once the server has stopped."""
    with collector() as (url, spans):
        with running(otlp_traces_endpoint=url) as server:
            for name, value in changes.items():
                setattr(server.engine, name, value)
            for path, body, headers in requests:
                httpx.post(server.url + path, json=body, headers=headers, timeout=120)
            server.idle()
        return spans()


def test_a_request_has_spans_of_its_phases_and_the_clients_parent():
    body = {
        **SAY,
        "stream": True,
        "temperature": 0.5,
        "seed": 3,
        "stop": ["secret-stop"],
        "tools": [{"type": "function", "function": {"name": "get_weather"}}],
    }
    spans = traced((CHAT, body, {"traceparent": PARENT}), delay=0.01)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"chat fake", "queue", "prefill", "decode"} and len(spans) == 4
    root = by_name["chat fake"]
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
    assert root.parent_span_id.hex() == PARENT.split("-")[2] and root.kind == 2  # SERVER
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
    assert root.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano
    found = attributes(root)
    assert found.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert 0.005 < found.pop("gen_ai.response.time_to_first_chunk") < 60
    assert found.pop("gen_ai.usage.input_tokens") > 0 and found.pop("gen_ai.request.max_tokens") > 0
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.output_tokens": attributes(decode)["gen_ai.usage.output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert root.status.code == 0


def test_each_prompt_has_phases_of_its_own():
    spans = traced(("/v1/completions", {"prompt": ["say: hello", "say: world"], "n": 2}, {}))
    names = Counter(span.name for span in spans)
    assert names == {"text_completion fake": 1, "queue": 2, "prefill": 2, "decode": 2}
    root = next(span for span in spans if span.name == "text_completion fake")
    found = attributes(root)
    assert not root.parent_span_id and found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["stop"] * 4 and "." not in found["gen_ai.response.id"]


def test_refused_and_failed_requests_say_why():
    [refused] = traced((CHAT, {**SAY, "temperature": -1}, {}))
    assert attributes(refused)["error.type"] and refused.status.code == 0, (
        "a client's mistake is no fault of the server"
    )
    [full] = traced((CHAT, SAY, {}), refusal=RequestError("full", status=503, code="overloaded"))
    assert attributes(full)["error.type"] == "overloaded" and full.status.code == 2
    failed = traced((CHAT, SAY, {}), failure=RequestError("gone", status=500, code="boom"), fail_after=2)
    root = next(span for span in failed if span.name.startswith("chat"))
    assert attributes(root)["error.type"] == "boom" and root.status.code == 2 and len(failed) == 4


def test_the_search_for_text_can_fail(monkeypatch):
    """Negative control: an attribute with the answer's stop text is found."""
    real = tracing._of
    monkeypatch.setattr(tracing, "_of", lambda work: {**real(work), "stop": list(work.running[0].request.params.stop)})
    with pytest.raises(AssertionError):
        traced((CHAT, {**SAY, "stop": ["secret-stop"]}, {}))


def test_a_collector_that_is_gone_costs_no_request(caplog):
    pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")
    with running(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert httpx.post(server.url + CHAT, json=SAY, timeout=120).status_code == 200


def test_nothing_is_imported_when_traces_are_off():
    """FastAPI imports the API of OpenTelemetry by itself; the SDK and the exporter are ours to leave alone."""
    code = (
        "import sys, kvasir.api.server, kvasir.cli.main;"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_for_grpc_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match="4318/v1/traces"):
        ServerConfig(otlp_traces_endpoint="grpc://localhost:4317")


def test_without_the_extra_the_flag_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk"):
        tracing.Tracer("http://localhost:4318/v1/traces")
