"""Traces survive the way through shared memory, and whatever goes wrong there costs traces alone."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from kvasir.learn.ring import LEAST_BYTES, TraceRing
from kvasir.learn.trace import ACCEPTED, PLAIN, REJECTED, Trace


def a_trace(rows: int = 5, dtype: str = "bfloat16", **others) -> Trace:
    rng = np.random.default_rng(rows)
    states = torch.tensor(rng.standard_normal((rows, 2, 8)), dtype=getattr(torch, dtype))
    held = states.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else states.numpy()
    return Trace(
        tokens=np.arange(7, 7 + rows, dtype=np.int32),
        start=3,
        layers=(1, 3),
        states=held,
        dtype=dtype,
        positions=np.arange(3, 3 + rows, dtype=np.int32),
        row_tokens=np.arange(7, 7 + rows, dtype=np.int32),
        parents=np.arange(-1, rows - 1, dtype=np.int32),
        kinds=np.array(([PLAIN, ACCEPTED, REJECTED] * rows)[:rows], np.uint8),
        **others,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_trace_comes_back_to_the_bit(dtype):
    trace = a_trace(dtype=dtype, base_version=2, drafter_version=5, tenant="a", request="r")
    back = Trace.decode(trace.encode())
    assert torch.equal(back.tensor(), trace.tensor()) and back.tensor().dtype == getattr(torch, dtype)
    for name in ("tokens", "positions", "row_tokens", "parents", "kinds"):
        assert np.array_equal(getattr(back, name), getattr(trace, name))
    assert (back.start, back.layers, back.tenant, back.request) == (3, (1, 3), "a", "r")
    assert (back.base_version, back.drafter_version) == (2, 5)


def test_broken_bytes_are_refused():
    data = a_trace().encode()
    for cut in range(len(data)):
        with pytest.raises(ValueError):
            Trace.decode(data[:cut])
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    for bad in (bytes(changed), b"", b"kvtr" * 100):
        with pytest.raises(ValueError):
            Trace.decode(bad)
    trace = a_trace()
    trace.parents = trace.parents[::-1].copy()
    with pytest.raises(ValueError, match="before its parent"):
        Trace.decode(trace.encode())


@pytest.fixture
def ring(tmp_path):
    ring = TraceRing.create(tmp_path, LEAST_BYTES)
    yield ring
    ring.close()


def test_what_is_put_is_taken_in_order(ring, tmp_path):
    reader, rng = TraceRing.open(tmp_path), random.Random(1)
    sent, got = [], []
    for i in range(2000):
        data = i.to_bytes(4, "little") + rng.randbytes(rng.randrange(900))
        assert ring.put(data, 1)
        sent.append(data)
        while rng.random() < 0.7 and (data := reader.take()) is not None:
            got.append(data)
    while (data := reader.take()) is not None:
        got.append(data)
    assert got == sent and not ring.dropped
    reader.close()


def test_a_trace_goes_in_by_its_parts(tmp_path):
    """Its large arrays are copied once: into the ring."""
    ring, trace = TraceRing.create(tmp_path, 16 << 20), a_trace()
    parts = trace.parts()
    assert any(np.shares_memory(part, trace.states) for part in parts)
    assert b"".join(part.tobytes() for part in parts) == trace.encode()
    assert ring.put(parts, 1)
    reader = TraceRing.open(tmp_path)
    assert reader.take() == trace.encode()
    reader.close()
    ring.close()
    assert ring._map.closed, "its memory is given back"


def test_a_full_ring_drops_the_oldest_and_keeps_a_sample(ring, tmp_path):
    for i in range(1000):
        assert ring.put(i.to_bytes(4, "little") + bytes(396), 3)
    reader, got = TraceRing.open(tmp_path), []
    while (data := reader.take()) is not None:
        got.append(int.from_bytes(data[:4], "little"))
    fresh, kept = got[:-8], got[-8:]
    assert fresh == list(range(fresh[0], 1000)) and len(fresh) > 100, "the newest ones, in order"
    assert max(kept) < fresh[0] and min(kept) < 400, "an eighth of the memory holds a sample of all the others"
    assert ring.dropped == 3 * (1000 - len(fresh))
    assert reader.take() is None
    reader.close()


def test_too_long_or_closed_is_told_and_nothing_waits(ring, tmp_path):
    assert not ring.put(bytes(LEAST_BYTES)) and not ring.put(b"")
    assert ring.put(b"x", 1)
    ring.clear()
    reader = TraceRing.open(tmp_path)
    assert reader.take() is None, "what is to be forgotten is forgotten"
    ring.close()
    assert not ring.put(b"x")
    with pytest.raises(OSError):
        TraceRing.open(tmp_path)
    reader.close()
    assert reader.take() is None


def test_a_reader_that_is_overtaken_never_sees_a_torn_record(ring, tmp_path):
    reader, stop, bad, seen = TraceRing.open(tmp_path), threading.Event(), [], [0]

    def read() -> None:
        while not stop.is_set():
            data = reader.take()
            if data is not None:
                seen[0] += 1
                if data != data[:1] * len(data):
                    bad.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    rng = random.Random(2)
    for i in range(20000):
        ring.put(bytes([i % 251]) * rng.randrange(1, 5000), 1)
    stop.set()
    thread.join()
    assert not bad and seen[0] > 10
    reader.close()
