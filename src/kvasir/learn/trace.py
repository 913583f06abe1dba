"""Traces: what the engine records of a sequence so that a drafter can learn from it.

A trace holds consecutive committed tokens of one sequence, and the outputs of the tapped layers for the rows that
computed them: rows without a draft, rows of accepted drafts, and rows of rejected ones. There are no logits. The
trainer has the model's final norm and output matrix, and the last layer is always tapped.

Legend: N tokens, R rows, L tapped layers, E model dim.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

PLAIN, ACCEPTED, REJECTED = 0, 1, 2
MAGIC = b"kvtr"
# Type of the array that holds a model's type; numpy has no bfloat16, so its bits are carried.
HOLDS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


@dataclass(slots=True, eq=False)
class Trace:
    """A piece of one sequence. Long sequences come in pieces, which follow one another without overlap.

    ``tokens`` [N] int32: known tokens from position ``start`` on. They end with the token after the last committed row.
    ``layers``: the tapped layers, ascending; the last one is the model's last. ``states`` [R, L, E]: their outputs, in
    an array of type ``HOLDS[dtype]``. ``positions`` [R] int32: position of each row's input token. ``row_tokens`` [R]
    int32: that token. ``parents`` [R] int32: the row before it on its path, by index in this trace; -1 where that row
    was not recorded. A parent stands before its child. ``kinds`` [R] uint8: PLAIN (its token was not drafted), ACCEPTED
    or REJECTED. Rows that are not REJECTED have ascending positions; some may be missing (prefixes from the cache).
    ``base_version``: counts the served model's weights; ``drafter_version``: `Drafter.version` at the piece's end.
    ``tenant``: whose request it was. ``request``: hash of the request's id and branch, equal for pieces of a sequence.
    ``prompt``: number of the prompt's tokens, counted from position 0; they are context, and nobody learns to guess
    them.
    """

    tokens: np.ndarray
    start: int
    layers: tuple[int, ...]
    states: np.ndarray
    dtype: str
    positions: np.ndarray
    row_tokens: np.ndarray
    parents: np.ndarray
    kinds: np.ndarray
    base_version: int = 0
    drafter_version: int = 0
    tenant: str = ""
    request: str = ""
    prompt: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.positions)

    def tensor(self) -> Any:
        """A copy of the states as a torch tensor [R, L, E] in the model's type."""
        import torch

        if self.dtype == "bfloat16":
            return torch.from_numpy(self.states.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(self.states.copy())

    def encode(self) -> bytes:
        """The trace as bytes: magic, checksum, length of the head, the head as msgpack, then the arrays."""
        return b"".join(part.tobytes() for part in self.parts())

    def parts(self) -> list[np.ndarray]:
        """The bytes of `encode` in pieces [N] uint8, of which the large ones are views of this trace's arrays."""
        head: dict[str, Any] = {}
        arrays = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                kind = HOLDS[self.dtype] if field.name == "states" else TYPES[field.name]
                array = np.ascontiguousarray(value, kind)
                head[field.name] = array.shape
                arrays.append(array.reshape(-1).view(np.uint8))
            else:
                head[field.name] = value
        packed = msgspec.msgpack.encode(head)
        first = np.frombuffer(len(packed).to_bytes(4, "little") + packed, np.uint8)
        checksum = 0
        for part in (first, *arrays):
            checksum = zlib.crc32(part, checksum)
        return [np.frombuffer(MAGIC + checksum.to_bytes(4, "little"), np.uint8), first, *arrays]

    @classmethod
    def decode(cls, data: bytes) -> Trace:
        """The trace that ``encode`` made bytes of. Its arrays are read-only views. Raises ValueError for bytes that are
        cut short, changed, or no trace."""
        if data[:4] != MAGIC or len(data) < 12:
            raise ValueError("these bytes are no trace")
        body = memoryview(data)[8:]
        if zlib.crc32(body) != int.from_bytes(data[4:8], "little"):
            raise ValueError("a trace is broken: its checksum does not match")
        at = 4 + int.from_bytes(body[:4], "little")
        try:
            head = msgspec.msgpack.decode(body[4:at], type=dict[str, Any])
            found: dict[str, Any] = {}
            for field in fields(cls):
                value = head[field.name]
                kind = HOLDS[head["dtype"]] if field.name == "states" else TYPES.get(field.name)
                if kind is not None:
                    shape, count = tuple(value), int(np.prod(value, dtype=np.int64))
                    value = np.frombuffer(body, kind, count, at).reshape(shape)
                    at += value.nbytes
                found[field.name] = tuple(value) if field.name == "layers" else value
            trace = cls(**found)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a trace is broken: {error}") from error
        trace.check()
        return trace

    def check(self) -> None:
        """Raise ValueError where the parts contradict one another."""
        rows = self.num_rows
        if not (len(self.states) == len(self.row_tokens) == len(self.parents) == len(self.kinds) == rows):
            raise ValueError("a trace is broken: its arrays have different numbers of rows")
        if self.states.ndim != 3 or self.states.shape[1] != len(self.layers):
            raise ValueError("a trace is broken: its states do not fit its layers")
        if (self.parents >= np.arange(rows)).any() or (self.parents < -1).any():
            raise ValueError("a trace is broken: a row stands before its parent")


TYPES = {"tokens": "<i4", "positions": "<i4", "row_tokens": "<i4", "parents": "<i4", "kinds": "<u1"}
