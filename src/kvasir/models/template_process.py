"""Processes that render chat templates with hard limits on memory and time."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, BinaryIO

from kvasir.errors import RequestError
from kvasir.models.template_render import render_here

# Memory of a process.
MAX_MEMORY_BYTES = 1 << 30
# Seconds of waiting beyond the CPU time of a rendering: a busy machine must not fail requests.
GRACE_SECONDS = 9.0


class Worker:
    """A process that renders templates, one at a time; it is started when first needed, and again after a limit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, source: str, variables: Mapping[str, Any], seconds: float, param: str) -> str:
        """Render a template; blocks for up to ten seconds. Raises RequestError 400, which names ``param``."""
        try:
            work = json.dumps({"source": source, "variables": dict(variables), "seconds": seconds}).encode()
        except (TypeError, ValueError, RecursionError) as e:
            raise RequestError(f"the chat template needs plain JSON: {e}", param=param) from e
        with self._lock:
            reply = self._ask(work, seconds)
        if reply is None:
            raise RequestError(
                "the chat template took too much time or memory", param=param, code="chat_template_limit"
            )
        if "error" in reply:
            raise RequestError(reply["error"], param=param, code=reply["code"])
        return reply["text"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _ask(self, work: bytes, seconds: float) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._process)
        process = self._process
        alarm = threading.Timer(seconds + GRACE_SECONDS, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            _write(process.stdin, work)
            reply = _read(process.stdout)
        except OSError:
            reply = None
        finally:
            alarm.cancel()
        found = None if reply is None else json.loads(reply)
        if found is None or found.get("code") == "chat_template_limit":
            self.close()  # its memory is in pieces, or it is dead
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass


def _write(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(8)
    if len(head) < 8:
        return None
    data = pipe.read(int.from_bytes(head, "big"))
    return data if len(data) == int.from_bytes(head, "big") else None


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (work := _read(asked)) is not None:
        found = json.loads(work)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + found["seconds"]) + 2, resource.RLIM_INFINITY))
        try:
            reply = {"text": render_here(found["source"], found["variables"], found["seconds"])}
        except RequestError as e:
            reply = {"error": str(e), "code": e.code}
        except MemoryError:
            reply = {"error": "the chat template took too much memory", "code": "chat_template_limit"}
        _write(answers, json.dumps(reply).encode())


if __name__ == "__main__":
    _serve()
