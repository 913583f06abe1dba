"""Decode steps over static buffers, captured once per bucket of rows and replayed: the host's part is a few numbers for
each row.

A step runs here when each of its rows draws a token or is a guest: decodes, and spans that verify drafts. It is padded
to a bucket (``graph_buckets.py``); padding rows run with the padding seat's token and write to the dummy page, where
nobody reads. Which rows are of one span, and which are whose ancestors, are numbers of the rows like their tokens, so
one graph of a bucket serves every mixture of decodes, chains and trees that fits it.

Where rows ask for the log-probability of what they draw, the step reports it for all rows: such steps are captured by
themselves. An idle engine captures the buckets that were never used (``capture_next``).

Legend: B rows of a bucket, T rows of a step, M rows of a slice, V vocabulary, E model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from kvasir.attention.backend import plan_step
from kvasir.decoding.guesses import within
from kvasir.decoding.sampler import StepOutput
from kvasir.engine.ways.capture import GRAPH_BYTES, Capture, Work, check_memory, peak_bytes
from kvasir.engine.ways.graph_buckets import DECODES, ROW_BY_ROW, Buckets, GraphKey
from kvasir.engine.ways.graph_buffers import DecodeBuffers, Stage
from kvasir.engine.ways.graph_handle import DecodeHandle
from kvasir.engine.ways.step_way import CapturingWay, StepParts
from kvasir.engine.ways.taps import Tapped, TappedHandle, Taps
from kvasir.kernels.decode_rows import Opened, close_rows, open_rows
from kvasir.kernels.guess import guess_rows
from kvasir.kernels.report import report_rows
from kvasir.kernels.sample import sample_rows
from kvasir.logs import log
from kvasir.types import Handle, Span, StepBatch, Together

# Bytes of logits, as fp32, that are computed at a time. Each further slice reads the head once more.
LOGIT_BYTES = 256 << 20


class DecodeGraphs(CapturingWay):
    """Runs decodes, and spans with up to ``max_drafts`` drafts for each sequence: steps whose rows have variants, or
    (``varied`` False) the others."""

    def __init__(self, parts: StepParts, capture: Capture, max_drafts: int = 0, varied: bool = False) -> None:
        self._varied = varied
        self._parts, self._sampler, self._seats = parts, parts.sampler, parts.seats
        self.choice = Buckets(parts.backend.together() if max_drafts > 0 else (), parts.sampler.max_seqs, max_drafts)
        self.buckets, self.most_drafted = self.choice.sizes, self.choice.most_drafted
        self._device = parts.seats.words.device
        self._capture: Capture | None = capture
        self._ready: dict[GraphKey, Work] = {}  # replays
        self._drawn = StepOutput.DRAWS  # what the last drawing step put out
        self._reported = False  # whether a step ever did
        self._used = not varied  # whether a step ever ran here
        self._tapped: Tapped | None = None
        self.captures = 0
        self.warming = (
            False  # whether the last step was launched kernel by kernel, and will be captured if it comes often
        )

    @cached_property
    def _buffers(self) -> DecodeBuffers:
        """The static buffers. They take memory from the first step on that runs here."""
        parts, most, guests = self._parts, self.buckets[-1], 0
        if parts.guest_inputs is not None and within(self._sampler.guessing):
            guests = self._sampler.guessing.count
        recurrent = bool(parts.packer.states and self.choice.drafted)  # then rows say which span they are of
        wide = bool(self.choice.forms) or recurrent or parts.guest_inputs is not None
        with torch.inference_mode(False):
            return DecodeBuffers(parts.seats, most, wide, parts.model.spec.hidden_size, parts.model.place.dtype, guests)

    def use_taps(self, taps: Taps) -> None:
        self._tapped = taps.memory(self.buckets[-1])

    # ---------------------------------------------------------------------------------------------------------- running

    @property
    def trees(self) -> bool:
        """Whether trees run here, too, and guests that are not one chain at the end of one."""
        return bool(self.choice.forms)

    def takes(self, spans: list[Span]) -> bool:
        return self._parts.varied(spans) == self._varied and self.choice.takes(spans)

    @torch.inference_mode()
    def run(self, spans: list[Span]) -> Handle:
        output = self._sampler.output(spans)
        handle = self.decode(spans, output) if output else self._parts.sample_from(spans, self.forward(spans))
        if self._tapped is None:
            return handle
        hidden_TLE = self._parts.taps.taken(self._tapped, sum(span.length for span in spans))
        return handle if hidden_TLE is None else TappedHandle(handle, spans, hidden_TLE)

    def bucket(self, num_rows: int) -> int:
        """Rows of the bucket that ``num_rows`` are padded to, once that is captured."""
        return self.choice.bucket(num_rows)

    def replays(self, size: int, drafted: bool = False) -> bool:
        """Whether drawing steps of this bucket are captured, if they put out what the last drawing step did."""
        forms = (ROW_BY_ROW, *self.choice.forms) if drafted else (DECODES,)
        return any((size, self._drawn, form) in self._ready for form in forms)

    def decode(self, spans: list[Span], output: StepOutput = StepOutput.DRAWS) -> DecodeHandle:
        """Forward and draw, by the parameters that the seats have on the device; and report, where ``output`` says
        so."""
        self._drawn = output
        reports = output is StepOutput.REPORTS
        self._reported |= reports
        key, stage, words = self._send(spans, output)
        self._run(key)
        guests = self._buffers.num_guesses if any(span.guests for span in spans) else 0
        stage.take(self._buffers.draws[: (6 + 2 * guests if guests else 6 if reports else 3) * key.size])
        return DecodeHandle(stage, key.size, spans, words, reports, guests)

    def forward(self, spans: list[Span]) -> torch.Tensor:
        """Hidden states [T, E] before the final norm; valid until the next step."""
        self._run(self._send(spans, StepOutput.HIDDEN)[0])
        return self._buffers.hidden[: sum(span.length for span in spans)]

    def _send(self, spans: list[Span], output: StepOutput) -> tuple[GraphKey, Stage, np.ndarray | None]:
        """Bring the rows and what else changed to the device. Returns the kind of step to run, the host memory in use,
        and with drafts the ``draft_words`` of these spans."""
        form, self._used = self.choice.form(spans), True
        if form == DECODES:
            key = self._fit(len(spans), output, form)
            return key, self._buffers.send_decodes(spans, key.size), None
        key = self._fit(sum(span.length for span in spans), output, form)
        return key, *self._buffers.send_drafts(spans, key.size)

    def _fit(self, num_rows: int, output: StepOutput, form: int) -> GraphKey:
        key = GraphKey(self.choice.bucket(num_rows), output, form)
        return key if self._capture is None else self.choice.fit(key, self._ready)

    def _run(self, key: GraphKey) -> None:
        work = self._ready.get(key)
        self.warming = work is None and self._capture is not None
        if work is None:
            if not self.choice.is_due(key) or self._capture is None or not self._try_capture(*key):
                return self._compute(*key)
            work = self._ready[key]
        work()

    def _compute(self, size: int, output: StepOutput, form: int) -> None:
        """Run the step itself over the first ``size`` rows of the static buffers."""
        parts, buffers = self._parts, self._buffers
        words = buffers.words(size)
        seats_B, starts_B = words[0], words[1]  # starts: places in the cache, and except in trees the positions
        opened = open_rows(self._seats.kept, seats_B, starts_B, parts.pool.page_slots, words[2] if form else None)
        batch = StepBatch(
            input_ids=opened.ids,
            positions=words[3] if form > ROW_BY_ROW else starts_B,
            row_start=buffers.row_start[: size + 1],
            context=opened.context,
            tables=tuple(opened.tables),
            slots=tuple(opened.slots),
            logit_rows=buffers.logit_rows[:size],
            starts=buffers.starts,
            lengths=[1] * size,
            places=() if opened.places is None else tuple(zip(opened.places, buffers.places)),
        )
        if self._varied:
            wide = form and len(words) > 3  # then guests may have a variant of their own
            batch.variants = words[8].int() if wide else self._seats.variants(seats_B, starts_B)
        if parts.packer.states:
            lengths_B = torch.where(words[4] == 0, words[5], 0) if form else torch.ones_like(seats_B)
            batch.span_lengths = torch.where(seats_B == self._seats.padding, -1, lengths_B)
        if form > ROW_BY_ROW:
            batch.together, batch.ancestors = Together(words[4], words[5], form), words[6][:, None]
        if form and parts.guest_inputs is not None:
            batch.guests = batch.logit_rows, words[7]
            batch.inputs = parts.inputs(opened.ids, words[7])
        plan_step(parts.backend, batch)
        taps = None if self._tapped is None else self._tapped.by_layer
        hidden_BE = parts.model.forward(batch, parts.caches, parts.backend, taps)
        if not output:
            buffers.hidden[:size].copy_(hidden_BE)
        else:
            guests_B = None if batch.guests is None or not buffers.num_guesses else batch.guests[1]
            self._draw(hidden_BE, opened, seats_B, batch.positions, output == StepOutput.REPORTS, guests_B)

    def _draw(
        self,
        hidden_BE: torch.Tensor,
        opened: Opened,
        seats_B: torch.Tensor,
        positions_B: torch.Tensor,
        reports: bool,
        guests_B: torch.Tensor | None,
    ) -> None:
        """Draw a token for every row, left where the seat's next step and the host look for it, with its report where
        that is wanted, and the guesses of guests."""
        sampler, size, count = self._sampler, len(seats_B), self._buffers.num_guesses
        draws_3B, reports_3B = self._buffers.draws[: 6 * size].view(2, 3, size)
        guesses_KB = self._buffers.draws[6 * size : (6 + 2 * count) * size].view(2 * count, size)
        sure_B = self._seats.sure.index_select(0, seats_B) if reports else None
        step = max(1, LOGIT_BYTES // (4 * sampler.vocab_size))
        for first in range(0, size, step):
            part = slice(first, min(first + step, size))
            logits = self._parts.model.logits(hidden_BE[part])
            drawn = sample_rows(
                logits,
                opened.temperature[part],
                opened.top_k[part],
                opened.top_p[part],
                opened.min_p[part],
                opened.stream[part],
                positions_B[part],
                sampler.tokenizer_size,
            )
            close_rows(drawn, draws_3B[:, part], self._seats.token, seats_B[part], sampler.vocab_size)
            if reports:
                report_rows(logits, drawn[0], sure_B[part], sampler.tokenizer_size, reports_3B[:, part])
            if guests_B is not None:
                guess_rows(
                    logits,
                    drawn[0],
                    opened.temperature[part],
                    opened.stream[part],
                    positions_B[part],
                    guests_B[part] >= 0,
                    sampler.tokenizer_size,
                    count,
                    guesses_KB[:, part],
                )

    # -------------------------------------------------------------------------------------------------------- capturing

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more bucket, those first that stand in for many others; reporting ones only once a step has
        reported, and those of variants once a step had some."""
        key = next((key for key in self._by_worth() if key not in self._ready), None)
        if key is None or self._capture is None or not self._used:
            return False
        self._buffers.pad(key.size)
        self._compute(*key)
        captured = self._try_capture(*key)
        if captured:
            self._ready[key]()  # the first replay brings the graph to the device
        return captured

    def _by_worth(self) -> Iterator[GraphKey]:
        """Every kind of step in the order in which an idle engine captures them."""
        return self.choice.by_worth(self._reported)

    def _try_capture(self, size: int, output: StepOutput, form: int) -> bool:
        """Capture a bucket. If that fails, this process does without graphs from then on: they are never needed."""
        try:
            check_memory(self._device, self.step_bytes)
            self._ready[GraphKey(size, output, form)] = self._capture(lambda: self._compute(size, output, form))
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
        def largest() -> None:
            drafted = [(size, self.choice.usual_form) for size in self.choice.drafted[-1:]]
            for size, form in [(self.buckets[-1], DECODES), *drafted]:
                self._buffers.pad(size)
                self._compute(size, StepOutput.REPORTS, form)  # all that a step may do

        step = peak_bytes(self._device, largest)
        return step, step + GRAPH_BYTES * self.choice.num_graphs
