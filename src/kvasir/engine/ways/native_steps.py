"""Steps of any kind whose forward is one native call on a CPU; the sampler draws from the logits. Guests and rows
with variants are left to other ways."""

from __future__ import annotations

import torch

from kvasir.engine.ways.step_way import StepParts, StepWay
from kvasir.engine.ways.taps import TappedHandle
from kvasir.models.native_decoder import NativeDecoder
from kvasir.types import Handle, Span


class NativeSteps(StepWay):
    def __init__(self, parts: StepParts, native: NativeDecoder) -> None:
        self.native = native
        self._parts = parts

    def takes(self, spans: list[Span]) -> bool:
        rows = sum(span.length for span in spans)
        if not self.native.takes(rows, len(spans)) or any(span.guests for span in spans) or self._parts.varied(spans):
            return False
        return self._parts.taps is None or self.native.can_tap(self._parts.taps.layers)

    @torch.inference_mode()
    def run(self, spans: list[Span]) -> Handle:
        batch, taps = self._parts.pack(spans), self._parts.taps
        total = batch.input_ids.shape[0]
        # Prompts are tapped whether taps are on or not: no later step shows them again.
        tapped = taps.memory(total) if taps is not None and (taps.on or total > len(spans)) else None
        logits = self.native.logits(batch, None if tapped is None else tapped.by_layer)
        handle = self._parts.sample(spans, logits)
        return handle if tapped is None else TappedHandle(handle, spans, tapped.hidden_TLE)

    def weights_changed(self) -> None:
        self.native.weights_changed()
