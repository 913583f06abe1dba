"""Filling slots from files by threads: every byte in its place whatever the parts, and every failure reported."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ConfigError
from kvasir.layers.weights import Slot
from kvasir.models import fill
from kvasir.models.fill import Filling, parts_of
from kvasir.models.loader import read_header

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@pytest.fixture
def file(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "wide": torch.randn(37, 501, generator=draw).bfloat16(),
        "deep": torch.randn(5, 7, 11, generator=draw),
        "scalar": torch.tensor(3.5),
        "vector": torch.randn(1000, generator=draw).half(),
        "norm": torch.randn(16, generator=draw),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def targets(device, dtype=torch.float32):
    """A slot for each tensor, some of them slices, transposed, shifted or repeated."""

    def empty(*shape):
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    return {
        "wide": Slot(empty(501, 90)[:, 20:57].t()),
        "deep": Slot(empty(9, 7, 11)[2:7], offset=1.0),
        "scalar": Slot(empty()),
        "vector": Slot(empty(3, 1000)[1]),
        "norm": Slot(empty(6, 16), offset=0.5, repeat=True),
        "none": Slot(empty(0, 4)),
    }


def run(file, slots, device):
    stored = {t.name: t for t in read_header(file)}
    filling = Filling(torch.device(device)).start([(stored[name], slot) for name, slot in slots.items()], [])
    filling.wait()
    return filling


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part_bytes", [1, 100, 5000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_in_its_place(part_bytes, dtype, file, device, monkeypatch):
    monkeypatch.setattr(fill, "PART_BYTES", part_bytes)
    slots, want = targets(device, dtype), load_file(file)
    run(file, slots, device)
    for name, slot in slots.items():
        expected = want[name].to(dtype) + torch.tensor(slot.offset, dtype=dtype)
        assert torch.equal(slot.target.cpu(), expected.expand(slot.target.shape)), name


def test_parts_are_small_and_cover_the_tensor(file, monkeypatch):
    monkeypatch.setattr(fill, "PART_BYTES", 5000)
    for tensor in read_header(file):
        parts = list(parts_of(tensor, targets("cpu")[tensor.name]))
        assert [p.offset for p in parts] == [
            tensor.offset + sum(q.num_bytes for q in parts[:i]) for i in range(len(parts))
        ]
        assert sum(p.num_bytes for p in parts) == tensor.num_bytes and max(p.num_bytes for p in parts) <= 5000
    assert len(list(parts_of(next(t for t in read_header(file) if t.name == "wide"), targets("cpu")["wide"]))) == 10


def test_a_file_that_shrinks_is_reported(file):
    slots, stored = targets("cpu"), {t.name: t for t in read_header(file)}
    file.write_bytes(file.read_bytes()[:-2000])
    filling = Filling(torch.device("cpu")).start([(stored[name], slot) for name, slot in slots.items()], [])
    with pytest.raises(ConfigError, match="model.safetensors ended while tensor"):
        filling.wait()
    filling.wait()  # says it once


def test_a_file_that_is_gone_is_reported(file):
    slots, stored = targets("cpu"), {t.name: t for t in read_header(file)}
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read.*model.safetensors"):
        Filling(torch.device("cpu")).start([(stored[name], slot) for name, slot in slots.items()], []).wait()


@pytest.mark.parametrize("device", DEVICES)
def test_how_much_and_how_long(file, device, monkeypatch):
    """``seconds`` is the time from the first read to the last copy, without the time until somebody waits."""
    load, seen, started = fill._Staging.load, [], time.perf_counter()

    def slowly(self, part, number):
        seen.append(time.perf_counter())
        time.sleep(0.02)
        found = load(self, part, number)
        seen.append(time.perf_counter())
        return found

    monkeypatch.setattr(fill._Staging, "load", slowly)
    stored, slots = {t.name: t for t in read_header(file)}, targets(device)
    filling = Filling(torch.device(device)).start(
        [(stored[name], slot) for name, slot in slots.items()], [lambda: None]
    )
    concurrent.futures.wait(filling.futures)
    done = time.perf_counter()
    time.sleep(0.1)
    filling.wait()
    assert filling.num_bytes == sum(t.num_bytes for t in stored.values()) == 40682
    assert max(seen) - min(seen) <= filling.seconds <= done - started
    assert Filling(torch.device(device)).seconds == 0.0, "random weights are not read"


def test_nothing_is_left_behind(file):
    interval = sys.getswitchinterval()
    run(file, targets("cpu"), "cpu")
    assert sys.getswitchinterval() == interval
    left = [t for t in threading.enumerate() if t.name.startswith("weights")]
    for thread in left:  # they end by themselves, a moment after the last piece
        thread.join(60)
    assert not any(t.is_alive() for t in left)
