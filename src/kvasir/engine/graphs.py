"""Decode steps over static buffers, captured once per batch size and replayed: the host's part is two numbers a row.

A step takes this path when every row of it draws a token: decodes, and chains of drafts, whose rows are decodes of one
sequence at successive positions (each layer writes all keys before any row attends). It is padded to a *bucket* of rows; padding rows
run with the padding row's token and write to the dummy page, where nobody reads. Page tables, sampling parameters and the
tokens to go on from lie on the device already (``device_rows.py``); what has changed since is sent along.

A bucket runs in a larger captured one a few times, or uncaptured, so that nobody waits for the capture of a size that only
passes by, and kernels are compiled and libraries loaded before it. Buckets that were never used are captured when the engine
is idle (``capture_next``).

Legend: B rows of a bucket, M rows of a slice, V vocabulary, E model dim, P slots per page.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.decoding.sampler import MASKED_ERROR, NUMERIC_ERROR, Sampler, resolve_span
from kvasir.engine.device_rows import UNKNOWN, DeviceRows
from kvasir.engine.spans import ONE_SAMPLE
from kvasir.engine.taps import Tapped, Taps
from kvasir.kernels.decode_rows import close_rows, open_rows
from kvasir.kernels.sample import sample_rows
from kvasir.kv.codec import LayerCache
from kvasir.logs import log
from kvasir.models.decoder import Decoder
from kvasir.types import Span, SpanResult, StepBatch

Work = Callable[[], None]
Capture = Callable[[Work], Work]
EAGER_STEPS = 4  # of a bucket before it is captured
PADDED = 2  # times its size: the largest bucket that stands in for one that is not captured yet; padding rows are nearly free
LOGIT_BYTES = 256 << 20  # of logits at a time, as fp32: each further slice reads the head once more
DRAFT_ROWS = 128  # beyond, drafts are not captured: each row reads its keys anew, which then costs more than launching kernels one by one
GRAPH_BYTES = 3 << 20  # of device memory that one instantiated graph takes beside its tensors, by experience


def buckets(max_rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 256, of 32 beyond, and the largest."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def call_through(work: Work) -> Work:
    """No capture: the same buffers and the same padding, run as they are. For devices without graphs."""
    return work


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool: they are replayed one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that frees device memory would spoil the capture
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return graph.replay


class DecodeGraphs:
    def __init__(self, model: Decoder, caches: list[LayerCache], backend: AttentionBackend, sampler: Sampler, rows: DeviceRows,
                 capture: Capture, max_drafts: int = 0) -> None:
        """``max_drafts``: that a sequence may have verified in a step; steps with drafts are captured up to ``DRAFT_ROWS`` rows."""
        self.model, self.caches, self.backend, self.sampler, self.rows = model, caches, backend, sampler, rows
        self._drafts = max_drafts > 0
        self.most_drafted = min(DRAFT_ROWS, sampler.max_seqs * (1 + max_drafts))
        self.buckets = buckets(max(sampler.max_seqs, self.most_drafted))
        self._plain = self.buckets[:bisect_left(self.buckets, sampler.max_seqs) + 1]  # those that decodes alone may need
        self._capture: Capture | None = capture
        self._ready: dict[tuple[int, bool, bool], Work] = {}  # (bucket, whether it draws, whether it holds drafts) -> replay
        self._uses: Counter[tuple[int, bool, bool]] = Counter()
        most, device = self.buckets[-1], rows.words.device
        self._device = device
        self._page_slots = caches[0].page_slots
        self._inbox = torch.zeros(3 * most, dtype=torch.int64, device=device)  # of a bucket: rows, starts, and draft tokens or -1
        self._row_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(most, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, model.spec.hidden_size, dtype=model.place.dtype, device=device)
        self._draws = torch.zeros(3 * most, dtype=torch.float32, device=device)
        self.step_bytes = 64 << 20  # of device memory that a capture may need
        # What crosses over is staged in turns: a buffer is written again only after the step that used it was read.
        self._stages = cycle([_Stage(most, device) for _ in range(2)])
        self._host_starts: list[int] = []
        self._taps: Taps | None = None
        self._tapped: Tapped | None = None

    def use_taps(self, taps: Taps) -> None:
        """Graphs captured from now on also write what ``taps`` asks for."""
        self._taps, self._tapped = taps, taps.memory(self.buckets[-1])

    # ---------------------------------------------------------------------------------------------------------- running

    def takes(self, spans: list[Span]) -> bool:
        """Whether these spans are decodes and chains of drafts, and nothing else."""
        if all(span.want is ONE_SAMPLE for span in spans):
            return len(spans) <= self.buckets[-1]
        return (sum(span.length for span in spans) <= self.most_drafted
                and all(span.parents is None and len(span.want.get("sample", ())) == span.length for span in spans))

    def bucket(self, num_rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def _fit(self, num_rows: int, draws: bool, drafted: bool) -> int:
        """The bucket that these rows run in now: their own, or a captured one somewhat larger until they have come often."""
        size = self.bucket(num_rows)
        key = size, draws, drafted
        if key in self._ready or self._capture is None or self._uses[key] >= EAGER_STEPS - 1:
            return size
        larger = next((s for s in self.buckets[bisect_right(self.buckets, size):] if (s, draws, drafted) in self._ready), None)
        if larger is None or larger > PADDED * size:
            return size
        self._uses[key] += 1
        return larger

    def replays(self, size: int, drafted: bool = False) -> bool:
        """Whether a drawing step of this bucket is captured."""
        return (size, True, drafted) in self._ready

    def decode(self, spans: list[Span]) -> DecodeHandle:
        """Forward and draw, by the parameters that the rows have on the device."""
        size, stage, drafted = self._send(spans, True)
        self._run(size, True, drafted)
        stage.take(self._draws[:3 * size])
        return DecodeHandle(stage, size, spans, [span.tokens() for span in spans] if drafted else None)

    def forward(self, spans: list[Span]) -> torch.Tensor:
        """Hidden states [T, E] before the final norm; valid until the next step."""
        size, _, drafted = self._send(spans, False)
        self._run(size, False, drafted)
        return self._hidden[:sum(span.length for span in spans)]

    def hidden(self, spans: list[Span]) -> torch.Tensor | None:
        """What the step launched last has tapped [T, layers, E], if anybody wants it."""
        return None if self._taps is None else self._taps.taken(self._tapped, sum(span.length for span in spans))

    def _send(self, spans: list[Span], draws: bool) -> tuple[int, _Stage, bool]:
        """Bring rows, starts and what else changed to the device. Returns the bucket, the host buffers in use and whether
        there are drafts."""
        stage = next(self._stages)
        if any(span.length > 1 for span in spans):
            return *self._send_drafts(spans, stage, draws), True
        count = len(spans)
        size = self._fit(count, draws, False)
        starts = [span.start for span in spans]
        rows_S, starts_S = stage.inbox[:count], stage.inbox[size:size + count]
        rows_S[:], starts_S[:] = [span.row for span in spans], starts
        stage.inbox[count:size], stage.inbox[size + count:2 * size] = self.rows.padding, 0
        self._bring(stage, spans, rows_S, starts_S, 2 * size)
        self.rows.drawn(rows_S, starts_S + 1)
        self._host_starts = starts + [0] * (size - count)
        return size, stage, False

    def _send_drafts(self, spans: list[Span], stage: _Stage, draws: bool) -> tuple[int, _Stage]:
        """The same with one row a draft behind each sequence's own; their tokens come along."""
        lengths = [span.length for span in spans]
        count = sum(lengths)
        size = self._fit(count, draws, True)
        rows, first = np.array([span.row for span in spans]), np.array([span.start for span in spans])
        starts = [span.start + i for span in spans for i in range(span.length)]
        inbox = stage.inbox[:3 * size].reshape(3, size)
        inbox[:, :count] = np.repeat(rows, lengths), starts, [token for span in spans for token in (-1, *span.tokens()[1:])]
        inbox[:, count:] = np.array([[self.rows.padding], [0], [-1]])
        self._bring(stage, spans, rows, first, 3 * size)
        self.rows.drawn(rows, UNKNOWN)  # which of its draws a row goes on from is seen when they are read
        self._host_starts = starts + [0] * (size - count)
        return size, stage

    def _bring(self, stage: _Stage, spans: list[Span], rows_S: np.ndarray, starts_S: np.ndarray, num_words: int) -> None:
        places, content = self.rows.changes(spans, rows_S, starts_S)
        self._inbox[:num_words].copy_(stage.inbox_tensor[:num_words], non_blocking=True)
        if places:
            at, words = stage.changes(places, content, self._device)
            self.rows.words.index_copy_(0, at, words)

    def _run(self, size: int, draws: bool, drafted: bool) -> None:
        key = size, draws, drafted
        work = self._ready.get(key)
        if work is None:
            self._uses[key] += 1
            if self._capture is None or self._uses[key] <= EAGER_STEPS or not self._try_capture(*key):
                return self._compute(*key)
            work = self._ready[key]
        work()

    def _compute(self, size: int, draws: bool, drafted: bool) -> None:
        """The step itself, over the first ``size`` rows of the static buffers."""
        rows_B, starts_B = self._inbox[:size], self._inbox[size:2 * size]
        opened = open_rows(self.rows.kept, rows_B, starts_B, self._page_slots, self._inbox[2 * size:3 * size] if drafted else None)
        batch = StepBatch(
            input_ids=opened.ids, positions=starts_B, row_start=self._row_start[:size + 1], context=opened.context,
            tables=tuple(opened.tables), slots=tuple(opened.slots), logit_rows=self._logit_rows[:size], starts=self._host_starts,
            lengths=[1] * size)
        self.backend.plan(batch)
        hidden_BE = self.model.forward(batch, self.caches, self.backend, None if self._tapped is None else self._tapped.by_layer)
        if not draws:
            self._hidden[:size].copy_(hidden_BE)
            return
        draws_3B = self._draws[:3 * size].view(3, size)
        step = max(1, LOGIT_BYTES // (4 * self.sampler.vocab_size))
        for first in range(0, size, step):
            part = slice(first, min(first + step, size))
            drawn = sample_rows(self.model.logits(hidden_BE[part]), opened.temperature[part], opened.top_k[part], opened.top_p[part],
                                opened.min_p[part], opened.stream[part], starts_B[part], self.sampler.tokenizer_size)
            close_rows(drawn, draws_3B[:, part], self.rows.token, rows_B[part], self.sampler.vocab_size)

    # -------------------------------------------------------------------------------------------------------- capturing

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more bucket, smallest first, while nothing is in flight. False: none is left."""
        drafted = ((size, True) for size in self.buckets if self._drafts and 1 < size <= self.most_drafted)
        key = next((key for key in [*((size, False) for size in self._plain), *drafted] if not self.replays(*key)), None)
        if key is None or self._capture is None:
            return False
        size, drafts = key
        self._inbox[:size], self._inbox[size:2 * size], self._inbox[2 * size:3 * size] = self.rows.padding, 0, -1
        self._host_starts = [0] * size
        self._compute(size, True, drafts)
        return self._try_capture(size, True, drafts)

    def _try_capture(self, size: int, draws: bool, drafted: bool) -> bool:
        """Capture a bucket. Where that fails, this process does without graphs from then on: they are never needed."""
        try:
            if self._device.type == "cuda":
                self._check_memory()
            self._ready[size, draws, drafted] = self._capture(lambda: self._compute(size, draws, drafted))
        except Exception as error:
            self._capture = None
            log.warning("no more CUDA graphs: a decode step of %d rows cannot be captured (%s: %s)", size, type(error).__name__, error)
            return False
        return True

    def _check_memory(self) -> None:
        """The allocator's cache may hold what the capture needs, and cannot be emptied while it runs."""
        needed = GRAPH_BYTES + self.step_bytes
        if torch.cuda.mem_get_info(self._device)[0] < needed:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(self._device)[0] < needed:
            raise torch.OutOfMemoryError(f"less than {needed >> 20} MiB of device memory are left")

    @torch.inference_mode()
    def measure(self) -> tuple[int, int]:
        """Bytes of ``step_bytes``, and with the graphs of all buckets: what the largest step needs beside the static buffers,
        with a quarter on top for fragments. The buckets share it: they run one after the other."""
        size = self.buckets[-1]
        self._inbox[:size], self._inbox[size:2 * size] = self.rows.padding, 0
        self._host_starts = [0] * size
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._compute(size, True, False)
        torch.cuda.synchronize(self._device)
        step = (torch.cuda.max_memory_allocated(self._device) - held) * 5 // 4
        return step, step + GRAPH_BYTES * len(self.buckets) * (1 + self._drafts)


class _Stage:
    """Pinned host memory of one step: what goes to the device, and the draws that come back."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pinned = pinned
        self.inbox_tensor = torch.zeros(3 * max_rows, dtype=torch.int64, pin_memory=pinned)
        self.inbox = self.inbox_tensor.numpy()
        self._draws = torch.zeros(3 * max_rows, dtype=torch.float32, pin_memory=pinned)
        self._draws_array = self._draws.numpy()
        self._done = torch.cuda.Event() if pinned else None
        self._changes = torch.zeros(0, dtype=torch.int64)

    def changes(self, places: list[int], content: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Both on the device in one copy: int64 [K], and int32 [K] in the words behind."""
        count = len(places)
        size = count + (count + 1) // 2
        if len(self._changes) < size:
            self._changes = torch.zeros(max(256, 2 * size), dtype=torch.int64, pin_memory=self._pinned)
        self._changes.numpy()[:count] = places
        self._changes.view(torch.int32).numpy()[2 * count:3 * count] = content
        there = self._changes[:size].to(device, non_blocking=True)
        return there[:count], there.view(torch.int32)[2 * count:3 * count]

    def take(self, draws: torch.Tensor) -> None:
        """Fetch the draws of the step launched last."""
        self._draws[:len(draws)].copy_(draws, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self, size: int) -> np.ndarray:
        """Wait for them: [3, size]."""
        if self._done is not None:
            self._done.synchronize()
        return self._draws_array[:3 * size].reshape(3, size)


class DecodeHandle:
    """A launched decode step. ``held``: with drafts, the tokens of each span's rows."""

    __slots__ = ("_stage", "_size", "_spans", "_held")

    def __init__(self, stage: _Stage, size: int, spans: list[Span], held: list[list[int]] | None = None) -> None:
        self._stage, self._size, self._spans, self._held = stage, size, spans, held

    def read(self) -> list[SpanResult]:
        """Wait for the step; one result per span."""
        if self._held is not None:
            return self._walked(self._held)
        ids, largest, best = self._stage.read(self._size)[:, :len(self._spans)]
        results = [SpanResult([token]) for token in ids.astype(np.int64).tolist()]
        if not (np.isfinite(largest).all() and np.isfinite(best).all()):
            for i in range(len(results)):
                if not largest[i] < np.inf:
                    results[i] = SpanResult(error=NUMERIC_ERROR)
                elif best[i] == -np.inf:
                    results[i] = SpanResult(error=MASKED_ERROR)
        return results

    def _walked(self, held: list[list[int]]) -> list[SpanResult]:
        ids, largest, best = self._stage.read(self._size)
        tokens = ids.astype(np.int64).tolist()
        errors = {m: MASKED_ERROR for m in np.flatnonzero(best == -np.inf).tolist()}
        errors |= {m: NUMERIC_ERROR for m in np.flatnonzero(~(largest < np.inf)).tolist()}
        results, first = [], 0
        for span, ours in zip(self._spans, held):
            rows = {i: first + i for i in range(span.length)}
            results.append(resolve_span(span, ours if span.length > 1 else [], rows, tokens, errors, {}, {}))
            first += span.length
        return results
