"""Steps that mix prompts with decodes, captured except for attention and recurrences.

Launched kernel by kernel, such a step takes the host longer than a short prompt takes the GPU. What attention launches
depends on the spans; everything else depends on the number of rows alone. So the work between two attentions is one
CUDA graph, and a step replays, attends, replays, attends, ... over memory at a fixed place. A step is padded to a
*size*; its padding rows hold token 0, write to the dummy page, and are neither attended nor read. The graphs end at
sizes whose launch hides behind the GPU's work (``most_rows``).

While a piece is captured, ``_Cuts`` stands in for the attention backend: it notes what is to be attended, and the piece
ends. Queries lie in the graphs' pool, whose memory is used again as soon as the layer is done, so only their address is
noted and nothing is kept alive.

A recurrence is cut out in the same way, and its rows are noted like queries.

vLLM has piecewise graphs, too. There the compiler splits the model; here the seam to attention does.

Legend: T rows, W rows with logits, H query heads, D head dim, E model dim.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Recurrence, plan_step
from kvasir.attention.latent import UpProjection
from kvasir.engine.ways.batch import ALIGNED, Frame
from kvasir.engine.ways.capture import EAGER_STEPS, GRAPH_BYTES, PieceCapture, Work, check_memory, peak_bytes
from kvasir.engine.ways.step_way import CapturingWay, StepParts
from kvasir.engine.ways.taps import Tapped, TappedHandle, Taps
from kvasir.kernels.hardware import rates
from kvasir.kv.codec import LayerCache
from kvasir.kv.state import StateCache
from kvasir.logs import log
from kvasir.models.cost import active_params
from kvasir.models.spec import ModelSpec
from kvasir.types import Handle, Span, StepBatch

# Seconds that the host takes to launch a layer kernel by kernel, by experience.
LAUNCH_SECONDS = 0.6e-3
# A step hides its launch if it takes the GPU this many times as long as the host.
HIDDEN = 1.25
# Share of the GPU's matrix rate that products of prompts reach.
USED = 0.7
# (rows, stride): up to so many rows, sizes lie so far apart. Padding beyond 512 rows is at most 6 %.
STRIDES = ((1024, 32), (2048, 64), (4096, 128), (1 << 30, 256))
# Rows up to which steps are captured whatever the model.
LEAST = 512
# Most rows with logits that room is made for because of drafts. The last layer computes all of them.
DRAFTED = 640
# Most rows of a tree: those whose ancestors fit a word.
WORD = 64
# One in so many sizes is captured first, and stands in for those below it.
COARSE = 4


def most_rows(spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_rows: int) -> int:
    """Most rows of a step that is worth capturing. A larger one takes the GPU so long that its launch is free, and
    padding is not."""
    row_seconds = 2 * active_params(spec) / (USED * rates(device, dtype)[1])
    return min(max_rows, max(LEAST, int(HIDDEN * LAUNCH_SECONDS * len(spec.layers) / row_seconds)))


def sizes(most: int) -> list[int]:
    """Sizes in ascending order; the last one holds ``most`` rows."""
    found, size = [], 0
    while size < most:
        size += next(stride for end, stride in STRIDES if size < end)
        found.append(size)
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call of a backend's ``run`` or ``run_latent``. ``q_THD`` is noted as an address while the piece
    is captured."""

    q_THD: Any
    cache: LayerCache
    spec: AttentionSpec
    sinks_H: torch.Tensor | None
    out_THD: torch.Tensor
    up: UpProjection | None = None  # set: the call is of ``run_latent``

    def attend(self, backend: AttentionBackend, rows: int, batch: StepBatch) -> None:
        """Make the call, for the step's ``rows``."""
        q_THD, out_THD, batch = self.q_THD[:rows], self.out_THD[:rows], batch.of(self.cache.group)
        if self.up is None:
            backend.run(q_THD, self.cache, self.spec, batch, sinks_H=self.sinks_H, out_THD=out_THD)
        else:
            backend.run_latent(q_THD, self.up, self.cache, self.spec, batch, out_THV=out_THD)


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """Arguments of one call of a backend's ``run_recurrence``."""

    q_THD: Any  # the rows [T, X]
    layer: Recurrence
    cache: StateCache
    out_THD: torch.Tensor

    def attend(self, backend: AttentionBackend, rows: int, batch: StepBatch) -> None:
        self.layer.run(self.q_THD[:rows], self.cache, batch, self.out_THD[:rows])


# Memory for results [rows, heads, dim], by heads, dim and dtype.
Outs = dict[tuple[int, int, torch.dtype], torch.Tensor]


class _Cuts:
    """Stands in for a backend during a capture: notes the call, and ends the piece."""

    def __init__(self, codec_kernels: Any, outs: Outs, calls: list[_Call | _Recurrence], cut: Work) -> None:
        self.codec_kernels = codec_kernels
        self._outs, self._calls, self._cut = outs, calls, cut

    def run(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._note(q_THD, cache, spec, sinks_H, None)

    def run_latent(
        self, q_THD: torch.Tensor, up: UpProjection, cache: LayerCache, spec: AttentionSpec, batch: StepBatch
    ) -> torch.Tensor:
        return self._note(q_THD, cache, spec, None, up)

    def _note(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        sinks_H: torch.Tensor | None,
        up: UpProjection | None,
    ) -> torch.Tensor:
        out_THD = self._outs[spec.num_heads, spec.mixed_dim, q_THD.dtype][: len(q_THD)]
        self._calls.append(_Call(_noted(q_THD), cache, spec, sinks_H, out_THD, up))
        self._cut()
        return out_THD

    def run_recurrence(
        self, layer: Recurrence, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch
    ) -> torch.Tensor:
        out_THV = self._outs[*layer.results, torch.float32][: len(rows_TX)]
        self._calls.append(_Recurrence(_noted(rows_TX), layer, cache, out_THV))
        self._cut()
        return out_THV


def _noted(x: torch.Tensor) -> Any:
    return _Address(x) if x.is_cuda else x


class _Address:
    """The address and shape of a tensor whose memory is not kept alive. ``tensor`` makes a view of the memory, whatever
    uses it by then."""

    def __init__(self, x: torch.Tensor) -> None:
        self._dtype, self._device = x.dtype, x.device
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(size * stride for stride in x.stride()),
            "version": 3,
            "typestr": f"<i{size}",
            "data": (x.data_ptr(), False),
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device).view(self._dtype)


class MixedSteps(CapturingWay):
    """Runs steps of up to ``max_rows`` rows, if they are worth capturing: steps whose rows have variants, or
    (``varied`` False) the others. ``max_drafts``: drafts that a sequence may have verified in a step."""

    def __init__(
        self, parts: StepParts, capture: PieceCapture, max_rows: int, varied: bool = False, max_drafts: int = 0
    ) -> None:
        self._varied = varied
        self._parts, model, backend = parts, parts.model, parts.backend
        self._capture: PieceCapture | None = capture
        place, self._num_groups = model.place, len(parts.pool.groups)
        self.sizes = sizes(most_rows(model.spec, place.device, place.dtype, max_rows))
        if model.rounds_from:  # token rounding depends on which rows are prompts'
            self.sizes = [size for size in self.sizes if size < model.rounds_from] or self.sizes[:1]
        most, seqs = self.sizes[-1], parts.sampler.max_seqs
        wanted = max(seqs, min(seqs * (1 + max_drafts), DRAFTED))
        self._max_wanted = -(-wanted // ALIGNED) * ALIGNED
        if parts.pooler is not None and parts.pooler.all_rows:
            self._max_wanted = most
        words = Frame.words(most, self._max_wanted, self._num_groups)
        self._memory = torch.zeros(words, dtype=torch.int64, device=place.device)
        self._rows = torch.arange(most, device=place.device)
        self._hidden = torch.zeros(self._max_wanted, model.spec.hidden_size, dtype=place.dtype, device=place.device)
        # Zero at first: padding rows go on from what stands there, and must be numbers.
        results = {(spec.num_heads, spec.mixed_dim, place.dtype) for spec in model.spec.attentions()}
        results |= {(*mixer.results, torch.float32) for mixer in parts.recurrent()}
        self._outs: Outs = {
            (heads, dim, dtype): torch.zeros(most, heads, dim, dtype=dtype, device=place.device)
            for heads, dim, dtype in results
        }
        # Each captured size has its pieces, and the calls between them.
        self._ready: dict[int, tuple[list[Work], list[_Call | _Recurrence]]] = {}
        self._coarse = [*self.sizes[COARSE - 1 : -1 : COARSE], most]
        self._uses: Counter[int] = Counter()  # steps that an uncaptured coarse size would have taken
        self._next: Frame | None = None
        self._tapped: Tapped | None = None
        self._cuts = partial(_Cuts, backend.codec_kernels, self._outs)
        self.captures = 0

    def use_taps(self, taps: Taps) -> None:
        self._tapped = taps.memory(self.sizes[-1])

    def takes(self, spans: list[Span]) -> bool:
        """Trees of more than ``WORD`` rows are left to other ways."""
        self._next = self.frame(spans) if self._parts.varied(spans) == self._varied else None
        return self._next is not None

    @torch.inference_mode()
    def run(self, spans: list[Span]) -> Handle:
        batch = self._parts.pack(spans, self._next)
        plan_step(self._parts.backend, batch)
        handle = self._parts.sample_from(spans, self.forward(self._next, batch))
        if self._tapped is None:
            return handle
        return TappedHandle(handle, spans, self._tapped.hidden_TLE[: sum(batch.lengths)].clone())

    def frame(self, spans: list[Span]) -> Frame | None:
        """The frame in which the batch of these spans runs here; None: it cannot.

        A capture holds up every running request. So while there is work, only sizes that stand in for others are
        captured, once they were missed often."""
        rows = wanted = 0
        for span in spans:
            if span.parents and span.length > WORD:
                return None
            rows += span.length
            wanted += sum(map(len, span.want.values()))
        if not 0 < rows <= self.sizes[-1] or wanted > self._max_wanted:
            return None
        at = bisect_left(self.sizes, rows)
        size = next((size for size in self.sizes[at : at + COARSE] if size in self._ready), None)
        if size is None:
            size = next(size for size in self._coarse if size >= rows)
            self._uses[size] += 1
            if self._uses[size] <= EAGER_STEPS or not self._try_capture(size):
                return None
        frame = self._frame(size)
        return frame if wanted <= frame.wanted else None

    def _frame(self, size: int) -> Frame:
        guests = self._parts.guest_inputs is not None
        return Frame(size, min(size, self._max_wanted), self._memory, self._varied, guests)

    def forward(self, frame: Frame, batch: StepBatch) -> torch.Tensor:
        """Hidden states [W, E] of ``batch.logit_rows`` before the final norm, valid until the next step. The batch was
        packed into ``frame`` and planned."""
        (*pieces, last), calls = self._ready[frame.rows]
        rows, backend = sum(batch.lengths), self._parts.backend
        for i, piece in enumerate(pieces):
            piece()
            calls[i].attend(backend, rows, batch)
        last()
        return self._hidden[: frame.wanted]

    # -------------------------------------------------------------------------------------------------------- capturing

    def _compute(self, size: int, backend: _Cuts) -> None:
        """Run the step itself over the fixed memory."""
        parts, frame = self._parts, self._frame(size)
        ids, positions, slots, wanted, variants, guests = frame.parts(self._num_groups)
        batch = StepBatch(
            input_ids=ids,
            positions=positions,
            row_start=ids,
            context=ids,
            tables=(),
            slots=slots,
            logit_rows=wanted,
            starts=[],
            lengths=[],
            variants=variants,
        )
        if guests is not None:
            batch.guests, batch.inputs = (self._rows[:size], guests), parts.inputs(ids, guests)
        taps = None if self._tapped is None else self._tapped.by_layer
        self._hidden[: frame.wanted].copy_(parts.model.forward(batch, parts.caches, backend, taps, wanted_M=wanted))

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """Run a step of padding rows without attention. It compiles kernels and loads libraries, which a capture must
        not do."""
        self._memory.zero_()
        self._compute(size, self._cuts([], lambda: None))

    @torch.inference_mode()
    def _try_capture(self, size: int) -> bool:
        """Capture a size. If that fails, this process does without these graphs from then on."""
        if self._capture is None:
            return False
        calls: list[_Call | _Recurrence] = []

        def work(cut: Work) -> None:
            calls.clear()
            self._compute(size, self._cuts(calls, cut))

        try:
            check_memory(self._parts.device, self.step_bytes)
            self.rehearse(size)
            pieces = self._capture.pieces(work)
            calls[:] = [
                replace(call, q_THD=call.q_THD.tensor()) if isinstance(call.q_THD, _Address) else call for call in calls
            ]
            self._ready[size] = pieces, calls
            self.captures += 1
        except Exception as error:
            self._capture = None
            log.warning(
                "no more CUDA graphs of mixed steps: %d rows cannot be captured (%s: %s)",
                size,
                type(error).__name__,
                error,
            )
            return False
        return True

    def capture_next(self) -> bool:
        """Capture one more size, those first that stand in for others; of variants only once a step had some."""
        if self._varied and not self._uses:
            return False
        size = next((size for size in (*self._coarse, *self.sizes) if size not in self._ready), None)
        return size is not None and self._try_capture(size)

    def measure(self) -> tuple[int, int]:
        step = peak_bytes(self._parts.device, lambda: self.rehearse(self.sizes[-1]))
        return step, step + GRAPH_BYTES * len(self.sizes)
