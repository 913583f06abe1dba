"""A record of the log is one line, whatever bytes a client put into it: nobody forges a line or steers a terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir import logs
from tests.api.running import running

SOURCES = Path(logs.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# A line that looks like ours, the colour red, a backward cursor, and marks that turn the direction of text round.
FORGED = "09:00:00 INFO forged \x1b[31m red \x1b[1A \u202e turned"
HOSTILE = f"x\n{FORGED}\r\n{FORGED}\x00\x85\u2028{FORGED}"
OURS = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")


class Log:
    """What our handler writes while the block runs, and the loggers as they were after it."""

    def __enter__(self) -> io.StringIO:
        self.loggers = [logs.log, *map(logging.getLogger, logs.FOREIGN)]
        self.before = [(one, one.handlers[:], one.level, one.propagate) for one in self.loggers]
        logs.setup("DEBUG")
        self.out = io.StringIO()
        logs.log.handlers[0].setStream(self.out)
        return self.out

    def __exit__(self, *_: object) -> None:
        for one, handlers, level, propagate in self.before:
            one.handlers[:], one.level, one.propagate = handlers, level, propagate
            one.setLevel(level)


def check(text: str) -> None:
    """Every line is one of ours, or an indented one of a traceback, and holds nothing that a terminal obeys."""
    for line in text.split("\n")[:-1]:
        assert OURS.match(line) or line.startswith("    "), repr(line)
        assert line.replace("\t", "").isprintable(), repr(line)
    assert not re.search(r"^\S+ INFO forged", text, re.M)


def calls() -> list[tuple[str, ast.Call]]:
    """Every call of a logger in the package: place and call."""
    return [
        (f"{file.relative_to(SOURCES)}:{node.lineno}", node)
        for file in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "log"
    ]


def test_every_place_that_logs_escapes_whatever_it_is_given():
    """All texts of all calls at once: each is formatted with hostile text for every place that takes text."""
    found = calls()
    assert len(found) > 100
    for place, call in found:
        message = call.args[0]
        text = message.value if isinstance(message, ast.Constant) else "%s"
        kinds = re.findall(r"%[-+#0 ]*[\d.]*([a-zA-Z])", text.replace("%%", ""))
        several = any(option.arg == "extra" for option in call.keywords)
        with Log() as out:
            arguments = tuple(HOSTILE if kind in "sra" else 1 for kind in kinds)
            extra = {"several_lines": True} if several else None
            logs.log.error(text, *arguments, extra=extra)
        check(out.getvalue())
        assert several or out.getvalue().count("\n") == 1, place


def test_only_our_own_processes_write_several_lines_and_no_other_handler_is_made():
    several = [place.partition(":")[0] for place, call in calls() if any(o.arg == "extra" for o in call.keywords)]
    assert set(several) <= {"client/engine_process.py", "client/front.py", "client/replica.py"}, several
    made = [
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if re.search(r"\b(StreamHandler|FileHandler|basicConfig|lastResort|logging\.Formatter)\b", file.read_text())
    ]
    assert made == ["logs.py"], "each handler has to escape"


@given(st.text(), st.text(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_stays_in_its_record(text, cause, fails):
    with Log() as out:
        try:
            raise ValueError(text) from KeyError(cause)
        except ValueError:
            logs.log.warning("%s and %r", text, cause, exc_info=fails)
    check(out.getvalue())
    assert fails or out.getvalue().count("\n") == 1


# -------------------------------------------------------------------------------------------------- a server's places

RAW = FORGED.encode()


def ask(server, target: str, body: object = None, headers: bytes = b"", method: str = "POST") -> bytes:
    """Send a request as bytes, as no client library would, and return the reply."""
    data = b"" if body is None else json.dumps(body).encode()
    with socket.create_connection(server.socket.getsockname(), timeout=60) as client:
        client.sendall(
            f"{method} {target} HTTP/1.1\r\ncontent-length: {len(data)}\r\nconnection: close\r\n".encode()
            + (b"" if b"host:" in headers else b"host: 127.0.0.1\r\n")
            + b"content-type: application/json\r\n"
            + headers
            + b"\r\n"
            + data
        )
        reply = b""
        while chunk := client.recv(1 << 16):
            reply += chunk
    return reply


def chat(**more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "say: x"}], "max_tokens": 2, **more}


PATH = "/x%0a09:00:00%20INFO%20forged%1b[31m%e2%80%ae"
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": HOSTILE, "parameters": {"type": "object"}}}
# Place, the request, and whether its text has to be in the log: those whose text is logged today.
PLACES = {
    "path": (dict(target=PATH, method="GET"), True),
    "path of a run": (dict(target=f"/v1/scaling/runs{PATH}", method="GET"), True),
    "path of a response": (dict(target=f"/v1/responses{PATH}", method="GET"), True),
    "method": (dict(target="/health", method="FOR\x1bGED"), False),
    "query": (dict(target=f"/health?{PATH}", method="GET"), False),
    "Host": (dict(target="/health", method="GET", headers=b"host: evil\x1b[31m\r\n"), False),
    "Host by name": (dict(target="/health", method="GET", headers=b"host: evil.example\r\n"), True),
    "Origin": (
        dict(
            target=CHAT,
            method="OPTIONS",
            headers=b"origin: http://a\xc2\x85\xe2\x80\xa8\xff\r\naccess-control-request-method: POST\r\n",
        ),
        True,
    ),
    "request id": (dict(target=CHAT, body=chat(), headers=b"x-request-id: " + RAW + b"\r\n"), False),
    "other headers": (
        dict(target=CHAT, body=chat(), headers=b"traceparent: \xff\xe2\x80\xa8\r\nuser-agent: \x1b[31m\r\n"),
        False,
    ),
    "model": (dict(target=CHAT, body=chat(model=HOSTILE)), False),
    "tool": (dict(target=CHAT, body=chat(tools=[TOOL])), False),
    "tool of an answer": (
        dict(
            target=CHAT,
            body=chat(tool_choice={"type": "function", "function": {"name": HOSTILE}}, tools=[TOOL]),
        ),
        False,
    ),
    "name of a foreign field": (dict(target="/v1/messages", body=chat(**{HOSTILE: 1})), False),
    "name of a foreign field of a message": (
        dict(target=CHAT, body=chat(messages=[{"role": "assistant", "content": "x", HOSTILE: 1}, *chat()["messages"]])),
        True,
    ),
    "schema": (
        dict(
            target=CHAT,
            body=chat(
                response_format={"type": "json_schema", "json_schema": {"name": HOSTILE, "schema": {HOSTILE: 1}}}
            ),
        ),
        False,
    ),
    "adapter": (dict(target="/v1/load_lora_adapter", body={"lora_name": HOSTILE, "lora_path": HOSTILE}), False),
    "text": (dict(target="/v1/completions", body={"prompt": HOSTILE, "user": HOSTILE, "stop": [HOSTILE]}), False),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_byte_of_a_client_steers_the_log(place, caplog):
    request, logged = PLACES[place]
    with Log() as out, running(log_requests=True, allow_runtime_lora=True, allowed_hosts=("mine.example",)) as server:
        before = out.getvalue()
        reply = ask(server, **request)
        server.idle()
        assert ask(server, "/health", method="GET").startswith(b"HTTP/1.1 200"), "the next caller is served"
    assert reply.startswith(b"HTTP/1.1 "), reply
    told = out.getvalue().removeprefix(before)
    check(out.getvalue())
    marks = ("forged", "evil", "http://a")
    assert any(mark in told for mark in marks) == logged or not logged, told


def test_a_bug_that_quotes_the_client_is_told_in_indented_lines(monkeypatch):
    def bug(*_: object) -> None:
        raise RuntimeError(HOSTILE)

    with Log() as out, running() as server:
        monkeypatch.setattr(server.engine, "generate", bug)
        ask(server, CHAT, chat())
        server.until(lambda: "forged" in out.getvalue())
    check(out.getvalue())


def test_the_check_can_fail(monkeypatch):
    """With a formatter that escapes nothing, a path forges a line."""
    monkeypatch.setattr(logs, "Escaping", logging.Formatter)
    with Log() as out, running(log_requests=True) as server:
        ask(server, PATH, method="GET")
        server.until(lambda: "forged" in out.getvalue())
    with pytest.raises(AssertionError):
        check(out.getvalue())
