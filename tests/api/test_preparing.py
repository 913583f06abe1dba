"""Slow templates, large bodies and panics of one caller: others do not wait for them, and nothing stays open."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvasir.api.http import limits, preparing
from kvasir.api.text.chat import Message
from kvasir.fair_threads import FairThreads
from tests.api.running import Running, key, running
from tests.api.test_server_disconnect import send

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN = {"messages": [{"role": "user", "content": "say: fine"}]}
OWN = {**PLAIN, "chat_template": "{{ 'say: mine' }}"}
ENDLESS = {**PLAIN, "chat_template": "{{ 'say: late' }}{# endless #}"}


class Held:
    """Templates, or large bodies, that take until ``go`` is set. ``running``: how many are being worked on; ``most``:
    how many there were at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.go.wait(300)
        with self._lock:
            self.running -= 1


@pytest.fixture
def templates(monkeypatch):
    from kvasir.models import tokenizer

    held, real = Held(), tokenizer.render_isolated

    def render(source, variables):
        if "endless" in source:
            held.wait()
        return real(source, variables)

    monkeypatch.setattr(tokenizer, "render_isolated", render)
    with running(enable_client_chat_template=True, api_key=("alpha", "beta")) as server:
        yield server, held
        held.go.set()
        server.idle()


def ask(server: Running, body: dict, name: str = "", path: str = CHAT) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=key(name) if name else {}, timeout=120)


def test_endless_templates_of_a_key_delay_nobody_else(templates):
    server, held = templates
    with ThreadPoolExecutor(24) as senders:
        late = [senders.submit(ask, server, ENDLESS, "alpha") for _ in range(24)]
        server.until(lambda: held.running == preparing.APART - 1)
        for name, body, said in (("beta", PLAIN, "fine"), ("alpha", PLAIN, "fine"), ("beta", OWN, "mine")):
            reply = ask(server, body, name)
            assert reply.json()["choices"][0]["message"]["content"] == said
        assert not held.go.is_set() and not any(future.done() for future in late)
        held.go.set()
        assert {future.result().status_code for future in late} == {200}
    assert held.most == preparing.APART - 1, "one thread is left for other keys"


def test_who_waits_too_long_for_a_turn_is_told_to_come_back(templates, monkeypatch):
    server, held = templates
    with ThreadPoolExecutor(4) as senders:
        first = [senders.submit(ask, server, ENDLESS, "alpha") for _ in range(preparing.APART - 1)]
        server.until(lambda: held.running == len(first))
        monkeypatch.setattr(preparing, "PATIENCE_SECONDS", 0.05)
        reply = ask(server, ENDLESS, "alpha")
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "busy" and reply.headers["retry-after"]
        held.go.set()
        assert {future.result().status_code for future in first} == {200}, "a template that renders is not cut off"


def test_a_client_that_leaves_gives_up_its_turn(templates):
    server, held = templates
    with ThreadPoolExecutor(4) as senders:
        first = [senders.submit(ask, server, ENDLESS, "alpha") for _ in range(preparing.APART - 1)]
        server.until(lambda: held.running == len(first))
        waiting = server.service.preparing.apart
        (tenant,) = waiting._running
        left = send(server, CHAT, ENDLESS, headers=key("alpha"))
        server.until(lambda: waiting.waiting(tenant) == 1)
        left.close()
        server.until(lambda: waiting.waiting(tenant) == 0)
        held.go.set()


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
def test_a_template_of_the_model_that_needs_a_process_waits_among_its_kind(path):
    """Plain prompts do not wait for it."""
    body = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"max_tokens": 3} if path == "/v1/messages" else {}
    with running() as server:
        server.service.text.tokenizer.templates["default"].apart = True
        try:
            turns, held = server.service.preparing.apart, Held()
            fillers = [turns.submit("", held.wait) for _ in range(preparing.APART)]
            server.until(lambda: held.running == preparing.APART)
            with ThreadPoolExecutor(1) as senders:
                late = senders.submit(ask, server, body, path=path)
                server.until(lambda: turns.waiting("") == 1)
                assert ask(server, {"prompt": "say: fine"}, path=TEXT).json()["choices"][0]["text"] == "fine"
                assert not late.done()
                held.go.set()
                assert late.result().status_code == 200
            for filler in fillers:
                filler.result(60)
        finally:
            server.service.text.tokenizer.templates["default"].apart = False


def test_large_bodies_delay_no_small_one(monkeypatch):
    held, real = Held(), limits.check_shape

    def check(body):
        if len(body) >= preparing.LARGE_BYTES:
            held.wait()
        real(body)

    monkeypatch.setattr(limits, "check_shape", check)
    numbers = json.dumps({"tokens": [7] * (preparing.LARGE_BYTES // 2)}, separators=(",", ":")).encode()
    with running() as server:
        senders = [send(server, "/detokenize", numbers) for _ in range(8)]
        server.until(lambda: held.running == preparing.LARGE)
        for _ in range(3):
            assert ask(server, PLAIN).json()["choices"][0]["message"]["content"] == "fine"
        held.go.set()
        for sender in senders:
            assert sender.recv(100).startswith(b"HTTP/1.1 200 ")
            sender.close()
        assert held.most == preparing.LARGE


def test_keys_take_turns():
    threads, held, order = FairThreads(1, "test"), threading.Event(), []
    first = threads.submit("a", held.wait)
    rest = [threads.submit(name, lambda name=name: order.append(name)) for name in "aaabbc"]
    held.set()
    for future in (first, *rest):
        future.result(60)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_what_waits_when_threads_are_closed_is_cancelled():
    threads, held = FairThreads(1, "test"), threading.Event()
    first = threads.submit("a", held.wait)
    late = threads.submit("a", held.wait)
    threads.close()
    assert late.cancelled() and threads.submit("a", held.wait).cancelled()
    held.set()
    assert first.result(60)


class PanicException(BaseException):
    """What a panic of a library in Rust looks like."""


def test_a_panic_is_a_json_error(monkeypatch):
    def panics(body):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    with running() as server:
        with monkeypatch.context() as broken:
            broken.setattr(limits, "check_shape", panics)
            reply = ask(server, PLAIN)
        assert reply.status_code == 500 and "gave up" in reply.json()["error"]["message"]
        with monkeypatch.context() as broken:  # on the event loop
            broken.setattr(server.engine, "stats", lambda: panics(b""))
            reply = httpx.get(server.url + "/metrics", timeout=120)
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"
        with monkeypatch.context() as broken:  # in a stream
            broken.setattr(Message, "push", lambda *args: panics(b""))
            reply = ask(server, {**PLAIN, "stream": True})
        assert reply.status_code == 200 and '"code":"internal_error"' in reply.text
        assert ask(server, PLAIN).status_code == 200
