"""``kvasir serve nano`` as users start it: a process of its own on a free port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai

# Most seconds that a server may take to start, on a busy machine.
START_SECONDS = 240.0


class Served:
    """A running server. ``log``: its output so far."""

    def __init__(self, folder: Path, *options: str, model: str = "nano") -> None:
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvasir.cli.main",
                    "serve",
                    model,
                    "--port",
                    "0",
                    "--num-threads",
                    "1",
                    *options,
                ],
                stdout=log,
                stderr=log,
            )
        self.url = ""
        try:
            self.url = self._wait(lambda: re.search(r"listening on (http://\S+)", self.log))[1]
            key = options[options.index("--api-key") + 1] if "--api-key" in options else "none"
            self.http = httpx.Client(base_url=self.url, timeout=240, headers={"Authorization": f"Bearer {key}"})
            self._wait(lambda: self.http.get("/health/ready").status_code == 200)
        except BaseException:
            self.kill()
            raise
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _wait(self, condition):
        end = time.monotonic() + START_SECONDS
        while not (found := condition()):
            assert self.process.poll() is None and time.monotonic() < end, f"the server did not start:\n{self.log}"
            time.sleep(0.02)
        return found

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its whole name, labels included."""
        return {
            name: float(value)
            for name, value in re.findall(r"^([^#\s].*) (\S+)$", self.http.get("/metrics").text, re.M)
        }

    def until_idle(self, seconds: float = 120.0) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a page; returns the metrics."""
        end = time.monotonic() + seconds
        while True:
            now = self.metrics()
            if (
                not any(now[f"kvasir:num_requests_{k}"] for k in ("running", "waiting", "blocked"))
                and now["kvasir:pages_free"] == now["kvasir:num_pages"]
            ):
                return now
            assert time.monotonic() < end, f"the server is not idle: {now}"
            time.sleep(0.05)

    def counted(self) -> dict[str, float]:
        """The metrics once heartbeats have carried over the engine's counters: metrics that look idle may be older than
        the last request, so two readings, two heartbeats apart, must agree."""
        names = ("kvasir:steps_total", "kvasir:generation_tokens_total", "kvasir:prompt_tokens_total")
        now, before = self.until_idle(), None
        while before is None or any(now[name] != before[name] for name in names):
            time.sleep(0.6)
            now, before = self.until_idle(), now
        return now

    def engine_pid(self) -> int:
        """The engine process: the server's one child."""
        import psutil

        [child] = psutil.Process(self.process.pid).children()
        return child.pid

    def terminate(self, seconds: float = 120.0) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        if self.url:
            self.http.close()


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """A server that must be alive, idle and able to end in order when the block ends."""
    server = Served(folder, *options)
    try:
        yield server
        assert server.process.poll() is None, server.log
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log, server.log
    finally:
        server.kill()
