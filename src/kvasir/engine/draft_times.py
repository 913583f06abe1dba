"""What a step costs with drafts and without: from one step's end to the next one's, so that drafting, its host work and the
overlap that a drafted step does without are part of the price.

Two models of step times, plain and drafted, whose rows are those that are computed: the padding of a CUDA graph is work like
any other. A linear model is off by some per cent at the edges of buckets and tiles, which is what the controller decides
about, so each size also has a running ratio of measured to predicted.
"""

from __future__ import annotations

from collections import Counter

from kvasir.engine.graphs import DecodeGraphs
from kvasir.engine.step_time import Roofline, StepShape, StepTimeModel

WARM_UP = 5  # steps of a size before their time counts, where it cannot be seen whether they are captured
DECAY = 0.9  # of the ratios,
CLIP = 1.25  # and how far from the present one a step's counts at most


class DraftTimes:
    """``graphs``: the runner's, if it has any. Times in seconds."""

    def __init__(self, roofline: Roofline, graphs: DecodeGraphs | None) -> None:
        self._graphs = graphs
        self._models = {drafted: StepTimeModel(roofline) for drafted in (False, True)}
        self._ratios: dict[tuple[bool, int], float] = {}
        self._runs: Counter[tuple[bool, int]] = Counter()
        self._captured: set[tuple[bool, int]] = set()

    def predict(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> float:
        """Of a step of ``num_seqs`` decodes with ``context`` tokens before them in all, which verifies ``num_drafts`` nodes."""
        size, graph = self._size(num_seqs + num_drafts, drafted)
        return self._model(size, num_seqs, context, graph, drafted) * self._ratios.get((drafted, size), 1.0)

    def observe(self, num_seqs: int, context: int, num_drafts: int, drafted: bool, seconds: float) -> bool:
        """A step took ``seconds``. False: it does not count, since steps of its size may still compile or be captured."""
        size, graph = self._size(num_seqs + num_drafts, drafted)
        key = drafted, size
        if not self._warm(key, graph):
            return False
        shape = StepShape(rows=size, decode_context=context, sequences=num_seqs)
        ratio = seconds / self._model(size, num_seqs, context, graph, drafted)
        if known := self._ratios.get(key):
            # An outlier must not move it much: a size that looks dear is not tried again soon.
            ratio = DECAY * known + (1 - DECAY) * min(max(ratio, known / CLIP), CLIP * known)
        self._ratios[key] = ratio
        before = self._model(size, num_seqs, context, graph, drafted)
        self._models[drafted].observe(shape, seconds, graph=graph)
        # The model has just learnt a part of what the ratio knew.
        self._ratios[key] *= before / self._model(size, num_seqs, context, graph, drafted)
        return True

    def _model(self, size: int, num_seqs: int, context: int, graph: bool, drafted: bool) -> float:
        # Verifying rows share what a sequence's keys cost to read, so a span counts its context once.
        return self._models[drafted].predict(StepShape(rows=size, decode_context=context, sequences=num_seqs), graph=graph)

    def _size(self, rows: int, drafted: bool) -> tuple[int, bool]:
        """Rows as they are computed, and whether in a graph."""
        graphs = self._graphs
        if graphs is not None and rows <= (graphs.most_drafted if drafted else graphs.buckets[-1]):
            return graphs.bucket(rows), True
        return rows if rows <= 16 else -(-rows // 8) * 8, False

    def _warm(self, key: tuple[bool, int], graph: bool) -> bool:
        """Whether steps of this size have run often enough to be compiled and captured: earlier times tell nothing."""
        drafted, size = key
        self._runs[key] += 1
        before = key in self._captured  # this very step may have captured it
        if graph and self._graphs.replays(size, drafted):
            self._captured.add(key)
        if graph:
            return before or self._runs[key] > WARM_UP
        return self._runs[key] > 1
