"""Decode steps over static buffers, captured once per batch size and replayed: the host's part is a few numbers a row.

A step takes this path when every row of it draws a token or is a guest: decodes, and spans that verify drafts. It is padded to a
*bucket* of rows; padding rows run with the padding row's token and write to the dummy page, where nobody reads. Page tables, sampling
parameters and the tokens to go on from lie on the device already (``device_seats.py``); what has changed since is sent along.
Where rows ask for the log-probability of what they draw, the step reports it, of all rows: such steps are captured by themselves.

Which rows are of one span, and who is whose ancestor, are numbers of the rows like their tokens, so one graph of a bucket serves every
mixture of decodes, chains and trees that fits it. Attention reads the keys of a span once for a tile of its rows; how many rows a
span may have decides the tile (``AttentionBackend.together``), and is the *form* of a step. A backend that cannot do this runs chains row
by row: each row is a decode of its own at the next position, since each layer writes all keys before any row attends.

A bucket runs in a larger captured one, where there is one, until it has come often: a capture takes longer than a few such
steps gain. Otherwise it runs uncaptured a few times, so that nobody waits for the capture of a size that only passes by, and kernels are
compiled and libraries loaded before it. Buckets that were never used are captured when the engine is idle (``capture_next``).

Legend: B rows of a bucket, M rows of a slice, G guests of a drafter, V vocabulary, E model dim, P slots per page.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate, cycle

import numpy as np
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.decoding.sampler import NUMERIC_ERROR, Sampler, StepOutput, resolve_span
from kvasir.engine.batch import guest_rows
from kvasir.engine.device_seats import ROW_WORDS, UNKNOWN, DeviceSeats, draft_words
from kvasir.engine.spans import ONE_SAMPLE
from kvasir.engine.taps import Tapped, Taps
from kvasir.kernels.decode_rows import Opened, close_rows, open_rows
from kvasir.kernels.hardware import send
from kvasir.kernels.report import report_rows
from kvasir.kernels.sample import sample_rows
from kvasir.kv.codec import LayerCache
from kvasir.logs import log
from kvasir.models.decoder import Decoder
from kvasir.types import Span, SpanResult, StepBatch, Together, TokenLogprob

Work = Callable[[], None]
Capture = Callable[[Work], Work]
EAGER_STEPS = 4  # of a bucket before it is captured
STAND_INS = 64  # steps of it in a larger one before
PADDED = 2  # times its size: the largest bucket that stands in for one that is not captured yet; padding rows are nearly free
LOGIT_BYTES = 256 << 20  # of logits at a time, as fp32: each further slice reads the head once more
SHARE_KEYS = (
    True  # among the rows of a span. Without, chains run row by row, and trees and guests are launched kernel by kernel
)
DRAFT_ROWS = 128  # row by row: beyond, each row's reading its keys anew costs more than launching kernels one by one
SHARED_ROWS = 640  # that share: beyond, a step takes longer than launching it
DECODES, ROW_BY_ROW = 0, 1  # forms; a larger one is the rows that a span may have
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
        return self.pieces(lambda cut: work())[0]

    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """``work`` in several graphs: where it calls what it is given, one ends and the next begins."""
        graphs, current = [], torch.cuda.current_stream()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that frees device memory would spoil the capture
        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    work(cut)
                finally:
                    graphs[-1].capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs]


class DecodeGraphs:
    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        backend: AttentionBackend,
        sampler: Sampler,
        seats: DeviceSeats,
        capture: Capture,
        max_drafts: int = 0,
    ) -> None:
        """``max_drafts``: that a sequence may have verified in a step; up to ``SHARED_ROWS`` rows (or ``DRAFT_ROWS``) such steps are captured."""
        self.model, self.caches, self.backend, self.sampler, self.seats = model, caches, backend, sampler, seats
        self._drafts = max_drafts > 0
        self._forms = backend.together() if SHARE_KEYS and self._drafts else ()
        self._usual = next(
            (form for form in self._forms if form > max_drafts), self._forms[-1] if self._forms else ROW_BY_ROW
        )
        self.most_drafted = min(SHARED_ROWS if self._forms else DRAFT_ROWS, sampler.max_seqs * (1 + max_drafts))
        self.buckets = buckets(max(sampler.max_seqs, self.most_drafted))
        self._plain = self.buckets[
            : bisect_left(self.buckets, sampler.max_seqs) + 1
        ]  # those that decodes alone may need
        self._capture: Capture | None = capture
        self._ready: dict[tuple[int, StepOutput, int], Work] = {}  # (bucket, what it puts out, form) -> replay
        self._uses: Counter[tuple[int, StepOutput, int]] = (
            Counter()
        )  # steps of a bucket that was not captured, by itself
        self._stood_in: Counter[tuple[int, StepOutput, int]] = Counter()  # and in a larger one
        self.captures = 0  # since the start
        most, device = self.buckets[-1], seats.words.device
        self._device = device
        self._page_slots = caches[0].page_slots
        self._words = ROW_WORDS if self._forms else 3
        # Of a bucket: rows and starts; with drafts their tokens (or -1) behind them, or all ``draft_words``.
        self._inbox = torch.zeros(self._words * most, dtype=torch.int64, device=device)
        self._row_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(most, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, model.spec.hidden_size, dtype=model.place.dtype, device=device)
        self._draws = torch.zeros(
            6 * most, dtype=torch.float32, device=device
        )  # draws [3, B], and reports [3, B] behind them
        self._drawn = StepOutput.DRAWS  # what the last drawing step put out
        self._reported = False  # whether a step ever did
        self.step_bytes = 64 << 20  # of device memory that a capture may need
        # What crosses over is staged in turns: a buffer is written again only after the step that used it was read.
        self._stages = cycle([_Stage(most, self._words, device) for _ in range(2)])
        self._host_starts: list[int] = []
        self._taps: Taps | None = None
        self._tapped: Tapped | None = None
        self._guests: torch.Tensor | None = None

    def use_taps(self, taps: Taps) -> None:
        """Graphs captured from now on also write what ``taps`` asks for."""
        self._taps, self._tapped = taps, taps.memory(self.buckets[-1])

    def use_guests(self, guests_GE: torch.Tensor | None) -> None:
        """The embeddings of guest rows, in graphs captured from now on."""
        self._guests = guests_GE

    # ---------------------------------------------------------------------------------------------------------- running

    @property
    def trees(self) -> bool:
        """Whether trees and guests are run here, too."""
        return bool(self._forms)

    def takes(self, spans: list[Span]) -> bool:
        """Whether these spans are decodes and drafts to verify, and nothing else."""
        rows = len(spans)
        for span in spans:  # once a sequence and step: no call that is not needed
            if span.want is ONE_SAMPLE:
                continue
            if len(span.want.get("sample", ())) + len(span.guests) != span.length:
                return False
            rows += span.length - 1
        if rows == len(spans):
            return rows <= self.buckets[-1]
        return rows <= self.most_drafted and self._form(spans) is not None

    def _form(self, spans: list[Span]) -> int | None:
        """In which these spans can run. None: in none."""
        longest = max(span.length for span in spans)
        if longest == 1:
            return DECODES
        if longest <= max(self._forms, default=0):
            return next(form for form in self._forms if longest <= form)
        chains = all(span.parents is None for span in spans) and sum(span.length for span in spans) <= DRAFT_ROWS
        return ROW_BY_ROW if chains else None

    def bucket(self, num_rows: int) -> int:
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def _fit(self, num_rows: int, output: StepOutput, form: int) -> tuple[int, int]:
        """The bucket and form that these rows run in now: their own, or a captured one somewhat larger until they have come often."""
        size = self.bucket(num_rows)
        key = size, output, form
        if key in self._ready or self._capture is None or self._stood_in[key] >= STAND_INS:
            return size, form
        forms = [form, *(f for f in self._forms if 1 < form < f)]
        sizes = self.buckets[bisect_left(self.buckets, size) : bisect_right(self.buckets, PADDED * size)]
        larger = next(((s, f) for s in sizes for f in forms if (s, output, f) in self._ready), None)
        if larger is None:
            return size, form
        self._stood_in[key] += 1
        return larger

    def replays(self, size: int, drafted: bool = False) -> bool:
        """Whether drawing steps of this bucket are captured, such as the last one was."""
        return any(
            (size, self._drawn, form) in self._ready for form in ((ROW_BY_ROW, *self._forms) if drafted else (DECODES,))
        )

    def decode(self, spans: list[Span], output: StepOutput = StepOutput.DRAWS) -> DecodeHandle:
        """Forward and draw, by the parameters that the rows have on the device; and report, where ``output`` says so."""
        self._drawn = output
        self._reported |= output is StepOutput.REPORTS
        size, stage, form, words = self._send(spans, output)
        self._run(size, output, form)
        reports = output is StepOutput.REPORTS
        stage.take(self._draws[: (6 if reports else 3) * size])
        return DecodeHandle(stage, size, spans, words, reports)

    def forward(self, spans: list[Span]) -> torch.Tensor:
        """Hidden states [T, E] before the final norm; valid until the next step."""
        size, _, form, _ = self._send(spans, StepOutput.HIDDEN)
        self._run(size, StepOutput.HIDDEN, form)
        return self._hidden[: sum(span.length for span in spans)]

    def outputs(self, spans: list[Span]) -> tuple[list[int], torch.Tensor]:
        """Rows of the step launched last that hold tokens, and the hidden states [guests, E] of the others."""
        guests = [row for row, _ in guest_rows(spans, [0, *accumulate(span.length for span in spans)])]
        rows = sorted(set(range(sum(span.length for span in spans))) - set(guests))
        return rows, self._hidden.index_select(0, send(torch.tensor(guests, dtype=torch.int64), self._device))

    def hidden(self, spans: list[Span]) -> torch.Tensor | None:
        """What the step launched last has tapped [T, layers, E], if anybody wants it."""
        return None if self._taps is None else self._taps.taken(self._tapped, sum(span.length for span in spans))

    def _send(self, spans: list[Span], output: StepOutput) -> tuple[int, _Stage, int, np.ndarray | None]:
        """Bring rows, starts and what else changed to the device. Returns the bucket, the host buffers in use, the form, and where there
        are drafts, the ``draft_words`` of these spans."""
        stage, form = next(self._stages), self._form(spans)
        if form != DECODES:
            return self._send_drafts(spans, stage, output, form)
        count = len(spans)
        size, _ = self._fit(count, output, DECODES)
        starts = [span.start for span in spans]
        rows_S, starts_S = stage.inbox[:count], stage.inbox[size : size + count]
        rows_S[:], starts_S[:] = [span.seat for span in spans], starts
        stage.inbox[count:size], stage.inbox[size + count : 2 * size] = self.seats.padding, 0
        self._bring(stage, spans, rows_S, starts_S, 2 * size)
        self.seats.drawn(rows_S, starts_S + 1)
        self._host_starts = starts + [0] * (size - count)
        return size, stage, DECODES, None

    def _send_drafts(
        self, spans: list[Span], stage: _Stage, output: StepOutput, form: int
    ) -> tuple[int, _Stage, int, np.ndarray]:
        """The same with one row a draft behind each sequence's own; their tokens come along."""
        count = sum(span.length for span in spans)
        size, form = self._fit(count, output, form)
        words = np.empty((ROW_WORDS, size), np.int64)
        draft_words(spans, self.seats.padding, words)
        sent = ROW_WORDS if form > ROW_BY_ROW else 3
        stage.inbox[: sent * size] = words[:sent].reshape(-1)
        own = words[:, :count]
        rows, starts = own[:2, own[4] == 0]
        self.seats.drawn(rows, starts)  # for this step as good as drawn: the tokens come along
        self._bring(stage, spans, rows, starts, sent * size)
        self.seats.drawn(rows, UNKNOWN)  # which of its draws a row goes on from is seen when they are read
        self._host_starts = words[1].tolist()
        return size, stage, form, own

    def _bring(
        self, stage: _Stage, spans: list[Span], rows_S: np.ndarray, starts_S: np.ndarray, num_words: int
    ) -> None:
        places, content = self.seats.changes(spans, rows_S, starts_S)
        self._inbox[:num_words].copy_(stage.inbox_tensor[:num_words], non_blocking=True)
        if places:
            at, words = stage.changes(places, content, self._device)
            self.seats.words.index_copy_(0, at, words)

    def _run(self, size: int, output: StepOutput, form: int) -> None:
        key = size, output, form
        work = self._ready.get(key)
        if work is None:
            self._uses[key] += 1
            few = 1 if self._stood_in[key] >= STAND_INS else EAGER_STEPS
            if self._capture is None or self._uses[key] <= few or not self._try_capture(*key):
                return self._compute(*key)
            work = self._ready[key]
        work()

    def _compute(self, size: int, output: StepOutput, form: int) -> None:
        """The step itself, over the first ``size`` rows of the static buffers."""
        words = self._inbox[: len(self._inbox) // size * size].view(-1, size)
        rows_B, starts_B = words[0], words[1]  # places in the cache, and positions but in trees
        opened = open_rows(self.seats.kept, rows_B, starts_B, self._page_slots, words[2] if form else None)
        batch = StepBatch(
            input_ids=opened.ids,
            positions=words[3] if form > ROW_BY_ROW else starts_B,
            row_start=self._row_start[: size + 1],
            context=opened.context,
            tables=tuple(opened.tables),
            slots=tuple(opened.slots),
            logit_rows=self._logit_rows[:size],
            starts=self._host_starts,
            lengths=[1] * size,
        )
        if form > ROW_BY_ROW:
            batch.together, batch.ancestors = Together(words[4], words[5], form), words[6][:, None]
            if self._guests is not None:
                batch.guests = batch.logit_rows, words[7]
                batch.inputs = torch.where(
                    words[7][:, None] < 0,
                    self.model.embed(opened.ids),
                    self._guests.index_select(0, words[7].clamp(min=0)),
                )
        self.backend.plan(batch)
        hidden_BE = self.model.forward(
            batch, self.caches, self.backend, None if self._tapped is None else self._tapped.by_layer
        )
        if batch.guests is not None or not output:
            self._hidden[:size].copy_(hidden_BE)
        if output:
            self._draw(hidden_BE, opened, rows_B, batch.positions, output == StepOutput.REPORTS)

    def _draw(
        self, hidden_BE: torch.Tensor, opened: Opened, rows_B: torch.Tensor, positions_B: torch.Tensor, reports: bool
    ) -> None:
        """A token for every row, left where the row's next step and the host look for it; with what is to be reported of it."""
        size = len(rows_B)
        draws_3B, reports_3B = self._draws[: 6 * size].view(2, 3, size)
        sure_B = self.seats.sure.index_select(0, rows_B) if reports else None
        step = max(1, LOGIT_BYTES // (4 * self.sampler.vocab_size))
        for first in range(0, size, step):
            part = slice(first, min(first + step, size))
            logits = self.model.logits(hidden_BE[part])
            drawn = sample_rows(
                logits,
                opened.temperature[part],
                opened.top_k[part],
                opened.top_p[part],
                opened.min_p[part],
                opened.stream[part],
                positions_B[part],
                self.sampler.tokenizer_size,
            )
            close_rows(drawn, draws_3B[:, part], self.seats.token, rows_B[part], self.sampler.vocab_size)
            if reports:
                report_rows(logits, drawn[0], sure_B[part], self.sampler.tokenizer_size, reports_3B[:, part])

    # -------------------------------------------------------------------------------------------------------- capturing

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more bucket while nothing is in flight, those first that stand in for many others. False: none is left. Reporting
        ones once a step reported."""
        outputs = [StepOutput.DRAWS, *([StepOutput.REPORTS] if self._reported else [])]
        keys = (
            (size, output, form)
            for form, sizes in ((DECODES, self._plain), (self._usual, self._drafted))
            for output in outputs
            for size in sorted(sizes, key=lambda size: size & (size - 1) > 0)
        )  # powers of two stand in for all others
        key = next((key for key in keys if key not in self._ready), None)
        if key is None or self._capture is None:
            return False
        self._pad(key[0])
        self._compute(*key)
        captured = self._try_capture(*key)
        if captured:
            self._ready[key]()  # the first replay brings the graph to the device
        return captured

    @property
    def _drafted(self) -> list[int]:
        """Buckets that drafts may need."""
        return [size for size in self.buckets if self._drafts and 1 < size <= self.most_drafted]

    def _pad(self, size: int) -> None:
        """A step of padding rows alone."""
        words = np.empty((ROW_WORDS, size), np.int64)
        draft_words([], self.seats.padding, words)
        self._inbox[: self._words * size].copy_(torch.from_numpy(words[: self._words].reshape(-1)))
        self._host_starts = [0] * size

    def _try_capture(self, size: int, output: StepOutput, form: int) -> bool:
        """Capture a bucket. Where that fails, this process does without graphs from then on: they are never needed."""
        try:
            check_memory(self._device, self.step_bytes)
            self._ready[size, output, form] = self._capture(lambda: self._compute(size, output, form))
            self.captures += 1
        except Exception as error:
            self._capture = None
            log.warning(
                "no more CUDA graphs: a decode step of %d rows cannot be captured (%s: %s)",
                size,
                type(error).__name__,
                error,
            )
            return False
        return True

    @torch.inference_mode()
    def measure(self) -> tuple[int, int]:
        """Bytes of ``step_bytes``, and with the graphs of all buckets: what the largest step needs beside the static buffers. The buckets
        share it: they run one after the other."""

        def largest() -> None:
            for size, form in [(self.buckets[-1], DECODES), *((size, self._usual) for size in self._drafted[-1:])]:
                self._pad(size)
                self._compute(size, StepOutput.REPORTS, form)  # all that a step may do

        step = peak_bytes(self._device, largest)
        drawing, reporting = (
            len(self.buckets) + len(self._drafted) * max(1, len(self._forms)),
            len(self._plain) + len(self._drafted),
        )
        return step, step + GRAPH_BYTES * (drawing + reporting)


def check_memory(device: torch.device, step_bytes: int) -> None:
    """The allocator's cache may hold what a capture needs, and cannot be emptied while it runs. Raises OutOfMemoryError."""
    if device.type != "cuda":
        return
    needed = GRAPH_BYTES + step_bytes
    if torch.cuda.mem_get_info(device)[0] < needed:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < needed:
        raise torch.OutOfMemoryError(f"less than {needed >> 20} MiB of device memory are left")


def peak_bytes(device: torch.device, work: Work) -> int:
    """Of device memory that ``work`` takes for a while, with a quarter on top for fragments."""
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - held) * 5 // 4


class _Stage:
    """Pinned host memory of one step: what goes to the device, and the draws and reports that come back."""

    def __init__(self, max_rows: int, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pinned = pinned
        self.inbox_tensor = torch.zeros(words * max_rows, dtype=torch.int64, pin_memory=pinned)
        self.inbox = self.inbox_tensor.numpy()
        self._draws = torch.zeros(6 * max_rows, dtype=torch.float32, pin_memory=pinned)
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
        self._changes.view(torch.int32).numpy()[2 * count : 3 * count] = content
        there = self._changes[:size].to(device, non_blocking=True)
        return there[:count], there.view(torch.int32)[2 * count : 3 * count]

    def take(self, draws: torch.Tensor) -> None:
        """Fetch the draws of the step launched last."""
        self._draws[: len(draws)].copy_(draws, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self, size: int) -> np.ndarray:
        """Wait for them: [3, size]."""
        if self._done is not None:
            self._done.synchronize()
        return self._draws_array[: 3 * size].reshape(3, size)

    def reports(self, size: int) -> np.ndarray:
        """After ``read``: [3, size], of a step that reports."""
        return self._draws_array[3 * size : 6 * size].reshape(3, size)


class DecodeHandle:
    """A launched decode step. ``words``: with drafts, what its rows started from (``draft_words``). ``reports``: whether it reported."""

    __slots__ = ("_stage", "_size", "_spans", "_words", "_reports")

    def __init__(
        self, stage: _Stage, size: int, spans: list[Span], words: np.ndarray | None = None, reports: bool = False
    ) -> None:
        self._stage, self._size, self._spans, self._words, self._reports = stage, size, spans, words, reports

    def read(self) -> list[SpanResult]:
        """Wait for the step; one result per span."""
        if self._words is not None:
            return self._walked(self._words[2], self._words[4])
        ids, largest, best = self._stage.read(self._size)[:, : len(self._spans)]
        results = [SpanResult([token]) for token in ids.astype(np.int64).tolist()]
        if not (np.isfinite(largest).all() and np.isfinite(best).all()):
            for i in range(len(results)):
                if not largest[i] < np.inf or best[i] == -np.inf:  # under no constraint, or it would not be drawn here
                    results[i] = SpanResult(error=NUMERIC_ERROR)
        return self._reported(results, range(len(results))) if self._reports else results

    def _walked(self, held_T: np.ndarray, place_T: np.ndarray) -> list[SpanResult]:
        """``held``: the token of each row; ``place``: the row's in its span. Chains are walked all at once: as far as a row holds what was
        drawn from the row before it."""
        ids, largest, best = self._stage.read(self._size)[:, : len(held_T)]
        ids = ids.astype(np.int64)
        tokens = ids.tolist()
        errors = dict.fromkeys(np.flatnonzero(~(largest < np.inf) | (best == -np.inf)).tolist(), NUMERIC_ERROR)
        stops = place_T == 0
        firsts = np.flatnonzero(stops)
        stops[1:] |= held_T[1:] != ids[:-1]
        ends = np.append(
            np.flatnonzero(stops), len(tokens)
        )  # the firsts are among them: a walk ends at the one behind its own
        results = []
        for span, first, end in zip(self._spans, firsts.tolist(), ends[np.searchsorted(ends, firsts) + 1].tolist()):
            if errors or span.parents:
                held = held_T[first : first + span.length].tolist() if span.length > 1 else []
                results.append(resolve_span(span, held, range(first, first + span.length), tokens, errors, {}, {}))
            else:
                results.append(
                    SpanResult(tokens[first:end], path=list(range(end - first)) if span.length > 1 else None)
                )
        return self._reported(results, firsts.tolist()) if self._reports else results

    def _reported(self, results: list[SpanResult], firsts: Many[int]) -> list[SpanResult]:
        """With the log-probabilities of the spans that ask for them. ``firsts``: each span's first row."""
        logprobs, ranks, confidences = self._stage.reports(self._size).tolist()
        for span, result, first in zip(self._spans, results, firsts):
            params = span.seq.request.params
            if params.logprobs is not None and result.error is None:
                rows = [first + i for i in result.path] if result.path else (first,)
                result.logprobs = [
                    TokenLogprob(token, logprobs[m], int(ranks[m]), [], confidences[m] if params.confidence else None)
                    for token, m in zip(result.tokens, rows)
                ]
        return results
