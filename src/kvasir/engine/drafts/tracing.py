"""Records what verifications showed, for drafters that learn: rows of steps become traces in a ring in shared memory.

The step loop does little: it notes which rows of a traced span were plain, accepted or rejected. The hidden states of
some steps go to the host in one copy, in a stream of its own, into pinned memory that was taken at the start. A thread
makes traces of them. Where it falls behind, or the ring is full or broken, rows are dropped. A step never waits.

Legend: R rows, L tapped layers, E model dim.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvasir.engine.drafts.drafting import committed_rows
from kvasir.learn.ring import TraceRing
from kvasir.learn.trace import ACCEPTED, HOLDS, PLAIN, REJECTED, Trace
from kvasir.logs import log
from kvasir.speculation.heads import send
from kvasir.types import Sequence, Span, SpanResult

# Share of the requests that are traced while drafts pay as well as they did.
SAMPLED = 0.02
# Rows of a sequence, and their bytes, after which a piece of its trace leaves: long requests must not be learned from
# last, and a piece has to fit a slot of the ring's reservoir.
PIECE_ROWS, PIECE_BYTES = 1024, 4_000_000
# Bytes of a buffer in pinned memory, and their number.
BUFFER_BYTES, BUFFERS = 16 << 20, 4
# Steps whose rows go to the host together, unless they are so many rows before. Each copy wakes the thread, which then
# holds Python's interpreter for a while: a step of prompts, whose launch the GPU waits for, would wait for that, too.
STEPS_TOGETHER, ROWS_TOGETHER = 8, 256
# Copies that may wait for the thread where there are no such buffers.
WAITING = 64


@dataclass(slots=True, eq=False)
class _Open:
    """A traced sequence: the next position that was not recorded, the place of the row before it in the piece (-1: not
    there), the piece's first position, and its rows so far."""

    request: str
    tenant: str
    prompt: int
    next: int = 0
    before: int = -1
    start: int = -1
    rows: int = 0


@dataclass(slots=True)
class _Rows:
    """Recorded rows of a span, on their way to the host. ``end`` is set with the last of a piece: its first position,
    and its tokens from there on."""

    seq: _Open
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    states: Any = None  # [R, L, E] on the device, later an array on the host
    end: tuple[int, list[int]] | None = None

    def add(self, position: int, token: int, parent: int, kind: int) -> int:
        """Add a row. Returns its place in the piece."""
        if self.seq.rows == 0:
            self.seq.start = position
        self.positions.append(position)
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.seq.rows += 1
        return self.seq.rows - 1


class Tracer:
    """Records the sequences that ``agreed`` and the sample choose. ``layers``: the tapped layers, of which the last is
    the model's last. ``versions``: gives the numbers of the model's and the drafter's weights."""

    def __init__(
        self,
        ring: TraceRing,
        layers: tuple[int, ...],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        agreed: Callable[[Sequence], bool],
        versions: Callable[[], tuple[int, int]],
    ) -> None:
        self.all = True  # whether all requests are traced, not a sample
        self.traced = 0  # tokens that went into the ring
        self.failed = ""  # why nothing is traced any more
        self._ring, self._layers, self._agreed, self._versions = ring, layers, agreed, versions
        self._dtype = str(dtype).removeprefix("torch.")
        self._dropped = 0
        self._noted: list[_Rows] = []  # what was recorded and not sent
        self._num_noted = self._num_steps = 0  # rows in it, and steps since the last copy
        row_bytes = len(layers) * hidden_size * dtype.itemsize
        self._piece_rows = max(1, min(PIECE_ROWS, PIECE_BYTES // row_bytes))
        # A piece is let go of once it is full, so that the last rows of a tree may lie beyond its end.
        self._buffer_rows = max(2 * self._piece_rows, BUFFER_BYTES // row_bytes)
        self._pieces: dict[_Open, list[_Rows]] = {}  # the thread's
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._device = device
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            for _ in range(BUFFERS):
                shape = self._buffer_rows, len(layers), hidden_size
                self._buffers.put(torch.empty(shape, dtype=dtype, pin_memory=True))
        self._thread = threading.Thread(target=self._run, name="kvasir-traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Tokens that were recorded and are lost: to a thread that fell behind, or in the ring before they were
        read."""
        return self._dropped + self._ring.dropped

    def wants(self, seq: Sequence) -> bool:
        """Whether this sequence is traced."""
        if self.failed:
            return False
        if isinstance(seq.state.get("trace"), _Open):
            return True
        if seq.state.get("trace") is False and not self.all:  # looked at, and not chosen
            return False
        name = hashlib.blake2b(f"{seq.request.id}/{seq.branch}".encode(), digest_size=8).digest()
        chosen = self.all or int.from_bytes(name, "little") < SAMPLED * 2**64
        if not chosen or not self._agreed(seq):
            seq.state["trace"] = False
            return False
        seq.state["trace"] = _Open(name.hex(), seq.request.tenant, seq.num_prompt)
        return True

    # -------------------------------------------------------------------------------------------------------- the steps

    def record(self, span: Span, result: SpanResult, tokens: list[int], hidden_RLE: torch.Tensor) -> None:
        """Note the rows of a committed span. ``tokens``: those of its rows, as they were before it was committed;
        ``hidden``: the outputs of the layers for its rows."""
        seq = span.seq
        if not self.wants(seq):
            return
        one: _Open = seq.state["trace"]
        self._num_noted += span.length
        kept = committed_rows(span, result) if result.path else list(range(seq.num_computed - span.start))
        anchor = result.path[0] if result.path else len(tokens)
        rows, chosen = _Rows(one), []
        places: dict[int, int] = {}
        for i, row in enumerate(kept):
            position = span.start + i
            if position < one.next:  # computed again after a preemption
                continue
            before = one.before if position == one.next else -1
            places[row] = one.before = rows.add(position, tokens[row], before, ACCEPTED if row > anchor else PLAIN)
            one.next = position + 1
            chosen.append(row)
            if one.rows >= self._piece_rows and row < anchor:
                self._take_along(rows, hidden_RLE, chosen)
                self._end(rows, seq)
                rows, chosen, places = _Rows(one), [], {}
        # Nothing behind the place where a stop rule cut the path was judged.
        if result.path and len(kept) == result.path[0] + len(result.path):
            depth = {row: span.start + i for i, row in enumerate(kept)}
            for row in range(anchor + 1, len(tokens)):
                parent = row - 1 if span.parents is None else span.parents[row]
                if row not in depth and parent in places:
                    depth[row] = depth[parent] + 1
                    places[row] = rows.add(depth[row], tokens[row], places[parent], REJECTED)
                    chosen.append(row)
        if chosen:
            self._take_along(rows, hidden_RLE, chosen)
            if one.rows >= self._piece_rows:
                self._end(rows, seq)

    def _take_along(self, rows: _Rows, hidden_RLE: torch.Tensor, chosen: list[int]) -> None:
        """Note the hidden states of these rows of a span."""
        first, count = chosen[0], len(chosen)
        whole = chosen == list(range(first, first + count))
        if whole:
            rows.states = hidden_RLE[first : first + count]
        else:  # rows of a tree, by an index that is sent without waiting for the device
            rows.states = hidden_RLE.index_select(0, send(np.array(chosen), hidden_RLE.device))
        self._noted.append(rows)

    def _end(self, rows: _Rows, seq: Sequence) -> None:
        """Let a piece end with these rows."""
        one = rows.seq
        rows.end = one.start, seq.tokens[one.start : one.next + 1]
        one.before, one.start, one.rows = -1, -1, 0

    def close(self, seq: Sequence) -> None:
        """Let the trace of a sequence that ends leave."""
        one = seq.state.pop("trace", None)
        if isinstance(one, _Open) and one.rows:
            rows = _Rows(one)
            self._end(rows, seq)
            self._noted.append(rows)

    def stepped(self) -> None:
        """Send what some steps have recorded on its way to the host. Called once a step."""
        self._num_steps += 1
        if self._num_steps >= STEPS_TOGETHER or self._num_noted >= ROWS_TOGETHER:
            self.send()

    def send(self) -> None:
        """Send all that was recorded on its way to the host."""
        noted, self._noted = self._noted, []
        self._num_noted = self._num_steps = 0
        if not noted or self.failed:
            return
        with torch.inference_mode():
            for part in self._portions(noted):
                self._copy(part)

    def _portions(self, noted: list[_Rows]) -> list[list[_Rows]]:
        """The rows in groups that fit a buffer each."""
        groups: list[list[_Rows]] = [[]]
        size = 0
        for rows in noted:
            if groups[-1] and size + len(rows.positions) > self._buffer_rows:
                groups.append([])
                size = 0
            groups[-1].append(rows)
            size += len(rows.positions)
        return groups

    def _copy(self, part: list[_Rows]) -> None:
        """Launch the copy of these rows to the host, and leave the rest to the thread."""
        given = [rows.states for rows in part if rows.states is not None]
        count = sum(map(len, given))
        for rows in part:
            rows.states = None
        if not given:
            self._work.put((part, None, None))
        elif self._stream is None:
            full = self._work.qsize() > WAITING
            self._work.put((part, None if full else torch.cat(given), None))
        else:
            try:
                buffer = self._buffers.get_nowait()
            except queue.Empty:
                self._work.put((part, None, None))
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                buffer[:count].copy_(torch.cat(given), non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            for states in given:
                states.record_stream(self._stream)
            self._work.put((part, buffer, done))

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                self._take(*work)
            except Exception as error:  # whatever it is, it costs traces alone
                self.failed = f"{type(error).__name__}: {error}"
                log.exception("nothing is traced any more")
                return

    def _take(self, part: list[_Rows], states_RLE: torch.Tensor | None, done: torch.cuda.Event | None) -> None:
        """Join rows that have arrived to their pieces, and put whole pieces into the ring. Rows without states were
        lost on the way."""
        if states_RLE is not None:
            count, first = sum(len(rows.positions) for rows in part), 0
            if done is not None:
                done.synchronize()
            held = states_RLE[:count].view(torch.int16) if self._dtype == "bfloat16" else states_RLE[:count]
            array = held.numpy().view(HOLDS[self._dtype])
            if done is not None:
                array = array.copy()
                self._buffers.put(states_RLE)
            for rows in part:
                rows.states = array[first : first + len(rows.positions)]
                first += len(rows.positions)
        for rows in part:
            pieces = self._pieces.setdefault(rows.seq, [])
            if rows.positions:
                pieces.append(rows)
            if rows.end is not None:
                self._put(self._pieces.pop(rows.seq), *rows.end)

    def _put(self, pieces: list[_Rows], start: int, tokens: list[int]) -> None:
        """Put a piece into the ring. One that has lost rows is lost: what lies around the gap no longer fits
        together."""
        count = sum(len(rows.positions) for rows in pieces)
        if not pieces or any(rows.states is None for rows in pieces):
            self._dropped += count
            return
        one = pieces[0].seq
        base, drafter = self._versions()
        trace = Trace(
            tokens=np.array(tokens, np.int32),
            start=start,
            layers=self._layers,
            states=np.concatenate([rows.states for rows in pieces]),
            dtype=self._dtype,
            positions=np.array([position for rows in pieces for position in rows.positions], np.int32),
            row_tokens=np.array([token for rows in pieces for token in rows.tokens], np.int32),
            parents=np.array([parent for rows in pieces for parent in rows.parents], np.int32),
            kinds=np.array([kind for rows in pieces for kind in rows.kinds], np.uint8),
            base_version=base,
            drafter_version=drafter,
            tenant=one.tenant,
            request=one.request,
            prompt=one.prompt,
        )
        if self._ring.put(trace.parts(), count):
            self.traced += count
        else:
            self._dropped += count

    # ----------------------------------------------------------------------------------------- while nothing is running

    def forget(self) -> None:
        """Drop all traces: the model that they were recorded of is gone."""
        self.drain()
        self._ring.clear()

    def drain(self, seconds: float = 5.0) -> None:
        """Wait until the thread has put all that was recorded into the ring, at most ``seconds``."""
        self.send()
        done = threading.Event()
        self._work.put(done)
        if self._thread.is_alive():
            done.wait(seconds)

    def stop(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join(5.0)
