"""``kvasir bench startup``: from exec of ``kvasir serve`` to the first token of a streamed answer, with a breakdown.

The first start is the coldest (compile caches may be empty); later ones find files and kernels cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvasir.bench.result import arm, finish, result
from kvasir.bench.workloads import shape_folder
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models import checkpoint

LIMIT = 900.0  # seconds a start may take


def run(config: EngineConfig, options: dict[str, Any], *, shape: str | None, repeats: int, output: Path | None) -> None:
    flags = _flags(options)
    with contextlib.ExitStack() as stack:
        model = config.model.model
        if shape:
            # A shape has no tokenizer; a server needs one. The embedded model's serves: only the time counts here.
            model = stack.enter_context(shape_folder(shape))
            flags = [*flags, "--load-format", "dummy", "--tokenizer", str(checkpoint.resolve("")), "--served-model-name", shape]
        starts = [start_once(model, flags) for _ in range(repeats)]
    metrics: dict[str, Any] = {"cold.first_token_s": starts[0]["first_token_s"], "cold.breakdown": starts[0]}
    if repeats > 1:
        best = min(starts[1:], key=lambda s: s["first_token_s"])
        metrics |= {"warm.first_token_s": best["first_token_s"], "warm.breakdown": best}
    finish(result(f"startup-{shape or config.model.model or 'embedded'}", [arm("kvasir", {"flags": flags, "shape": shape}, metrics)]), output)


def _flags(options: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        flags += ([flag] if value else [f"--no-{flag[2:]}"]) if isinstance(value, bool) else [flag, str(value)]
    return flags


def start_once(model: str, flags: list[str]) -> dict[str, float]:
    """Seconds from exec until the port answers, the engine is ready, and the first token is read."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "kvasir.cli.main", "serve", *([model] if model else []), "--port", str(port), *flags]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        times = {"live_s": _until(server, port, "/health/live", started), "ready_s": _until(server, port, "/health/ready", started)}
        times["first_token_s"] = _first_token(port, started)
        return times | _breakdown(port)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def _until(server: subprocess.Popen, port: int, path: str, started: float) -> float:
    while time.perf_counter() - started < LIMIT:
        if server.poll() is not None:
            raise ConfigError(f"the server ended with code {server.returncode} before {path} answered")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
                if reply.status == 200:
                    return round(time.perf_counter() - started, 3)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.005)
    raise ConfigError(f"{path} did not answer within {LIMIT:.0f} s")


def _first_token(port: int, started: float) -> float:
    base = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{base}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "prompt": list(range(300, 316)), "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                return round(time.perf_counter() - started, 3)
    raise ConfigError("the server sent no token")


def _breakdown(port: int) -> dict[str, float]:
    """The engine's own laps, from the metric ``kvasir:startup_seconds{phase="..."}``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    stages = re.findall(r'^kvasir:startup_seconds\{phase="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    return {f"engine.{stage}_s": round(float(seconds), 3) for stage, seconds in stages}
