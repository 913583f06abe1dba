"""Steps that mix prompts with decodes, captured but for attention.

Launched kernel by kernel, such a step takes the host longer than a short prompt takes the GPU. What attention launches depends on the
spans; everything else on the number of rows alone. So all that lies between two attentions is one CUDA graph, and the step is: replay,
attend, replay, attend, ... over memory of a fixed place. A step is padded to a *size*; its padding rows hold token 0, write to the dummy
page, and are neither attended nor read. The graphs end at sizes whose launch hides behind the GPU's work (``most_rows``).

While a piece is captured, ``_Cuts`` stands in for the attention backend: it notes what is to be attended, and the piece ends. Queries lie
in the graphs' pool, whose memory is used again as soon as the layer is through: noted is their address, nothing is kept alive.

Piecewise graphs are as vLLM has them; there the compiler splits the model, here the seam to attention does.

Legend: T rows, W rows with logits, H query heads, D head dim, E model dim.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec
from kvasir.engine.batch import ALIGNED, Frame
from kvasir.engine.graphs import EAGER_STEPS, GRAPH_BYTES, Work, check_memory, peak_bytes
from kvasir.kernels.hardware import rates
from kvasir.kv.codec import LayerCache
from kvasir.logs import log
from kvasir.models.cost import active_params
from kvasir.models.decoder import Decoder
from kvasir.models.spec import ModelSpec
from kvasir.types import Span, StepBatch

LAUNCH_SECONDS = 0.6e-3  # of the host a layer, kernel by kernel, by experience
HIDDEN = 1.25  # times that: a step that takes the GPU so long hides its launch
USED = 0.7  # of the matrix rate that products of prompts reach
STRIDES = (
    (1024, 32),
    (2048, 64),
    (4096, 128),
    (1 << 30, 256),
)  # up to so many rows, sizes lie so far apart: padding beyond 512 is at most 6 %
LEAST = 512  # rows that are captured of any model
COARSE = 4  # every so many sizes one is captured first, and stands in for those below it


class PieceCapture(Protocol):
    def pieces(self, work: Callable[[Work], None]) -> list[Work]:
        """Capture ``work`` in pieces: one ends wherever it calls what it is given."""


def most_rows(spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_rows: int) -> int:
    """Beyond, a step takes the GPU so long that launching it is free, and padding is not. Kernels run as they are launched."""
    flops = 2 * active_params(spec) / (USED * rates(device, dtype)[1])  # seconds a row
    return min(max_rows, max(LEAST, int(HIDDEN * LAUNCH_SECONDS * len(spec.layers) / flops)))


def sizes(most: int) -> list[int]:
    """The last one holds ``most`` rows."""
    found, size = [], 0
    while size < most:
        size += next(stride for end, stride in STRIDES if size < end)
        found.append(size)
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention: what a backend's ``run`` is given. ``q_THD`` is noted as an address while the piece is captured."""

    q_THD: Any
    cache: LayerCache
    spec: AttentionSpec
    sinks_H: torch.Tensor | None
    out_THD: torch.Tensor


class _Cuts:
    """In a backend's place: notes the call, and ends the piece."""

    def __init__(
        self, backend: AttentionBackend, outs: dict[tuple[int, int], torch.Tensor], calls: list[_Call], cut: Work
    ) -> None:
        self.codec_kernels = backend.codec_kernels
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
        out_THD = self._outs[q_THD.shape[1:]][: len(q_THD)]
        self._calls.append(_Call(_Address(q_THD) if q_THD.is_cuda else q_THD, cache, spec, sinks_H, out_THD))
        self._cut()
        return out_THD


class _Address:
    """A tensor's memory, not kept alive. ``tensor``: it again, whoever the memory belongs to by then."""

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


class MixedSteps:
    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        backend: AttentionBackend,
        capture: PieceCapture,
        *,
        num_groups: int,
        max_wanted: int,
        max_rows: int,
    ) -> None:
        """``max_wanted``: rows with logits that a step may have. ``max_rows``: of a step."""
        self.model, self.caches, self.backend = model, caches, backend
        self._capture: PieceCapture | None = capture
        place, self._num_groups = model.place, num_groups
        self.sizes = sizes(most_rows(model.spec, place.device, place.dtype, max_rows))
        most, self._max_wanted = self.sizes[-1], -(-max_wanted // ALIGNED) * ALIGNED
        self._memory = torch.zeros(
            Frame.words(most, self._max_wanted, num_groups), dtype=torch.int64, device=place.device
        )
        self._hidden = torch.zeros(self._max_wanted, model.spec.hidden_size, dtype=place.dtype, device=place.device)
        # Zero at first: padding rows go on from what stands there, and must be numbers.
        heads = {(layer.mixer.num_heads, layer.mixer.head_dim) for layer in model.spec.layers}
        self._outs = {shape: torch.zeros(most, *shape, dtype=place.dtype, device=place.device) for shape in heads}
        self._ready: dict[
            int, tuple[list[Work], list[_Call]]
        ] = {}  # size -> its pieces, and what is attended between them
        self._coarse = [*self.sizes[COARSE - 1 : -1 : COARSE], most]
        self._uses: Counter[int] = Counter()  # of coarse sizes that were not captured
        self.step_bytes = 64 << 20  # of device memory that a capture may need
        self.captures = 0

    def frame(self, spans: list[Span]) -> Frame | None:
        """Where the batch of these spans has to lie to be run here; None: it is launched kernel by kernel. A capture holds up everybody who
        is running: while there is work, only sizes that stand in for others are captured, when they are missed often."""
        rows = wanted = 0
        for span in spans:
            if span.guests or span.parents:
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
        return Frame(size, min(size, self._max_wanted), self._memory)

    def forward(self, frame: Frame, batch: StepBatch) -> torch.Tensor:
        """Hidden states [W, E] of ``batch.logit_rows`` before the final norm, valid until the next step. The batch was packed into ``frame`` and
        planned."""
        (*pieces, last), calls = self._ready[frame.rows]
        rows = sum(batch.lengths)
        for i, piece in enumerate(pieces):
            piece()
            call = calls[i]
            self.backend.run(
                call.q_THD[:rows], call.cache, call.spec, batch, sinks_H=call.sinks_H, out_THD=call.out_THD[:rows]
            )
        last()
        return self._hidden[: frame.wanted]

    # -------------------------------------------------------------------------------------------------------- capturing

    def _compute(self, size: int, backend: _Cuts) -> None:
        """The step itself, over the fixed memory."""
        frame = self._frame(size)
        ids, positions, slots, wanted = frame.parts(self._num_groups)
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
        )
        self._hidden[: frame.wanted].copy_(self.model.forward(batch, self.caches, backend, wanted_M=wanted))

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """A step of padding rows, without attention: compiles kernels and loads libraries, which a capture must not do."""
        self._memory.zero_()
        self._compute(size, _Cuts(self.backend, self._outs, [], lambda: None))

    @torch.inference_mode()
    def _try_capture(self, size: int) -> bool:
        """Where that fails, this process does without from then on."""
        if self._capture is None:
            return False
        calls: list[_Call] = []

        def work(cut: Work) -> None:
            calls.clear()
            self._compute(size, _Cuts(self.backend, self._outs, calls, cut))

        try:
            check_memory(self.model.place.device, self.step_bytes)
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
        """Capture one more size, those first that stand in for others, while nothing is in flight. False: none is left."""
        size = next((size for size in (*self._coarse, *self.sizes) if size not in self._ready), None)
        return size is not None and self._try_capture(size)

    def measure(self) -> tuple[int, int]:
        """Bytes of ``step_bytes``, and with the graphs of all sizes: as ``DecodeGraphs.measure``."""
        step = peak_bytes(self.model.place.device, lambda: self.rehearse(self.sizes[-1]))
        return step, step + GRAPH_BYTES * len(self.sizes)
