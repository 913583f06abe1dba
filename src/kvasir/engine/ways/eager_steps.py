"""Steps launched layer by layer, kernel by kernel. Every step can run so; all other ways are shortcuts for some steps.

Legend: T rows, M rows with logits, E model dim.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend, plan_step
from kvasir.engine.ways.step_way import StepParts, StepWay
from kvasir.engine.ways.taps import TappedHandle
from kvasir.types import Handle, Span


class EagerSteps(StepWay):
    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        # A step that wants no logits still has to name a row: the last layer computes at least one.
        self._first_row = torch.zeros(1, dtype=torch.int64, device=parts.device)

    def takes(self, spans: list[Span]) -> bool:
        return True

    def run(self, spans: list[Span]) -> Handle:
        return self.run_with(self._parts.backend, spans)

    @torch.inference_mode()
    def run_with(self, backend: AttentionBackend, spans: list[Span]) -> Handle:
        """Run a step, attending with ``backend``."""
        parts = self._parts
        batch = parts.pack(spans)
        plan_step(backend, batch)
        count, total = batch.logit_rows.shape[0], batch.input_ids.shape[0]
        wanted_M = None if count == total else batch.logit_rows if count else self._first_row
        if batch.guests is not None:
            batch.inputs = parts.guest_inputs.index_select(0, batch.guests[1])
        tapped = None if parts.taps is None else parts.taps.memory(total)
        hidden_ME = parts.model.forward(
            batch, parts.caches, backend, None if tapped is None else tapped.by_layer, wanted_M=wanted_M
        )
        handle: Handle = parts.sample_from(spans, hidden_ME)
        return handle if tapped is None else TappedHandle(handle, spans, tapped.hidden_TLE)
