"""Our own chunk kernels of the delta rule, which every GPU with Triton runs."""

from __future__ import annotations

from kvasir.kernels import gated_chunks
from kvasir.layers.recurrence_backend import RecurrenceBackend


class Triton(RecurrenceBackend):
    """`kvasir.kernels.gated_chunks`."""

    rank = 10

    def scan(self, *given) -> None:
        gated_chunks.scan(*given)
