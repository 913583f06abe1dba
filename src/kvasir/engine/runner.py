"""Runs a plan on the device: pack, forward, sample. It holds the model, the pool and nothing of any request
but its row.

``launch`` does not wait for the device; the handle's ``read`` does, and for its own step only. Between the two the next
plan may be launched: a decode whose token is still being drawn takes it from the row on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.decoding.sampler import SampleOutput, Sampler, StepOutput
from kvasir.engine.batch import Packer
from kvasir.engine.decode_tapes import DecodeTapes
from kvasir.engine.device_seats import DeviceSeats
from kvasir.engine.graphs import Capture, CudaCapture, DecodeGraphs
from kvasir.engine.mixed_steps import MixedSteps, PieceCapture
from kvasir.engine.native_decodes import NativeDecodes
from kvasir.engine.sizing import pages_for
from kvasir.engine.tape import Arena, record
from kvasir.engine.taps import GuestHandle, TappedHandle, Taps
from kvasir.kv.pool import KVPool
from kvasir.models.decoder import Decoder
from kvasir.models.native_decoder import NativeDecoder, why_not
from kvasir.types import Handle, Plan, Sequence, Span, StepBatch


class Runner:
    """``max_model_len``: positions that a row's page tables on the device have room for."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
        *,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.sampler = sampler
        self.device = device
        self.caches = [pool.layer(i) for i in range(len(model.spec.layers))]
        self.packer = Packer(pool.page_slots, len(pool.groups), device)
        self.seats = DeviceSeats(sampler.max_seqs, pages_for(max_model_len, pool.page_slots), len(pool.groups), device)
        self.first_row = torch.zeros(1, dtype=torch.int64, device=device)
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedSteps | None = None
        self.taps: Taps | None = None
        self._guest_inputs: torch.Tensor | None = None
        self.native: NativeDecoder | None = None
        self.decodes: NativeDecodes | None = None
        self.tapes: DecodeTapes | None = None
        self.weights_changed()

    def weights_changed(self) -> None:
        """Build anew what holds copies of weights. Nothing may be running."""
        self.model.forget_copies()
        # One call a step shows what inner layers put out; of the last one it computes only rows whose logits are wanted.
        inner = self.taps is None or len(self.model.blocks) - 1 not in self.taps.layers
        native = self.model.place.fused and inner and why_not(self.model, self.caches, self.backend) is None
        self.native = NativeDecoder(self.model, self.caches) if native else None
        self.decodes = None if self.native is None else NativeDecodes(self.native, self.sampler, self.seats)
        self.tapes = None if native else self._tapes()
        if self.tapes is not None and self.taps is not None:
            self.tapes.use_taps(self.taps)

    def _tapes(self) -> DecodeTapes | None:
        return (
            DecodeTapes(self.model, self.pool, self.backend)
            if DecodeTapes.can_serve(self.model, self.pool, self.backend)
            else None
        )

    def use_graphs(self, capture: Capture, max_drafts: int = 0) -> None:
        """From now on, run steps that only decode over static buffers, captured and replayed by ``capture``; with up to
        ``max_drafts`` drafts a sequence."""
        self.graphs = DecodeGraphs(self.model, self.caches, self.backend, self.sampler, self.seats, capture, max_drafts)
        self.graphs.use_guests(self.guest_inputs)
        if self.taps is not None:
            self.graphs.use_taps(self.taps)

    def use_mixed_steps(self, capture: PieceCapture, max_rows: int) -> None:
        """From now on, run steps of up to ``max_rows`` rows that mix prompts with decodes in captured pieces."""
        self.mixed = MixedSteps(
            self.model,
            self.caches,
            self.backend,
            capture,
            num_groups=len(self.pool.groups),
            max_wanted=self.sampler.max_seqs,
            max_rows=max_rows,
        )

    @property
    def captures(self) -> int:
        """Since the start, of CUDA graphs."""
        return sum(part.captures for part in (self.graphs, self.mixed) if part is not None)

    def capture_next(self) -> bool:
        """Capture one more step while nothing is in flight. False: none is left."""
        parts = [part for part in (self.graphs, self.mixed) if part is not None]
        parts.sort(key=lambda part: part.captures)  # in turns: each begins with what matters most
        return any(part.capture_next() for part in parts)

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """From now on, hand out the outputs of these layers with every span's result. Before any step is captured or recorded."""
        self.taps = Taps(layers, self.model)
        if self.graphs is not None:
            self.graphs.use_taps(self.taps)
        self.weights_changed()

    @property
    def guest_inputs(self) -> torch.Tensor | None:
        """[guests, E]: what the first layer reads in rows that hold no token. Given before any step is captured."""
        return self._guest_inputs

    @guest_inputs.setter
    def guest_inputs(self, guests_GE: torch.Tensor | None) -> None:
        self._guest_inputs = guests_GE
        if self.graphs is not None:
            self.graphs.use_guests(guests_GE)

    def capture(self) -> Capture | None:
        """How work on static buffers becomes a replay here: CUDA graphs where decode steps are such, tapes on a CPU in normal mode."""
        if self.graphs is not None:
            return CudaCapture(self.device)
        if self.device.type != "cpu" or self.model.place.exact:
            return None
        arena = Arena()
        return lambda work: record(work, arena).replay

    def open(self, seq: Sequence) -> None:
        """Set up row ``seq.seat`` for a sequence that starts or starts again."""
        self.sampler.open(seq)
        self.seats.open(seq, *self.sampler.numbers(seq.seat))

    def close(self, row: int) -> None:
        self.sampler.close(row)
        self.seats.close(row)

    def forget(self) -> None:
        """A launch or a step failed: wait until nothing of it runs any more, and trust nothing it left on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seats.forget()

    def launch(self, plan: Plan) -> Handle:
        """Run a plan whose page copies were made already. Does not wait for the device."""
        spans = plan.spans
        tapped = self.taps is not None and self.taps.on
        if self.native is None or tapped or not self.decodes.takes(spans):
            return self._run(spans)
        if self.sampler.output(spans) is StepOutput.DRAWS:
            return self.decodes.draw(spans)
        with torch.inference_mode():
            return self._sample(spans, self.decodes.logits(spans))

    @torch.inference_mode()
    def _run(self, spans: list[Span]) -> Handle:
        handle, hidden_TLE = self._launch(spans)
        return handle if hidden_TLE is None else TappedHandle(handle, spans, hidden_TLE)

    def _launch(self, spans: list[Span]) -> tuple[Handle, torch.Tensor | None]:
        """The handle, and what was tapped [T, layers, E]: by the first way to run a step that takes these spans, the cheapest launch first."""
        if self.graphs is not None and self.graphs.takes(spans):
            return self._replay(self.graphs, spans)
        taped_SV = None if self.tapes is None else self.tapes.logits(spans)
        if taped_SV is not None:
            return self._sample(spans, taped_SV), self.tapes.hidden(len(spans))
        frame = None if self.mixed is None or self.taps is not None else self.mixed.frame(spans)
        batch = self.packer.pack(spans, frame)
        if batch.borrowed is not None:
            at, rows = batch.borrowed
            batch.input_ids.index_copy_(0, at, self.seats.token.index_select(0, rows).long())
        if frame is not None:
            self.backend.plan(batch)
            return self._sample_from(spans, self.mixed.forward(frame, batch)), None
        if self.native is not None and self.native.takes(batch):
            return self._call_native(self.native, spans, batch)
        return self._forward(spans, batch)

    def _replay(self, graphs: DecodeGraphs, spans: list[Span]) -> tuple[Handle, torch.Tensor | None]:
        """Decodes and drafts to verify, over static buffers."""
        guests = any(span.guests for span in spans)
        if output := self.sampler.output(spans):
            handle = graphs.decode(spans, output)
        else:
            hidden_ME = graphs.forward(spans)
            if guests:
                hidden_ME = hidden_ME.index_select(0, self.packer.send(torch.tensor(graphs.outputs(spans)[0])))
            handle = self._sample_from(spans, hidden_ME)
        return GuestHandle(handle, spans, graphs.outputs(spans)[1]) if guests else handle, graphs.hidden(spans)

    def _call_native(
        self, native: NativeDecoder, spans: list[Span], batch: StepBatch
    ) -> tuple[Handle, torch.Tensor | None]:
        """One call for the whole step, on a CPU. Prompts are tapped whether taps are on or not: no later step shows them again."""
        total = batch.input_ids.shape[0]
        tapped = self.taps.memory(total) if self.taps is not None and (self.taps.on or total > len(spans)) else None
        logits = native.logits(batch, None if tapped is None else tapped.by_layer)
        return self._sample(spans, logits), None if tapped is None else tapped.hidden_TLE

    def _forward(self, spans: list[Span], batch: StepBatch) -> tuple[Handle, torch.Tensor | None]:
        """Layer by layer, kernel by kernel: takes every step."""
        count, total = batch.logit_rows.shape[0], batch.input_ids.shape[0]
        self.backend.plan(batch)
        wanted_M = (
            None if count == total else batch.logit_rows if count else self.first_row
        )  # of a step that wants none, any
        if batch.guests is not None:
            batch.inputs = self.guest_inputs.index_select(0, batch.guests[1])
            wanted_M = torch.cat([batch.logit_rows, batch.guests[0]])
        tapped = None if self.taps is None else self.taps.memory(total)
        hidden_ME = self.model.forward(
            batch, self.caches, self.backend, None if tapped is None else tapped.by_layer, wanted_M=wanted_M
        )
        handle = self._sample_from(spans, hidden_ME)
        if batch.guests is not None:
            handle = GuestHandle(handle, spans, hidden_ME[count:])
        return handle, None if tapped is None else tapped.hidden_TLE

    def _sample_from(self, spans: list[Span], hidden_ME: torch.Tensor) -> SampleOutput:
        """The sampler asks for logits slice by slice, so that a long scored prompt never needs [T, V] at once."""
        return self._sample(spans, lambda a, b: self.model.logits(hidden_ME[a:b]))

    def _sample(self, spans: list[Span], logits: torch.Tensor | Callable[[int, int], torch.Tensor]) -> SampleOutput:
        """Draw from the rows whose logits are wanted, and leave the tokens where the next step looks for them."""
        batch = self.sampler.pack(spans)
        output = self.sampler.sample(logits, batch)
        drawn = [
            (first + len(wanted) - 1, span.seat, span.start + span.length - len(span.guests))
            for span, wanted, first in zip(spans, batch.wanted, batch.first)
            if len(span.want.get("sample", ())) == 1
        ]
        if drawn:
            at, rows, positions = zip(*drawn)
            index = self.packer.send(torch.tensor([at, rows], dtype=torch.int64))
            tokens = output.draws[0].index_select(0, index[0]).int().clamp_(0, self.sampler.vocab_size - 1)
            self.seats.token.index_copy_(0, index[1], tokens)
            self.seats.drawn(list(rows), positions)
        return output
