"""Frames and the flight record: what is valid comes through whole, everything else is refused whole."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import struct
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.client import ipc, messages
from kvasir.config import EngineConfig
from kvasir.types import EngineStats, Event, Grammar, ModelInfo, Request, SamplingParams, TokenLogprob

REQUEST = Request(
    id="a\x00ß",
    prompt_ids=[0, 1, 1 << 40],
    seed=(1 << 64) - 1,
    max_tokens=7,
    tenant="t",
    epoch=2,
    emitted=[[1], []],
    ended=[1],
    params=SamplingParams(
        n=2,
        stop=["x"],
        logit_bias={3: -1.5, 4: 2},
        seed=-5,
        allowed_token_ids=[1],
        min_p=1e-300,
        grammar=Grammar("regex", "a+", after=(9, 8)),
    ),
    bad_words=[[1, 2]],
    priority=-3,
    arrival=1.25,
)
TO_ENGINE = [
    messages.Submit((1 << 60), REQUEST),
    messages.Cancel("x", 3),
    messages.Cancel("x"),
    messages.CancelMany([("x", 3), ("y", None)]),
    messages.Stop(),
]
LOGPROB = TokenLogprob(id=5, logprob=-math.inf, rank=1, top=[(5, -0.25)])
MODEL = ModelInfo(
    name="m", max_model_len=1, vocab_size=2, tokenizer_size=2, eos_ids=(1,), config={"a": [None, {"b": 0.5}]}
)
TO_CLIENT = [
    messages.Ready(MODEL, {"x": 1.0}),
    messages.Refused("no"),
    messages.Crash("Traceback\n"),
    messages.Heartbeat(EngineStats(step=3, failed={"x": 1})),
    messages.Events(
        [
            Event(
                kind="tokens",
                request_id="r",
                token_ids=[1],
                logprobs=[LOGPROB],
                prompt_logprobs=[None, LOGPROB],
                finish_reason="stop",
                stop_reason="x",
            ),
            Event(kind="error", request_id="r", status=429, retry_after=1.5),
        ]
    ),
]


class Pair:
    """A blocking channel and the plain socket of the other side."""

    def __init__(self, union=messages.ToEngine) -> None:
        ours, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = ipc.BlockingChannel(ours, union)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_) -> None:
        self.channel.close()
        self.other.close()


async def asynchronous(union, data: bytes, count: int = 1) -> list:
    """The messages that an AsyncChannel receives from these bytes, followed by the end of the stream."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender = threading.Thread(target=lambda: (other.sendall(data), other.close()))
    sender.start()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    channel = ipc.AsyncChannel(reader, writer, union)
    try:
        return [await channel.receive() for _ in range(count)]
    finally:
        await channel.close()
        sender.join()


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_to_the_engine_come_through(message):
    with Pair() as pair:
        pair.other.sendall(ipc.encode(message))
        assert pair.channel.receive() == message


@pytest.mark.parametrize("message", TO_CLIENT, ids=lambda m: type(m).__name__)
def test_messages_to_the_client_come_through(message):
    got, end = asyncio.run(asynchronous(messages.ToClient, ipc.encode(message), 2))
    assert got == message and end is None


def test_a_configuration_comes_through():
    hello = messages.Hello(config=EngineConfig.of(model="m", num_pages=5, watchdog=2), spawned=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=messages.Hello) == hello


def test_many_frames_in_one_write_and_one_frame_in_many():
    data = b"".join(ipc.encode(m) for m in TO_ENGINE)
    with Pair() as pair:
        pair.other.sendall(data)
        assert [pair.channel.receive() for _ in TO_ENGINE] == TO_ENGINE
        writer = threading.Thread(target=lambda: [pair.other.sendall(data[i : i + 1]) for i in range(len(data))])
        writer.start()
        assert [pair.channel.receive() for _ in TO_ENGINE] == TO_ENGINE
        writer.join()
        pair.other.close()
        assert pair.channel.receive() is None


def test_a_large_frame_comes_through_both_ways():
    big = messages.Submit(
        1, Request(id="big", prompt_ids=list(range(300_000)), params=SamplingParams(), seed=0, max_tokens=1)
    )
    with Pair() as pair:
        writer = threading.Thread(target=lambda: pair.other.sendall(ipc.encode(big)))
        writer.start()
        assert pair.channel.receive() == big
        writer.join()
    assert asyncio.run(asynchronous(messages.ToEngine, ipc.encode(big)))[0] == big


GOOD = ipc.encode(messages.Cancel("x"))
BAD = {
    "half a header": GOOD[:2],
    "no body": GOOD[:4],
    "half a body": GOOD[:-1],
    "length 0": b"\0\0\0\0",
    "length 4 GiB": b"\xff\xff\xff\xff" + b"x" * 64,
    "just too long": ipc.HEADER.pack(ipc.MAX_FRAME_BYTES + 1) + b"x" * 64,
    "not msgpack": ipc.HEADER.pack(1) + b"\xc1",
    "trailing bytes": ipc.HEADER.pack(len(GOOD) - 3) + GOOD[4:] + b"\0",
    "no tag": ipc.HEADER.pack(1) + b"\x80",
    "an extension type": ipc.HEADER.pack(4) + b"\xc7\x01\x01\x00",
    "invalid UTF-8": ipc.HEADER.pack(11) + b"\x81\xa4type\xa4\xff\xff\xff\xff",
    "nested too deep": ipc.HEADER.pack(100_000) + b"\x91" * 100_000,
    "a pickle": ipc.HEADER.pack(16) + b"\x80\x04\x95\x05\0\0\0\0\0\0\0\x8c\x01a\x94.",
    "a message for the other side": ipc.encode(messages.Refused("x")),
    "a field of the wrong type": ipc.HEADER.pack(len(b := msgspec.msgpack.encode({"type": "Cancel", "request_id": 5})))
    + b,
    "a value out of range": ipc.HEADER.pack(
        len(b := ipc.encode(messages.Submit(1, REQUEST))[4:].replace(b"regex", b"roger"))
    )
    + b,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_a_bad_frame_is_an_error_on_both_sides(data):
    with Pair() as pair:
        pair.other.sendall(data)
        pair.other.close()
        with pytest.raises(ipc.FrameError):
            pair.channel.receive()
    with pytest.raises(ipc.FrameError):
        asyncio.run(asynchronous(messages.ToEngine, data))


def test_a_frame_over_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 100)
    ipc.encode(messages.Cancel("x" * 50))
    with pytest.raises(ipc.FrameError, match="limit of 100"):
        ipc.encode(messages.Cancel("x" * 100))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bodies_are_refused_or_valid(data):
    decoder = ipc.Decoder(messages.ToEngine)
    try:
        assert isinstance(decoder.body(data), messages.ToEngine)
    except ipc.FrameError:
        pass


@given(st.integers(0, len(ipc.encode(TO_ENGINE[0])) - 5), st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_flipped_byte_is_refused_or_valid(place, value):
    body = bytearray(ipc.encode(TO_ENGINE[0])[4:])
    body[place] = value
    try:
        assert isinstance(ipc.Decoder(messages.ToEngine).body(bytes(body)), messages.ToEngine)
    except ipc.FrameError:
        pass


def test_the_loss_of_the_other_side_is_an_end():
    with Pair() as pair:
        pair.other.close()
        assert pair.channel.receive() is None
        with pytest.raises(ipc.ClosedError):
            for _ in range(3):
                pair.channel.send(GOOD)


# ----------------------------------------------------------------------------------------------------- flight record


def test_the_flight_record_is_shared_and_private(tmp_path):
    written, read = ipc.Flight(tmp_path / "f", create=True), ipc.Flight(tmp_path / "f")
    assert stat.S_IMODE(os.stat(tmp_path / "f").st_mode) == 0o600
    assert (read.progress, read.steps, read.activity, read.tickets) == (0, 0, ipc.Activity.IDLE, [])
    written.beat()
    written.stepped()
    written.launch(iter([5, 1 << 40, 0]))
    assert (read.progress, read.steps, read.activity, read.tickets) == (1, 1, ipc.Activity.LAUNCHED, [5, 1 << 40, 0])
    written.launch([])
    assert (read.activity, read.tickets) == (ipc.Activity.LAUNCHED, [])
    written.busy()
    assert read.activity == ipc.Activity.BUSY
    written.idle()
    assert read.activity == ipc.Activity.IDLE
    written.close()
    assert written.closed and not read.closed
    read.close()


def test_more_requests_than_the_flight_record_holds_means_any(tmp_path):
    flight = ipc.Flight(tmp_path / "f", create=True)
    flight.launch(range(ipc.Flight.CAPACITY))
    assert flight.activity == ipc.Activity.LAUNCHED and flight.tickets[-1] == ipc.Flight.CAPACITY - 1
    flight.launch(range(ipc.Flight.CAPACITY + 1))
    assert flight.activity == ipc.Activity.BUSY
    flight.close()


def test_the_flight_record_keeps_the_last_launches(tmp_path):
    """A reader in another process sees them oldest first; one whose record was cut off is left out."""
    written, read = ipc.Flight(tmp_path / "f", create=True), ipc.Flight(tmp_path / "f")
    assert read.recorded() == []
    for step in range(ipc.Flight.RING + 9):
        written.record(step, 7, [(step, 3, 4), (1 << 40, 0, 3)], slow=step % 2 == 0)
    found = read.recorded()
    assert [launch.step for launch in found] == list(range(9, ipc.Flight.RING + 9))
    assert found[-1][2:] == (7, 2, True, [(ipc.Flight.RING + 8, 3, 4), (1 << 40, 0, 3)])
    assert [launch.seconds for launch in found] == sorted(launch.seconds for launch in found)
    wide = [(ticket, 0, 1) for ticket in range(ipc.Flight.SPANS + 5)]
    written.record(1000, 37, wide, slow=False)
    assert read.recorded()[-1].spans == len(wide) and read.recorded()[-1].kept == wide[: ipc.Flight.SPANS]
    with pytest.raises((OverflowError, struct.error)):
        written.record(1001, -1, [], slow=False)  # as if the process had died in the middle of its record
    assert [launch.step for launch in read.recorded()] == [*range(11, ipc.Flight.RING + 9), 1000]
    written.launch(range(ipc.Flight.CAPACITY))
    assert read.recorded()[-1].step == 1000, "tickets and launches do not share a place"
    written.close(), read.close()


def test_a_flight_record_is_never_taken_over(tmp_path):
    ipc.Flight(tmp_path / "f", create=True).close()
    with pytest.raises(FileExistsError):
        ipc.Flight(tmp_path / "f", create=True)
    with pytest.raises(FileNotFoundError):
        ipc.Flight(tmp_path / "g")


def test_only_the_work_at_hand_is_slow(tmp_path):
    written, read = ipc.Flight(tmp_path / "f", create=True), ipc.Flight(tmp_path / "f")
    written.launch([4, 5], True)
    assert read.slow and read.tickets == [4, 5]
    written.launch([6])
    assert not read.slow and read.tickets == [6]
