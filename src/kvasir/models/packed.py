"""Packed weights: safetensors files whose bf16 tensors take about two thirds of their bytes, without loss.

The high byte of a bf16 number holds the sign and most of the exponent, so it repeats: a Huffman code stores it in about
a third of its size. The low byte is close to random and stays as it is. ``model.safetensors.packed`` stands for
``model.safetensors``, shards and their index included: the index names the plain files.

The file begins like a safetensors file: the header's length as a little-endian uint64, then the header as JSON. An
entry of a packed tensor has two more fields, and its ``data_offsets`` bound the packed bytes:

- ``rows``: rows of the first dimension in a chunk (the last chunk may have fewer). Chunks are unpacked independently.
- ``high``: bytes that the deflated high plane of each chunk takes.

A chunk is its deflated high plane (zlib format, with a checksum) followed by its low plane. Tensors of other types, and
those that would not shrink, have neither field and are stored as in safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.errors import ConfigError

SUFFIX = ".packed"
# Bytes of a chunk before packing, at most (one row at least). Small chunks keep several threads busy on a small model;
# much smaller ones would waste space on their Huffman tables.
CHUNK_BYTES = 4 << 20
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a packed tensor: its ``offset`` in the file, and the ``high_bytes`` of its deflated high plane."""

    rows: int
    num_bytes: int
    offset: int
    high_bytes: int


def stored_as(file: Path) -> Path | None:
    """The file that holds the tensors of ``file``: itself, else its packed form, else None."""
    return next((f for f in (file, file.with_name(file.name + SUFFIX)) if f.is_file()), None)


def is_packed(file: Path) -> bool:
    return file.suffix == SUFFIX


def chunks_of(entry: dict[str, Any], shape: tuple[int, ...], offset: int) -> tuple[tuple[Chunk, ...], int]:
    """The chunks that a header entry describes, and the bytes they take from ``offset`` on.

    Raises KeyError, TypeError or ValueError for a damaged entry.
    """
    step, high = entry["rows"], entry["high"]
    if not isinstance(high, list) or not all(type(n) is int and n > 0 for n in [step, *high]):
        raise ValueError("rows and high must be positive whole numbers")
    rows, row_bytes = _rows(shape)
    if len(high) != -(-rows // step):
        raise ValueError(f"{len(high)} chunks of {step} rows do not hold {rows} rows")
    chunks, at = [], offset
    for first, size in zip(range(0, rows, step), high):
        count = min(step, rows - first)
        chunks.append(Chunk(count, count * row_bytes, at, size))
        at += size + count * row_bytes // 2
    return tuple(chunks), at - offset


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows of a bf16 tensor and bytes of each; a scalar is one row."""
    return (shape[0], 2 * math.prod(shape[1:])) if shape else (1, 2)


def read_chunk(file: int, into: memoryview, chunk: Chunk, what: str) -> None:
    """Unpack a chunk from the file descriptor ``file``. Raises ConfigError, which names ``what``, if it is damaged."""
    count = chunk.num_bytes // 2
    stored = os.pread(file, chunk.high_bytes + count, chunk.offset)
    unpacker = zlib.decompressobj()
    try:
        high = unpacker.decompress(memoryview(stored)[: chunk.high_bytes], count + 1)  # one more would be an error
    except zlib.error as e:
        raise ConfigError(f"{what} cannot be unpacked, its file is damaged: {e}") from e
    if len(stored) < chunk.high_bytes + count or len(high) != count or not unpacker.eof:
        raise ConfigError(f"{what} cannot be unpacked: its file is damaged or has become shorter")
    pairs = np.frombuffer(into, np.uint8).reshape(count, 2)
    pairs[:, 0] = np.frombuffer(stored, np.uint8)[chunk.high_bytes :]
    pairs[:, 1] = np.frombuffer(high, np.uint8)


def write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors to ``file``, packed. Holds their packed bytes in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        entry, data = _packed(tensor)
        size = sum(len(part) for part in data)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
            **entry,
        }
        parts += data
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.writelines(parts)


def _packed(tensor: torch.Tensor) -> tuple[dict[str, Any], list[bytes]]:
    """Fields that packing adds to a tensor's entry (none if it gains nothing), and the tensor's bytes in the file."""
    plain = tensor.reshape(-1).view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16 and tensor.numel():
        rows, row_bytes = _rows(tuple(tensor.shape))
        step = min(rows, max(1, CHUNK_BYTES // row_bytes))
        chunks = [plain[first * row_bytes : (first + step) * row_bytes] for first in range(0, rows, step)]
        high = [_deflated(chunk[1::2]) for chunk in chunks]
        if sum(map(len, high)) < tensor.numel():
            low = [chunk[0::2].tobytes() for chunk in chunks]
            planes = [plane for pair in zip(high, low) for plane in pair]
            return {"rows": step, "high": [len(h) for h in high]}, planes
    return {}, [plain.tobytes()]


def _deflated(plane: np.ndarray) -> bytes:
    """Deflate with Huffman codes alone: weights repeat no strings, and a search for them makes the result larger."""
    packer = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(plane.tobytes()) + packer.flush()
