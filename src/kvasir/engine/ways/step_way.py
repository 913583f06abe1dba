"""Ways to run a step, and the parts that all of them share.

A new way is a file with one subclass of `StepWay` and one line in ``build.ways_to_run``, which lists the ways from the
cheapest launch to the most general. The runner gives each step to the first way that takes it; the last one takes every
step.

Legend: T rows, M rows with logits, E model dim, G guest embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from kvasir.attention.backend import AttentionBackend, Recurrence
from kvasir.decoding.sampler import SampleOutput, Sampler
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.ways.batch import Frame, Packer
from kvasir.engine.ways.device_seats import DeviceSeats
from kvasir.engine.ways.pooling import PooledHandle, Pooler
from kvasir.engine.ways.taps import Taps
from kvasir.kv.policy import Stack
from kvasir.kv.pool import KVPool
from kvasir.models.decoder import Decoder
from kvasir.types import Handle, Pooling, Sequence, Span, SpanResult, StepBatch


class StepWay(ABC):
    """One way to run a step. Every way computes the same tokens and leaves them in `StepParts.seats` for the next
    step."""

    @abstractmethod
    def takes(self, spans: list[Span]) -> bool:
        """Whether this way runs a step of these spans. The runner asks once a step, and calls ``run`` with the same
        spans if the answer is yes. A way may count what it is asked for, and capture or record a step that is asked for
        often."""

    @abstractmethod
    def run(self, spans: list[Span]) -> Handle:
        """Launch the step without waiting for the device. Page copies were made already."""

    def use_taps(self, taps: Taps) -> None:  # noqa: B027
        """Write what ``taps`` asks for from now on. Called before any step is captured or recorded."""

    def weights_changed(self) -> None:  # noqa: B027
        """Drop what holds copies of weights: the model's weights were written to. Nothing is running."""


class CapturingWay(StepWay):
    """A way that captures CUDA graphs, at most one for each kind of step."""

    captures = 0  # graphs since the start
    step_bytes = 64 << 20  # device memory that a capture may need, in bytes, until ``measure`` has said so

    @abstractmethod
    def capture_next(self) -> bool:
        """Capture one more kind of step while nothing is in flight, the most useful first. False: none is left."""

    @abstractmethod
    def measure(self) -> tuple[int, int]:
        """Device memory in bytes: what the largest step needs in addition to the static buffers (``step_bytes``), and
        that with the graphs of all kinds of steps, which share it because they run one after the other."""


class LateDraw:
    """A launched forward whose draw depends on tokens that were still in flight when it was launched."""

    def __init__(self, sample: Callable[[], Handle]) -> None:
        self._sample = sample
        self._handle: Handle | None = None

    @torch.inference_mode()
    def draw(self) -> None:
        self._handle = self._sample()

    def read(self) -> list[SpanResult]:
        assert self._handle is not None, "a step is read before it has drawn"
        return self._handle.read()


class StepParts:
    """Parts that all ways to run a step share: the model, the KV pool, the attention backend, the sampler, and the
    seats of running sequences.

    ``max_model_len`` is the number of positions that a seat's page tables have room for. ``taps`` are the hidden states
    a drafter reads; ``guest_inputs`` [G, E] is what the first layer reads in rows that hold no token. ``num_variants``
    is the number of variants of the model that can be resident. ``pooling``: the model embeds or scores prompts (None:
    it draws tokens). ``policy``: which tokens of sequences are forgotten (None: none ever is).
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
        policy: Stack | None = None,
        *,
        max_model_len: int,
        pooling: Pooling | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.sampler = sampler
        self.device = device
        self.caches = [pool.layer(model.spec.cache_layer(i)) for i in range(len(model.spec.layers))]
        states = [g for g, group in enumerate(pool.groups) if group.kind == "state"]
        self.packer = Packer(pool.page_slots, len(pool.groups), device, states)
        max_pages = pages_for(max_model_len, pool.page_slots)
        self.seats = DeviceSeats(sampler.max_seqs, max_pages, len(pool.groups), device, states, policy is not None)
        self.policy = policy
        sampler.in_flight = self.seats.token
        self.taps: Taps | None = None
        self.guest_inputs: torch.Tensor | None = None
        self.num_variants = 0
        self.pooler = None if pooling is None else Pooler(model, pooling, self.packer.send)
        self.late = False  # whether the step being launched draws only when ``draw_late`` is called
        self._late: LateDraw | None = None

    def first_layers(self, num_layers: int) -> StepParts:
        """The same parts with the first ``num_layers`` layers for a model. Nothing is copied: every weight, page and
        seat is shared."""
        parts, model = copy.copy(self), copy.copy(self.model)
        model.spec = dataclasses.replace(model.spec, layers=model.spec.layers[:num_layers])
        model.blocks, model.rope_of = model.blocks[:num_layers], model.rope_of[:num_layers]
        parts.model, parts.caches = model, self.caches[:num_layers]
        return parts

    def recurrent(self) -> list[Recurrence]:
        """The mixers of recurrent layers."""
        return [self.model.blocks[layer].mixer for g in self.packer.states for layer in self.pool.groups[g].layers]

    def have(self, num_variants: int, hooks: bool) -> None:
        """Take so many variants into account, sets of hooks among them or not."""
        self.num_variants, self.seats.hooks = num_variants, hooks

    def open(self, seq: Sequence) -> None:
        """Set up seat ``seq.seat`` for a sequence that starts or starts again."""
        self.sampler.open(seq)
        self.seats.open(seq, *self.sampler.numbers(seq.seat))

    def close(self, seat: int) -> None:
        """Free a seat for another sequence."""
        self.sampler.close(seat)
        self.seats.close(seat)
        if self.pooler is not None:
            self.pooler.close(seat)

    def varied(self, spans: list[Span]) -> bool:
        """Whether rows of these spans may have a variant."""
        may = self.num_variants > 0 and (self.seats.varied or self.guest_inputs is not None)
        return bool(may) and any(span.varied for span in spans)

    def pack(self, spans: list[Span], frame: Frame | None = None) -> StepBatch:
        """The spans as tensors on the device. Tokens that are still being drawn are taken from their seats."""
        batch = self.packer.pack(spans, frame)
        if batch.borrowed is not None:
            rows, seats = batch.borrowed
            batch.input_ids.index_copy_(0, rows, self.seats.token.index_select(0, seats).long())
        return batch

    def inputs(self, ids_T: torch.Tensor, guests_T: torch.Tensor) -> torch.Tensor:
        """Inputs of the first layer [T, E]: embeddings of tokens, or of guests where their number is not -1."""
        own_TE = self.guest_inputs.index_select(0, guests_T.clamp(min=0))
        return torch.where(guests_T[:, None] < 0, self.model.embed(ids_T), own_TE)

    def sample_from(self, spans: list[Span], hidden_ME: torch.Tensor) -> Handle:
        """Draw from hidden states, or pool them. The sampler asks for logits slice by slice, so a long scored prompt
        never needs [T, V] at once."""
        pooled = None if self.pooler is None else self.pooler.pool(spans, hidden_ME)
        drawn_ME = hidden_ME if pooled is None else pooled.rest_ME
        handle = self.sample(spans, lambda first, stop: self.model.logits(drawn_ME[first:stop]))
        return handle if pooled is None else PooledHandle(handle, spans, pooled)

    def sample(self, spans: list[Span], logits: torch.Tensor | Callable[[int, int], torch.Tensor]) -> Handle:
        """Draw from the rows whose logits are wanted, and leave each sequence's token in its seat. A step that is
        launched ``late`` does so in ``draw_late``."""
        if self.late:
            self._late = LateDraw(lambda: self._sample(spans, logits))
            return self._late
        return self._sample(spans, logits)

    def draw_late(self) -> None:
        """Draw what the step launched last has left: the steps before it were read, so all that its rows are
        conditioned on is known."""
        late, self._late = self._late, None
        if late is not None:
            late.draw()

    def forget_late(self) -> None:
        """Drop the draw that the step launched last has left: that step will be launched again."""
        self._late = None

    def _sample(self, spans: list[Span], logits: torch.Tensor | Callable[[int, int], torch.Tensor]) -> SampleOutput:
        batch = self.sampler.pack(spans)
        output = self.sampler.sample(logits, batch)
        drawn = [
            (first + len(wanted) - len(span.guests) - 1, span.seat, span.start + span.length - len(span.guests))
            for span, wanted, first in zip(spans, batch.wanted, batch.first)
            if wanted and len(span.want.get("sample", ())) == 1
        ]
        if drawn:
            rows, seats, positions = zip(*drawn)
            index = self.packer.send(torch.tensor([rows, seats], dtype=torch.int64))
            tokens = output.draws[0].index_select(0, index[0]).int().clamp_(0, self.sampler.vocab_size - 1)
            self.seats.token.index_copy_(0, index[1], tokens)
            self.seats.drawn(list(seats), positions)
        return output
