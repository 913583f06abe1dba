"""Decode steps on a CPU from tapes: one is recorded for each number of sequences and pages, rounded up, that keeps
coming back.

A tape's step has fixed tensors for everything that changes: token ids, positions, where keys and values go, which pages
are read, and which of their slots are seen. A padding row is a sequence of length one in page 0. Steps whose rows have
variants have tapes of their own.

Legend: S sequences (one row each, padded), W pages of the longest (padded), P slots per page, G KV heads, N = W * P, V
vocabulary.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import torch

from kvasir.engine.ways.step_way import StepParts, StepWay
from kvasir.engine.ways.tape import Arena, Tape, record
from kvasir.engine.ways.taps import Tapped, TappedHandle, Taps
from kvasir.kernels.paged_attention import INF
from kvasir.kernels.store_kv import row_index
from kvasir.types import Handle, Span, StepBatch

# Most rows of a taped step. In a larger one the calls' own cost is small compared with their work.
MAX_ROWS = 32
# Most bytes of keys and values that a layer of a taped step reads, for the same reason, and to bound memory.
MAX_READ = 8 << 20
# Tapes that are kept; the one used least recently goes first.
MAX_TAPES = 64
# The step of a shape that is recorded. A shape that only passes by is not worth the recording.
RECORD_AT = 3


class DecodeTapes(StepWay):
    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.page_bytes = parts.pool.page_bytes(0) // len(parts.caches)  # one layer's
        self.tapped: Tapped | None = None
        self._next: _Step | None = None
        self.weights_changed()

    @staticmethod
    def can_serve(parts: StepParts) -> bool:
        """Whether there is one cache group, of plain pages, and plain attention in normal mode, on a CPU."""
        model, pool = parts.model, parts.pool
        specs = [layer.mixer.attention() for layer in model.spec.layers]
        return (
            model.place.device.type == "cpu"
            and not model.place.exact
            and parts.backend.reference
            and len(pool.groups) == 1
            and all(block.ffn.static for block in model.blocks)
            and specs[0] is not None
            and all(s == specs[0] and s.window is None and s.softcap is None and not s.sinks for s in specs)
            and pool.codec.blocks_of(pool.layer(0), np.zeros((1, 1), np.int64)) is not None
        )

    def takes(self, spans: list[Span]) -> bool:
        """Steps of one sampled row for each sequence, of a shape that keeps coming back.

        Pages that the step begins are cleared whether it runs here or not, for a tape may read them later."""
        self._clear(spans)
        self._next = self._step(spans)
        return self._next is not None

    @torch.inference_mode()
    def run(self, spans: list[Span]) -> Handle:
        count = len(spans)
        handle = self.parts.sample(spans, self._next.run(spans)[:count])
        hidden_TLE = None if self.tapped is None else self.parts.taps.taken(self.tapped, count)
        return handle if hidden_TLE is None else TappedHandle(handle, spans, hidden_TLE)

    def use_taps(self, taps: Taps) -> None:
        self.tapped = taps.memory(_rounded(MAX_ROWS, 1))

    def weights_changed(self) -> None:
        """Drop every tape: its calls name tensors made of the old weights."""
        self.arena = Arena()
        self._seen: Counter[tuple[int, int, bool]] = Counter()
        self._steps: OrderedDict[tuple[int, int, bool], _Step] = OrderedDict()

    def _step(self, spans: list[Span]) -> _Step | None:
        """The tape for these spans; None: they are another kind of step, or too rare a shape."""
        if len(spans) > MAX_ROWS or any(
            s.length != 1 or s.start >= len(s.seq.tokens) or "sample" not in s.want for s in spans
        ):
            return None
        page_slots = self.parts.pool.page_slots
        last = max(s.seq.place(0, s.start) for s in spans)
        rows, pages = _rounded(len(spans), 1), _rounded(last // page_slots + 1, 2)
        varied = self.parts.varied(spans)
        key = rows, pages, varied
        step = self._steps.get(key)
        if step is None:
            self._seen[key] += 1
            if self._seen[key] < RECORD_AT or rows * pages * self.page_bytes > MAX_READ:
                return None
            while len(self._steps) >= MAX_TAPES:
                self._steps.popitem(last=False)
            step = self._steps[key] = _Step(self, rows, pages, varied)
        self._steps.move_to_end(key)
        return step

    def _clear(self, spans: list[Span]) -> None:
        """Zero each page whose first slot is written now: a tape reads whole pages, and a weight of zero times NaN is
        NaN."""
        size = self.parts.pool.page_slots
        ends = [(s, s.seq.place(0, s.start + s.length)) for s in spans]
        fresh = [s.seq.tables[0][end // size] for s, end in ends if end % size and end // size * size >= end - s.length]
        if fresh:
            self.parts.pool.clear(0, fresh)


class _Step:
    """The fixed tensors of one shape, and the tape over them. A step writes only what differs from the step before."""

    def __init__(self, home: DecodeTapes, rows: int, pages: int, varied: bool) -> None:
        self.home = home
        parts = home.parts
        size, cache, dtype = parts.pool.page_slots, parts.caches[0], parts.model.place.dtype
        ids, positions, slots = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
        bias = torch.zeros(rows, 1, 1, pages * size, dtype=dtype)
        self.ids, self.positions, self.slots = ids.numpy(), positions.numpy(), slots.numpy()
        self.tables = np.zeros((rows, pages), np.int64)
        # numpy has no bf16: the mask is written as the bits of zero and of minus infinity.
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        self.mask, self.unseen = (
            bias.view(rows, -1).view(bits).numpy(),
            torch.tensor(-INF, dtype=dtype).view(bits).item(),
        )
        self.pages: list[list[int]] = [[] for _ in range(rows)]  # by row: the pages in ``tables``
        self.places = [0] * rows  # by row: the last slot that it sees, counted from its first page
        self.write, (self.read, shape) = (
            row_index(slots, cache.planes["k"]),
            parts.pool.codec.blocks_of(cache, self.tables),
        )
        tables = torch.from_numpy(self.tables)
        self.batch = StepBatch(
            ids,
            positions,
            torch.arange(rows + 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            (tables,),
            (slots,),
            torch.arange(rows),
            [0] * rows,
            [1] * rows,
        )
        if varied:
            self.batch.variants = torch.zeros(rows, dtype=torch.int32)
        spec = parts.model.spec.layers[0].mixer.attention()
        self.batch.scratch["write", 0, spec.num_kv_heads, spec.head_dim] = {"rows": self.write}
        shared = {"blocks": self.read, "shape": shape, "pages": tables}
        parts.backend.pin(self.batch, spec, dtype, bias, shared)
        for row in range(rows):
            self._see(row, 0)
        self.tape: Tape | None = None

    def run(self, spans: list[Span]) -> torch.Tensor:
        self._fill(spans)
        if self.tape is None:
            self.tape = record(self._forward, self.home.arena)
            return self.tape.result
        return self.tape.replay()

    def _forward(self) -> torch.Tensor:
        parts, tapped = self.home.parts, self.home.tapped
        taps = None if tapped is None else tapped.by_layer
        return parts.model.logits(parts.model.forward(self.batch, parts.caches, parts.backend, taps))

    def _fill(self, spans: list[Span]) -> None:
        parts, moved = self.home.parts, False
        size, cache = parts.pool.page_slots, parts.caches[0]
        for row, span in enumerate(spans):
            start, place, table = span.start, span.seq.place(0, span.start), span.seq.tables[0]
            last = place // size
            self.ids[row], self.slots[row] = span.seq.tokens[start], table[last] * size + place % size
            self.positions[row] = start
            moved |= self._turn(row, table[: last + 1])
            self._see(row, place)
            if self.batch.variants is not None:
                self.batch.variants[row] = span.seq.variant_at(start)
        for row in range(len(spans), len(self.ids)):
            self.slots[row] = 0
            moved |= self._turn(row, [])
            if self.batch.variants is not None:
                self.batch.variants[row] = 0
            self.positions[row] = 0
            self._see(row, 0)
        codec = parts.pool.codec
        self.write.copy_(row_index(self.batch.slots[0], cache.planes["k"]))
        if moved:
            self.read.copy_(codec.blocks_of(cache, self.tables)[0])

    def _turn(self, row: int, pages: list[int]) -> bool:
        """Give the row these pages. Returns whether it had others."""
        if pages == self.pages[row]:
            return False
        self.pages[row] = pages
        self.tables[row, : len(pages)], self.tables[row, len(pages) :] = pages, 0
        return True

    def _see(self, row: int, place: int) -> None:
        """Let the row see the slots up to ``place``."""
        if place == self.places[row] + 1:
            self.mask[row, place] = 0
        else:
            self.mask[row, : place + 1], self.mask[row, place + 1 :] = 0, self.unseen
        self.places[row] = place


def _rounded(count: int, least: int) -> int:
    """Round ``count`` up by a quarter at most, or to a multiple of ``least``, so that there are few shapes."""
    step = max(least, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step
