"""Decode graphs for steps with forced chains, on servers without a drafter.

A drafter's server has graphs for spans of several rows from the start. Others learn that they need some when the first
grammar forces a chain. So these graphs cost nothing before: their buffers are made by the first step that runs here, no
memory is set aside for them, and an idle engine captures them only once they were used. Each capture makes sure that
its memory is there; where it is not, these steps go on without graphs, and all others keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.ways.capture import Capture
from kvasir.engine.ways.graph_buckets import GraphKey
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.step_way import StepParts
from kvasir.types import Span

# Most tokens of a chain, and most rows of decodes and chains in a step: about as many as an H200 computes while it
# reads an 8B model's weights once, so that a forced token costs next to nothing.
MAX_CHAIN, MAX_ROWS = 32, 256


class ChainGraphs(DecodeGraphs):
    """Runs steps of decodes of which some have a forced chain. ``varied``: as of `DecodeGraphs`."""

    def __init__(self, parts: StepParts, capture: Capture, varied: bool = False) -> None:
        super().__init__(parts, capture, MAX_CHAIN, varied)
        self._used = False

    def takes(self, spans: list[Span]) -> bool:
        return any(span.length > 1 for span in spans) and super().takes(spans)

    def _by_worth(self) -> Iterator[GraphKey]:
        """Sizes that stand in for all others. What follows a grammar's tokens is drawn outside the graph."""
        for size in self.choice.drafted:
            if size <= MAX_ROWS and not size & (size - 1):
                yield GraphKey(size, StepOutput.HIDDEN, self.choice.usual_form)

    def measure(self) -> tuple[int, int]:
        """Nothing is set aside."""
        return 0, 0
