"""Loading of checkpoint bytes into a decoder's slots, in background threads with their own staging memory and stream.

A part (some rows of one tensor) is read from its file straight into a staging buffer, sent to the device on the
thread's stream, and converted into its slot there. On a GPU the staging memory is pinned and each thread has two
buffers, so that a part is read while the previous one is sent. Memory beyond the model's own: NUM_THREADS x 2 x
PART_BYTES.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kvasir.errors import ConfigError
from kvasir.layers.weights import Slot
from kvasir.logs import log
from kvasir.models.packed import Chunk, read_chunk

# Size of a part: large enough for full speed of disk and PCIe, and for few enough parts that Python's time does not
# count.
PART_BYTES = 16 << 20
# Parts have a multiple of so many rows, if they have more: codes of several rows may share a byte of a plane.
WHOLE = 8
# Most threads: one copies a few GB/s out of the page cache, and PCIe takes some 50 GB/s.
NUM_THREADS = 8
# Bytes from which on a progress bar is shown.
PROGRESS_BYTES = 1 << 30
# Most names listed in a message.
SHOWN = 5
# Python's switch interval while loading: a thread that has a part to send must not wait for the interpreter.
SWITCH_SECONDS = 5e-4
# Types by their names in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint, as its file's header describes it.

    ``offset``: place of its first byte in the file. ``chunks``: how its bytes are packed there (empty: they are not).
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Some consecutive rows of a stored tensor (all of it for a scalar), and the slots that they fill.

    ``chunks``: as in ``Stored``.
    """

    tensor: Stored
    slots: tuple[Slot, ...]
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    chunks: tuple[Chunk, ...] = ()


def parts_of(tensor: Stored, *slots: Slot) -> Iterator[Part]:
    """Split a tensor along its first dimension: chunk by chunk if packed, else into parts of at most PART_BYTES.

    A part holds one row at least; larger rows (an expert of a tensor of experts) are split themselves. ``slots``: those
    that the tensor fills, each with the part of it that is its own.
    """
    rows = tensor.shape[0] if tensor.shape else 0
    row_bytes = tensor.num_bytes // max(1, rows)
    fixed: dict[int, list[Slot]] = {}  # slots of one row of the first dimension, such as an expert: there are many
    others = [slot for slot in slots if not (slot.index and isinstance(slot.index[0], int))]
    for slot in slots:
        if slot.index and isinstance(slot.index[0], int):
            fixed.setdefault(slot.index[0], []).append(slot)
    if rows and row_bytes > PART_BYTES and len(tensor.shape) > 2 and not tensor.chunks:
        for place in range(rows):
            inner = replace(
                tensor, shape=tensor.shape[1:], num_bytes=row_bytes, offset=tensor.offset + place * row_bytes
            )
            near = (slot.row(place) for slot in (*fixed.get(place, ()), *others))
            yield from parts_of(inner, *(slot for slot in near if slot is not None))
        return
    if rows < 2 or any(slot.repeat for slot in slots):
        yield Part(tensor, slots, tensor.shape, tensor.offset, tensor.num_bytes, tensor.chunks)
        return
    first = 0
    for chunk in tensor.chunks or _cut(tensor, rows):
        inside = [slot for place in range(first, first + chunk.rows) for slot in fixed.get(place, ())] if fixed else []
        yield Part(
            tensor,
            tuple(found for slot in (*inside, *others) if (found := slot.rows(first, chunk.rows)) is not None),
            (chunk.rows, *tensor.shape[1:]),
            chunk.offset,
            chunk.num_bytes,
            (chunk,) if tensor.chunks else (),
        )
        first += chunk.rows


def _cut(tensor: Stored, rows: int) -> Iterator[Chunk]:
    """Pieces of a tensor that is not packed."""
    row_bytes = tensor.num_bytes // rows
    step = max(1, PART_BYTES // max(1, row_bytes))
    if step > WHOLE:
        step -= step % WHOLE
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield Chunk(count, count * row_bytes, tensor.offset + first * row_bytes, 0)


class _Staging:
    """The buffers of one thread, used in turn, and on a GPU the stream that empties them."""

    def __init__(self, size: int, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)]
        self.sent: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        if self.stream is not None and ready is not None:
            self.stream.wait_event(ready)
        self.turn = 0

    def load(self, part: Part, file: int) -> list[torch.Tensor]:
        """Read a part into its slots. Returns smallest and largest elements, [2] fp32 each, both NaN if any element
        is."""
        self.turn = (self.turn + 1) % len(self.buffers)
        buffer, sent = self.buffers[self.turn], self.sent[self.turn]
        if sent is not None:
            sent.synchronize()
        _read(file, memoryview(buffer.numpy())[: part.num_bytes], part)
        stored = buffer[: part.num_bytes].view(DTYPES[part.tensor.dtype]).view(part.shape)
        if self.stream is None:
            for slot in part.slots:
                slot.fill(stored)
            return [_range(stored)]
        with torch.cuda.stream(self.stream):
            sent_there = stored.to(self.device, non_blocking=True)
            for slot in part.slots:
                slot.fill(sent_there)
            self.sent[self.turn] = torch.cuda.Event()
            self.sent[self.turn].record()
            return [_range(sent_there if slot.collect is not None else slot.target) for slot in part.slots]


def _range(x: torch.Tensor) -> torch.Tensor:
    if x.numel() and x.dtype == torch.float8_e4m3fn:  # one code of each sign is NaN
        return torch.where((x.view(torch.uint8) & 0x7F).amax() == 0x7F, torch.nan, 0.0).expand(2)
    if not x.numel() or x.dtype.itemsize == 1 or not x.is_floating_point():
        return torch.zeros(2, device=x.device)
    return torch.stack(torch.aminmax(x)).float()


def _read(file: int, into: memoryview, part: Part) -> None:
    at = 0
    for chunk in part.chunks:
        read_chunk(file, into[at : at + chunk.num_bytes], chunk, f"{part.tensor.file}: tensor '{part.tensor.name}'")
        at += chunk.num_bytes
    while at < len(into):
        got = os.preadv(file, [into[at:]], part.offset + at)
        if not got:
            raise ConfigError(
                f"{part.tensor.file} ended while tensor '{part.tensor.name}' was read: the file has become shorter"
            )
        at += got


def read_tensor(tensor: Stored) -> torch.Tensor:
    """Read a stored tensor into memory of its own."""
    buffer = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    with tensor.file.open("rb") as file:
        _read(
            file.fileno(),
            memoryview(buffer.numpy()),
            Part(tensor, (), tensor.shape, tensor.offset, tensor.num_bytes, tensor.chunks),
        )
    return buffer.view(DTYPES[tensor.dtype]).view(tensor.shape)


@dataclass
class Filling:
    """The filling of slots in the background. Until ``wait`` returns their content is undefined.

    ``seconds``: time from the first read to the last copy, set by ``wait``.
    """

    device: torch.device
    num_bytes: int = 0
    seconds: float = 0.0
    futures: list[Future] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self, placed: list[tuple[Stored, Slot]], checks: list[Callable[[], None]]) -> Filling:
        """Start the threads. ``placed``: slots with the tensors that fill them; slots of one tensor are filled by one
        read of it. ``checks`` run at the same time and raise ConfigError."""
        readers: dict[str, tuple[Stored, list[Slot]]] = {}
        for tensor, slot in placed:
            readers.setdefault(tensor.name, (tensor, []))[1].append(slot)
        parts = [part for tensor, slots in readers.values() for part in parts_of(tensor, *slots)]
        # In the order of the files, so that every thread reads where the others have just read.
        queue = iter(sorted(parts, key=lambda p: (str(p.tensor.file), p.offset)))
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()  # earlier uses of the slots' memory
        size = max((p.num_bytes for p in parts), default=0)
        threads = max(1, min(NUM_THREADS, os.cpu_count() or 1, len(parts)))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
        self.num_bytes = sum(p.num_bytes for p in parts)
        lock, progress = threading.Lock(), _Progress(self.num_bytes)

        @torch.inference_mode()
        def work() -> tuple[dict[str, list[torch.Tensor]], float, float]:
            ranges: dict[str, list[torch.Tensor]] = {}
            with contextlib.ExitStack() as stack:
                staging, files = _Staging(size, self.device, ready), {}
                began = time.perf_counter()
                while not self._stop.is_set():
                    with lock:
                        part = next(queue, None)
                    if part is None:
                        break
                    path = part.tensor.file
                    if path not in files:
                        files[path] = stack.enter_context(path.open("rb")).fileno()
                    ranges.setdefault(part.tensor.name, []).extend(staging.load(part, files[path]))
                    with lock:
                        progress.advance(part.num_bytes)
                if staging.stream is not None:
                    staging.stream.synchronize()
                return ranges, began, time.perf_counter()

        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, SWITCH_SECONDS))
        self._progress = progress
        self.futures = [pool.submit(self._guard, job) for job in [*[work] * threads, *checks]]
        pool.shutdown(wait=False)
        return self

    def _guard(self, job: Callable) -> object:
        """Run a job. If it fails, the other threads end after their present part."""
        try:
            return job()
        except BaseException:
            self._stop.set()
            raise

    def wait(self) -> None:
        """Wait until every slot is filled. Raises ConfigError when a file cannot be read. Warns of weights that are not
        finite."""
        futures, self.futures = self.futures, []
        if not futures:
            return
        try:
            found = [f.result() for f in futures]
        except OSError as e:
            raise ConfigError(f"the weights cannot be read: {e}") from e
        finally:
            self._stop.set()
            sys.setswitchinterval(self._interval)
            self._progress.close()
        # Checks return nothing, and threads without a part have no times.
        found = [thread for thread in found if thread and thread[0]]
        if found:
            self.seconds = max(ended for *_, ended in found) - min(began for _, began, _ in found)
        _warn_not_finite([(name, r) for ranges, *_ in found for name, parts in ranges.items() for r in parts])


def _warn_not_finite(ranges: list[tuple[str, torch.Tensor]]) -> None:
    """Warn of weights that are not finite, with one read from the device.

    ``ranges``: smallest and largest element of each part, by name; both are NaN as soon as one element is.
    """
    if not ranges:
        return
    finite = torch.isfinite(torch.stack([r for _, r in ranges])).all(-1).tolist()
    if bad := sorted({name for (name, _), ok in zip(ranges, finite) if not ok}):
        log.warning("weights with NaN or infinite values: %s", list_names(bad))


def list_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class _Progress:
    """A progress bar, shown on a terminal when there is enough to load."""

    def __init__(self, total: int) -> None:
        self._bar = None
        if total < PROGRESS_BYTES or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("loading weights"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=total)

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
