"""Memory of large bodies: nothing keeps a body after its answer, and what was freed goes back to the system."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest

from kvasir.api.http import limits, memory, preparing
from tests.api.running import Running, running

CHAT, TEXT, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
REFUSED = {
    "an unknown field": (CHAT, {"messages": HI, "no_such_field": 1}),
    "a long prompt": (TEXT, {"prompt": [1] * 100_000}),
    "a long text": (CHAT, {"messages": [{"role": "user", "content": "a b " * 100_000}]}),
    "a bad schema": (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {}}}),
    "a bad item": (RESPONSES, {"input": [{"type": "no_such_item"}]}),
    "a bad tool": (MESSAGES, {"messages": HI, "max_tokens": 4, "tools": [{"name": "x"}]}),
    "a bad text": (TOKENIZE, {"prompt": 5}),
    "a batch of prompts": (TEXT, {"prompt": ["a"] * 1000}),
}


class Body(dict):
    """A decoded body that can be watched."""


@pytest.fixture
def watched(monkeypatch):
    """Weak references to every body that a server decodes."""
    found: list[weakref.ref] = []
    decode = limits.decode_json

    def watch(raw):
        body = Body(decode(raw))
        found.append(weakref.ref(body))
        return body

    monkeypatch.setattr(limits, "decode_json", watch)
    return found


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_body_is_not_kept(http, server: Running, watched, kind):
    """Without the collector, which a server runs rarely: an error that a future carried is part of a circle."""
    path, body = REFUSED[kind]
    gc.disable()
    try:
        r = http.post(path, json=body)
        assert r.status_code >= 400, r.text
        server.idle()
        assert watched
        server.until(lambda: all(ref() is None for ref in watched), seconds=20)
    finally:
        gc.enable()


def test_large_bodies_are_followed_by_a_trim(monkeypatch):
    monkeypatch.setattr(preparing, "LARGE_BYTES", 1000)
    monkeypatch.setattr(memory, "TRIM_BYTES", 3000)
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.0)
    given_back = []
    monkeypatch.setattr(memory, "_give_back", lambda: given_back.append(1))
    with running() as server:
        trimmer = server.service.preparing.trimmer

        def send(size: int, count: int) -> None:
            import httpx

            for _ in range(count):
                body = {"messages": [{"role": "user", "content": "say: a"}], "user": "x" * size}
                assert httpx.post(server.url + CHAT, json=body, timeout=60).status_code == 200

        send(100, 40)
        assert trimmer.trims == 0, "usual bodies cost nothing"
        send(2000, 1)
        assert trimmer.trims == 0
        send(2000, 2)
        server.until(lambda: trimmer.trims == 1 and given_back)


PROGRAM = """
import sys
from kvasir.api.http import memory
if sys.argv[1] == "limited":
    memory.limit_allocator()
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) << 10
x = b"x" * (30 << 20); del x  # a freed mapping raises the size from which on there are mappings
before = resident()
kept = []
bodies = []
for i in range(100):
    bodies.append(bytearray(b"x" * (1 << 20)))
    kept.append(bytearray(600))
bodies.clear()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_bodies_leave_the_process():
    def left(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert left("limited") < 10 << 20
    assert left("as it is") > 30 << 20, "negative control"
