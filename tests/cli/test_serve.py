"""``kvasir serve`` as a process: errors at its start, and one server that chat and the benchmark talk to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from kvasir.cli.serve import VLLM_WORDS, check_free
from kvasir.config import ServerConfig
from kvasir.engine.start.codec_choice import VLLM_CODECS, VLLM_TYPES
from kvasir.errors import ConfigError

COMMAND = [
    sys.executable,
    "-m",
    "kvasir.cli.main",
    "serve",
    "--port",
    "0",
    "--num-threads",
    "1",
    "--max-model-len",
    "256",
    "--api-key",
    "k",
]


class Server:
    def __init__(self, *more: str):
        self.process = subprocess.Popen([*COMMAND, *more], stderr=subprocess.PIPE, text=True)
        self.log, self.ready, self.url = [], threading.Event(), ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on (\S+)", line):
                self.url = found[1]
            if "ready to serve" in line:
                self.ready.set()
        self.ready.set()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self._reader.join(60)
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def server():
    server = Server()
    assert server.ready.wait(240) and server.url, "".join(server.log)
    yield server
    if server.process.poll() is None:
        server.stop()


def test_it_answers_with_the_key_only(server):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/v1/models", timeout=60)
    request = urllib.request.Request(f"{server.url}/v1/models", headers={"Authorization": "Bearer k"})
    assert json.load(urllib.request.urlopen(request, timeout=60))["data"][0]["id"] == "embedded"


def test_chat_talks_to_it(kvasir, server):
    done = kvasir(
        "chat",
        "--url",
        server.url,
        "--api-key",
        "k",
        "--temperature",
        "0",
        "--max-tokens",
        "80",
        stdin="Compute modulo 97: start 12; +45; *3; -7; *2; +30.\n" + "word " * 300 + "\n",
    )
    assert done.code == 0 and "Answer: 67" in done.out and "answered 400" in done.out
    assert "401" in kvasir("chat", "--url", server.url, stdin="hi\n").err


def test_bench_serve_measures_it(kvasir, server, tmp_path):
    file = tmp_path / "deep" / "result.json"
    args = (
        "bench",
        "serve",
        "--url",
        server.url,
        "--rate",
        "0",
        "-n",
        "5",
        "--prompt-tokens",
        "9",
        "--output-tokens",
        "6",
    )
    done = kvasir(*args, "--api-key", "k", "--json", file)
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    assert '"arms"' not in done.out and "ttft_ms_p50" in done.err
    metrics = found["arms"][0]["metrics"]
    assert metrics["requests_by_status"] == {"200": 5}
    assert round(metrics["output_tok_s"] / metrics["requests_s"]) == 6
    assert metrics["ttft_ms_p50"] > 0 and metrics["e2e_ms_p99"] >= metrics["ttft_ms_p99"]
    done = kvasir(*args)
    assert done.code == 2 and "--api-key" in done.err
    done = kvasir(*args, "--api-key", "k", "--prompt-tokens", "9999")
    assert done.code == 2 and "{'400': 5}" in done.err


def test_a_second_one_on_its_port_is_refused(kvasir, server):
    port = server.url.rsplit(":", 1)[1]
    done = kvasir("serve", "--port", port)
    assert (
        done.code == 2
        and f"cannot listen on 127.0.0.1:{port}: " in done.err
        and "in use" in done.err
        and "--port" in done.err
    )


def test_zz_sigterm_ends_it_cleanly(server):
    assert server.stop() == 0
    assert any("draining" in line for line in server.log)
    assert "Traceback" not in "".join(server.log) and "k" not in re.findall(r"Bearer (\S+)", "".join(server.log))
    with socket.socket() as s, pytest.raises(ConnectionRefusedError):
        s.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


# ---------------------------------------------------------------------------------------------------- it does not start


@pytest.mark.parametrize(
    "args, message",
    [
        (["/no/such/folder"], "no such folder"),
        (["--host", "not.a.host.invalid", "--insecure"], "cannot listen on not.a.host.invalid"),
        (["--host", "203.0.113.1", "--insecure"], "cannot listen on 203.0.113.1"),
        (["--uds", "/no/such/folder/socket"], "cannot listen on --uds /no/such/folder/socket"),
        (["--uds", "/tmp/" + 120 * "x"], "path too long"),
        (["--uds", __file__], "is not a socket"),
        (["--journal", "/no/such/folder/journal.jsonl"], "cannot write /no/such/folder/journal.jsonl"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_refused_before_a_process_is_started(kvasir, monkeypatch, args, message):
    from kvasir.client.engine_client import AsyncEngine

    monkeypatch.setattr(AsyncEngine, "start_process", lambda self: pytest.fail("a process was started"))
    done = kvasir("serve", *args)
    assert done.code == 2 and message in done.err


def test_traces_without_the_extra_are_refused_before_a_process_is_started(kvasir, monkeypatch):
    monkeypatch.setattr("kvasir.cli.serve.find_spec", lambda name: None)
    monkeypatch.setattr("kvasir.client.engine_client.AsyncEngine.start_process", lambda self: pytest.fail("started"))
    done = kvasir("serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces")
    assert done.code == 2 and "pip install opentelemetry-sdk" in done.err
    done = kvasir("serve", "--port", "0", "--otlp-traces-endpoint", "grpc://127.0.0.1:4317")
    assert done.code == 2 and "4318/v1/traces" in done.err


def test_a_unix_socket_is_not_taken_from_a_living_server(tmp_path):
    path = tmp_path / "socket"
    server = ServerConfig(uds=str(path))
    check_free(server)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(ConfigError, match="another server listens there"):
            check_free(server)
    check_free(server)  # what a server leaves behind


def test_a_model_of_another_kind(kvasir, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    done = kvasir("serve", tmp_path)
    assert done.code == 2 and "'mamba' is not served; served are" in done.err


def test_open_to_the_network_without_a_key(kvasir):
    done = kvasir("serve", "--host", "0.0.0.0", "--port", "0")
    assert done.code == 2 and "--api-key KEY" in done.err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--tool-call-parser", "bogus"], "there are gemma4"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init"),
    ],
)
def test_refused_by_the_server_itself(kvasir, args, message):
    done = kvasir("serve", "--port", "0", *args)
    assert done.code == 2 and message in done.err


def test_a_model_without_a_tokenizer(kvasir, tmp_path):
    from kvasir.models import checkpoint

    (tmp_path / "config.json").symlink_to(Path(checkpoint.resolve("")) / "config.json")
    done = kvasir("serve", tmp_path, "--port", "0")
    assert done.code == 2 and "has no tokenizer.json" in done.err and "--tokenizer" in done.err


@pytest.mark.parametrize("flag", ["--replicas", "--data-parallel-size", "-dp"])
def test_the_command_line_refuses_too_many(kvasir, monkeypatch, flag):
    monkeypatch.setattr("kvasir.client.front.Front.start_process", lambda self: pytest.fail("started"))
    done = kvasir("serve", "--port", "0", "--device", "cpu", flag, "9999")
    assert done.code == 2 and "replicas=9999" in done.err and "Use --replicas" in done.err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")
def test_two_replicas_answer_as_one_server():
    server = Server("--device", "cpu", "--replicas", "2")
    try:
        assert server.ready.wait(240) and server.url, "".join(server.log)

        def post(seed: int) -> str:
            body = json.dumps({"prompt": "One", "max_tokens": 8, "seed": seed}).encode()
            headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            asked = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
            return json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["text"]

        texts = [post(seed) for seed in (1, 2, 1, 2)]
        assert texts[:2] == texts[2:] and texts[0]
        assert urllib.request.urlopen(f"{server.url}/health", timeout=60).status == 200
    finally:
        assert server.stop() == 0, "".join(server.log)


def test_an_unknown_codec_is_refused_before_anything_starts(kvasir, monkeypatch):
    monkeypatch.setattr("kvasir.client.engine_client.AsyncEngine.start_process", lambda self: pytest.fail("started"))
    done = kvasir("serve", "--port", "0", "--kv-codec", "int3")
    assert done.code == 2 and "there is no kv_codec 'int3'; there are " in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert {*VLLM_TYPES, *VLLM_CODECS} == VLLM_WORDS
