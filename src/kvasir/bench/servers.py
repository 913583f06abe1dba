"""OpenAI servers as child processes, ours and a peer's: start them, wait for them, and end them with their children."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from kvasir.bench.worker import environment
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

# Most seconds that a start may take.
LIMIT = 900.0
# Seconds that a server has to end before it is killed.
END_SECONDS = 60.0
# File descriptor for a server's output, since stdout belongs to the result.
STDERR = 2
# Our settings that vLLM has under the same name.
SHARED = (
    "max_model_len",
    "max_num_seqs",
    "dtype",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "enable_prefix_caching",
)
# Settings that are off by default; they have no flag --no-NAME.
OFF = {f.name for section in fields(EngineConfig) for f in fields(section.default_factory) if f.default is False}
LIVE, READY = "/health/live", "/health/ready"
# Seconds in which a server that does nothing has reported its counters several times.
REST = 1.0


@dataclass(slots=True)
class Server:
    """A running server. ``started`` is ``time.perf_counter`` at exec."""

    name: str
    port: int
    process: subprocess.Popen
    started: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, path: str = "") -> float:
        """Seconds from exec until ``path`` answers 200; by default the path of readiness. Raises ConfigError."""
        path = path or (READY if self.name == "kvasir" else "/health")
        while time.perf_counter() - self.started < LIMIT:
            if self.process.poll() is not None:
                raise ConfigError(f"the server ended with code {self.process.returncode} before {path} answered")
            try:
                with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as reply:
                    if reply.status == 200:
                        return round(time.perf_counter() - self.started, 3)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.005)
        raise ConfigError(f"{path} did not answer within {LIMIT:.0f} s")

    def gauges(self, name: str) -> dict[str, float]:
        """Values of one of our gauges on /metrics, by its only label ("" without a label); empty without a value."""
        return _values(self._metrics(), name)

    def counters(self, names: Iterable[str]) -> dict[str, float]:
        """Totals of our counters by name, all of one moment, once they rest. A counter without a value is 0.

        The engine reports its counters four times a second, so a server that has just answered may still show old
        ones. For that reason they are read until they have not changed for ``REST`` seconds, at most ten times.
        """
        found: dict[str, float] = {}
        for _ in range(10):
            text = self._metrics()
            before, found = found, {name: _values(text, f"{name}_total").get("", 0.0) for name in names}
            if found == before:
                break
            time.sleep(REST)
        return found

    def tier_hits(self) -> dict[str, float]:
        """Prompt tokens that each tier of our KV cache has given, once the counters rest; empty without tiers."""
        if self.name != "kvasir":
            return {}
        time.sleep(REST)
        return _values(self._metrics(), "tier_hit_tokens_total")

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            return reply.read().decode()


def _values(text: str, name: str) -> dict[str, float]:
    found = re.findall(rf'^kvasir:{name}(?:\{{\w+="([^"]+)"\}})? (\S+)$', text, re.MULTILINE)
    return {label: float(value) for label, value in found}


def flags_of(options: dict[str, Any]) -> list[str]:
    """Settings as command-line flags, which vLLM and kvasir spell alike."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or (value is False and name in OFF):
            continue
        flag = f"--{name.replace('_', '-')}"
        flags += ([flag] if value else [f"--no-{flag[2:]}"]) if isinstance(value, bool) else [flag, str(value)]
    return flags


def command(name: str, model: str, port: int, flags: list[str]) -> list[str]:
    if name == "kvasir":
        return [
            sys.executable,
            "-m",
            "kvasir.cli.main",
            "serve",
            *([model] if model else []),
            "--port",
            str(port),
            *flags,
        ]
    if name == "vllm":
        return [
            sys.executable,
            "-m",
            "kvasir.bench.peers.vllm_server",
            "--model",
            model,
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--disable-uvicorn-access-log",
            "--enable-prompt-tokens-details",
            *flags,
        ]
    raise ConfigError(f"the benchmark knows no server of '{name}'; it knows those of kvasir and vllm")


def free_port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serving(name: str, model: str, flags: list[str], site: str | None = None) -> Iterator[Server]:
    """Start a server, and yield it at exec; call ``wait`` for readiness. Ends the process and its children."""
    port = free_port()
    argv = command(name, model, port, flags)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # The server inherits the limit: a thousand requests at once are a thousand connections.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    started = time.perf_counter()
    process = subprocess.Popen(
        argv, env=environment(site if name != "kvasir" else None), stdout=STDERR, start_new_session=True
    )
    try:
        yield Server(name, port, process, started)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        with contextlib.suppress(ProcessLookupError):  # engine processes that the server left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
