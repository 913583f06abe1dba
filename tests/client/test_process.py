"""The engine process by itself: its start, the signals it ignores, and its end when its client ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvasir.client import engine_process as process
from kvasir.client import ipc, messages
from kvasir.config import EngineConfig
from kvasir.types import EngineStats, Event, Request, SamplingParams
from tests.engine.fake_core import expected
from tools.checkout import python_path

PROCESS = [sys.executable, "-m", "kvasir.client.engine_process", "--socket"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start engine processes on sockets of this test; returns (process, connection, channel)."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    with contextlib.ExitStack() as stack:

        def begin(core: str = "FakeCore", **options):
            folder = tmp_path / "private"
            folder.mkdir()
            stack.callback(ipc.Flight(folder / process.FLIGHT, create=True).close)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(folder / "socket"))
            listener.listen(1)
            listener.settimeout(20)
            child = stack.enter_context(
                subprocess.Popen(
                    [*PROCESS, str(folder / "socket"), "--factory", f"tests.engine.fake_core:{core}"],
                    stdin=subprocess.PIPE,
                )
            )
            stack.callback(child.kill)
            child.stdin.write(msgspec.msgpack.encode(messages.Hello(config=EngineConfig.of(**options))))
            child.stdin.close()
            connection = stack.enter_context(listener.accept()[0])
            return child, connection, ipc.BlockingChannel(connection, messages.ToClient)

        yield begin


def events(channel: ipc.BlockingChannel, count: int) -> list:
    """Receive ``count`` events, with no other message than heartbeats between them."""
    found = []
    while len(found) < count:
        message = channel.receive()
        assert message is not None
        found += getattr(message, "events", [])
    return found


def request(name: str = "r", faults: str = "", n: int = 1) -> Request:
    return Request(id=name, prompt_ids=[1], params=SamplingParams(n=n), seed=3, max_tokens=5, tenant=faults)


def test_a_request_on_the_wire_and_an_orderly_stop(start):
    child, _, channel = start()
    ready = channel.receive()
    assert (
        isinstance(ready, messages.Ready)
        and ready.info.name == "fake"
        and {"spawn", "import", "build"} <= set(ready.startup)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)  # the client decides when it ends
    channel.send(ipc.encode(messages.Submit(1, request())))
    got = events(channel, 6)
    assert [e.kind for e in got] == ["accepted"] + ["tokens"] * 5
    assert [t for e in got for t in e.token_ids] == expected(request())[0] and got[-1].finish_reason == "length"
    channel.send(ipc.encode(messages.Cancel("nobody")))
    channel.send(ipc.encode(messages.Stop()))
    assert child.wait(60) == 0


def test_an_arrival_comes_as_an_age(tmp_path):
    """The sender's clock says nothing here: its host may have started a year later."""
    near, far = socket.socketpair()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    with near, far:
        channel = ipc.BlockingChannel(far, messages.ToEngine)
        threading.Thread(target=process._read_forever, args=(channel, inbox, tmp_path), daemon=True).start()
        foreign = dataclasses.replace(request(), arrival=time.monotonic() + 1e7)
        near.sendall(ipc.encode(messages.Submit(1, foreign, 3.0)))
        got = inbox.get(timeout=60)
        assert 2.9 < time.monotonic() - got.request.arrival < 60
        near.detach()  # its end would end this process


def test_messages_in_one_batch_are_taken_in_order(start):
    _, _, channel = start("SlowCore")
    channel.receive()
    channel.send(
        b"".join(
            map(
                ipc.encode,
                [
                    messages.Submit(1, request("a", n=2)),
                    messages.Cancel("a", 1),
                    messages.Submit(2, request("b")),
                    messages.Cancel("b"),
                    messages.Submit(3, request("b")),
                ],
            )
        )
    )
    got = events(channel, 3 + 2 + 10)
    ends = {(e.request_id, e.branch, e.finish_reason) for e in got if e.finish_reason}
    assert ends == {("a", 1, "cancelled"), ("b", 0, "cancelled"), ("a", 0, "length"), ("b", 0, "length")}


def test_tokens_and_a_cancel_in_one_step_end_a_branch_once():
    """With ``finish_after``, two ends in one step become one event, and the other branches still run."""
    sent: list = []
    core, flight = SimpleNamespace(stats=EngineStats), SimpleNamespace(launch=lambda tickets: None, idle=lambda: None)
    channel, decode = (
        SimpleNamespace(send=lambda frame: sent.extend(decode(frame[ipc.HEADER.size :]).events)),
        ipc.Decoder(messages.ToClient).body,
    )
    loop = process.Loop(core, channel, queue.SimpleQueue(), flight, 1.0)
    core.submit = lambda request: []
    loop._handle(messages.Submit(1, dataclasses.replace(request(n=3), piece=32)))

    def tokens(branch: int, index: int, reason: str | None = None) -> Event:
        return Event(
            kind="tokens",
            request_id="r",
            branch=branch,
            index=index,
            token_ids=[] if reason else [7],
            finish_reason=reason,
        )

    loop._send([tokens(branch, 0) for branch in range(3)])
    loop._send(
        [tokens(2, 1), *(event for branch in range(2) for event in (tokens(branch, 1), tokens(branch, 2, "cancelled")))]
    )
    assert loop._tickets == {"r": 1}
    loop._send([tokens(2, 2, "length")])
    assert [sum(len(event.token_ids) for event in sent if event.branch == branch) for branch in range(3)] == [2, 2, 2]
    assert not loop._tickets and not loop._branches


@pytest.mark.parametrize(
    ("core", "kind", "words", "code"),
    [
        ("refusing", messages.Refused, "no memory left", process.REFUSED),
        ("broken", messages.Crash, "a bug in the loader", process.CRASHED),
    ],
)
def test_a_failed_start_says_why(start, core, kind, words, code):
    child, _, channel = start(core)
    message = channel.receive()
    assert isinstance(message, kind) and words in (message.message if kind is messages.Refused else message.traceback)
    assert channel.receive() is None and child.wait(60) == code


def test_a_crash_says_why_and_the_flight_record_who(start, tmp_path):
    child, _, channel = start()
    channel.receive()
    channel.send(
        b"".join(ipc.encode(messages.Submit(10 + i, request(str(i), "raise@3" if i == 1 else ""))) for i in range(3))
    )
    while not isinstance(message := channel.receive(), messages.Crash):
        assert message is not None
    assert "ZeroDivisionError: a bug in the engine" in message.traceback and "_advance" in message.traceback
    assert child.wait(60) == process.CRASHED
    flight = ipc.Flight(tmp_path / "private" / process.FLIGHT)
    assert flight.activity == ipc.Activity.LAUNCHED and 11 in flight.tickets and set(flight.tickets) <= {10, 11, 12}
    flight.close()


@pytest.mark.parametrize("faults", ["", "hang@2"])
def test_it_ends_with_its_client_even_in_a_long_step_and_leaves_no_folder(start, tmp_path, faults):
    child, connection, channel = start("SlowCore")
    channel.receive()
    if faults:
        channel.send(ipc.encode(messages.Submit(1, request(faults=faults))))
        events(channel, 3)
    channel.close()
    connection.close()
    assert child.wait(60) == 0
    assert not (tmp_path / "private").exists()


def test_a_client_that_is_killed_during_the_start_leaves_no_folder(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    ipc.Flight(folder / process.FLIGHT, create=True).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "socket"))
    assert (
        process.serve(str(folder / "socket"), "", messages.Hello(config=EngineConfig()), time.monotonic())
        == process.CRASHED
    )
    assert not folder.exists()


def test_it_ends_when_its_client_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path())
    code = """
import asyncio, sys
from kvasir.config import EngineConfig
from kvasir.client.engine_client import AsyncEngine
async def main():
    it = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
    await it.start()
    print(it.replica.child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        pid = int(client.stdout.readline())
        assert len(list(tmp_path.iterdir())) == 1
        client.kill()
    for _ in range(2000):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the engine process outlived its client")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", ipc.encode(messages.Refused("for the other side"))]
)
def test_a_malformed_frame_ends_it(start, data):
    child, connection, channel = start()
    channel.receive()
    connection.sendall(data)
    assert child.wait(60) == process.CRASHED


def test_an_idle_process_sleeps(start, tmp_path):
    child, _, channel = start()
    channel.receive()
    channel.receive()
    flight = ipc.Flight(tmp_path / "private" / process.FLIGHT)
    before = flight.progress
    for _ in range(3):
        assert isinstance(channel.receive(), messages.Heartbeat)
    assert 1 <= flight.progress - before <= 6, "it beats with its heart, and does nothing else"
    flight.close()


def test_a_start_collects_rarely_and_what_it_made_stays(monkeypatch):
    gc.unfreeze()  # what the suite keeps frozen
    met, usual = [], gc.get_threshold()

    def build(config):
        met.append((gc.get_threshold()[0], gc.get_freeze_count() > process.YOUNG_OBJECTS))
        return SimpleNamespace(stats=lambda: SimpleNamespace(startup={}))

    monkeypatch.setattr(process, "_factory", lambda name: build)
    try:
        process._build(messages.Hello(config=EngineConfig()), "", 0.0)
        met.append((gc.get_threshold()[0], gc.get_freeze_count() > process.YOUNG_OBJECTS))
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
    assert met == [(process.YOUNG_OBJECTS, False), (process.YOUNG_OBJECTS, True)]


def test_no_configuration_is_an_error(tmp_path):
    ran = subprocess.run([*PROCESS, str(tmp_path / "s")], input=b"\xc1", capture_output=True)
    assert ran.returncode != 0 and b"msgspec" in ran.stderr
