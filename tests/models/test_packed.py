"""Packed weights: the same bits as the plain files, read by chunks into place, and damage that is named."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ConfigError
from kvasir.layers.weights import Slot
from kvasir.models import checkpoint, packed
from kvasir.models.fill import Filling, parts_of
from kvasir.models.loader import INDEX, load_model, read_header, read_headers, read_tensors
from tests.checkpoints import write

# SHA-256 of every tensor of the packaged folders (`digest`), taken from the plain safetensors that were packed.
SHIPPED = {
    "base": "a55d1f1b1dadcec048a513d40268516fe12c26ea818bc75d117c544a82774c2c",
    "nano": "b26d1e8feb53ba2e2d2179508f424c8f673aedc7bbf423c91e9b77b7830b7651",
    "drafters/medusa": "d43c5fd9d2ecccb9b8d71ffc85cc788791511dd9857c66b7a1fbf8d8ecd0053d",
    "drafters/ppd": "3437422216b5c7466dc42cf13892f3e68ec7a2d307156974e203c903638832a9",
}


def digest(folder: Path) -> str:
    """SHA-256 of the names, types, shapes and bytes of all tensors, in the order of their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(read_tensors(folder), key=lambda pair: pair[0]):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_packaged_weights_are_those_that_were_trained(name):
    folder = checkpoint.resolve("nano") if name == "nano" else checkpoint.resolve("base").parent / name
    assert not list(folder.glob("*.safetensors")) and digest(folder) == SHIPPED[name]


def tensors() -> dict[str, torch.Tensor]:
    """All that a chunk can be: several, one with fewer rows, one row, a scalar, nothing, and what does not pack."""
    draw = torch.Generator().manual_seed(0)
    return {
        "chunks": torch.randn(41, 64, generator=draw).bfloat16() * 0.02,
        "one": torch.randn(3, 64, generator=draw).bfloat16(),
        "row": torch.randn(2000, generator=draw).bfloat16(),
        "cube": torch.randn(8, 16, 4, generator=draw).bfloat16(),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "noise": torch.randint(-(2**15), 2**15, (64, 64), generator=draw, dtype=torch.int16).view(torch.bfloat16),
        "fp32": torch.randn(5, 7, generator=draw),
        "fp16": torch.randn(5, 7, generator=draw).half(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-40] * 400).bfloat16(),
    }


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(packed, "CHUNK_BYTES", 1000)  # 7 rows of 64
    file = tmp_path / ("model.safetensors" + packed.SUFFIX)
    packed.write(file, tensors())
    return file


def test_round_trip(file, tmp_path):
    want, stored = tensors(), {t.name: t for t in read_header(file)}
    found = dict(read_tensors(tmp_path))
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert [chunk.rows for chunk in stored["chunks"].chunks] == [7] * 5 + [6]
    assert not any(stored[name].chunks for name in ("scalar", "empty", "noise", "fp32", "fp16")), "they do not shrink"
    save_file(want, tmp_path / "plain")
    assert file.stat().st_size < (tmp_path / "plain").stat().st_size


def test_chunks_are_read_into_place_on_their_own(file):
    [stored] = [t for t in read_header(file) if t.name == "chunks"]
    want = tensors()["chunks"]
    fused = torch.zeros(100, 64)
    parts = list(parts_of(stored, Slot(fused[50:91], offset=1.0)))
    assert [part.shape[0] for part in parts] == [7] * 5 + [6]
    Filling(torch.device("cpu")).start([(stored, Slot(fused[50:91], offset=1.0))], []).wait()
    assert torch.equal(fused[50:91], want.float() + 1.0) and not fused[:50].any() and not fused[91:].any()
    repeated = torch.zeros(3, 41, 64)
    assert len(list(parts_of(stored, Slot(repeated, repeat=True)))) == 1
    Filling(torch.device("cpu")).start([(stored, Slot(repeated, repeat=True))], []).wait()
    assert torch.equal(repeated, want.float().expand(3, 41, 64))


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_loads_the_same_from_packed_files(shards, tmp_path):
    folder = write(tmp_path / "model", "qwen3", shards=shards)
    plain = load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32)
    for file in sorted(folder.glob("*.safetensors")):
        packed.write(file.with_name(file.name + packed.SUFFIX), load_file(file))
        file.unlink()
    assert (folder / INDEX).exists() == shards and all(t.file.suffix == packed.SUFFIX for t in read_headers(folder))
    again = load_model(folder, checkpoint.read_config(folder), device="cpu", dtype=torch.float32)
    for (name, slot), other in zip(plain.slots().items(), again.slots().values(), strict=True):
        assert torch.equal(slot.target, other.target), name


def test_a_plain_file_goes_before_its_packed_form(file, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert [t.name for t in read_headers(tmp_path)] == ["a"]


def damaged(file: Path, edit) -> None:
    """Rewrite the header of ``file`` after ``edit`` has changed the entry of the tensor "chunks"."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header["chunks"])
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + length :])


@pytest.mark.parametrize(
    "edit",
    [
        lambda entry: entry.pop("rows"),
        lambda entry: entry.update(rows=0),
        lambda entry: entry.update(rows=True),
        lambda entry: entry.update(rows=9),
        lambda entry: entry.update(high=[]),
        lambda entry: entry.update(high="many"),
        lambda entry: entry.update(high=entry["high"][:-1]),
        lambda entry: entry["high"].__setitem__(0, entry["high"][0] + 1),
        lambda entry: entry.update(dtype="F16"),
    ],
)
def test_damaged_headers_are_refused(edit, file):
    damaged(file, edit)
    with pytest.raises(ConfigError, match="tensor 'chunks'"):
        read_header(file)


def test_damaged_planes_are_refused(file, tmp_path):
    [chunk, *_] = next(t for t in read_header(file) if t.name == "chunks").chunks
    data = bytearray(file.read_bytes())
    data[chunk.offset + chunk.high_bytes // 2] ^= 255
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"model.safetensors.packed: tensor 'chunks' cannot be unpacked"):
        dict(read_tensors(tmp_path))


def test_a_file_that_becomes_shorter_is_refused(file):
    last = read_header(file)[-1]
    assert last.name == "special" and last.chunks
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="'special'.*has become shorter"):
        Filling(torch.device("cpu")).start([(last, Slot(torch.zeros(last.shape)))], []).wait()
