"""What a step costs with drafts and without: from one step's end to the next one's, so that drafting, its host work and the
overlap that a drafted step does without are part of the price.

Two models of step times, plain and drafted, whose rows are those that are computed: the padding of a CUDA graph is work like
any other. A linear model is off by some per cent at the edges of buckets and tiles, which is what the controller decides
about, so each size also has a running ratio of measured to predicted.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvasir.engine.graphs import DecodeGraphs
from kvasir.engine.step_time import Roofline, StepShape, StepTimeModel

WARM_UP = 5  # steps of a size before their time counts, where it cannot be seen whether they are captured
DECAY = 0.9  # of the ratios,
SURE = 4  # observations of a size of which the shortest counts,
CLIP = 1.25  # and how far from the present one a step's counts at most


class DraftTimes:
    """``graphs``: the runner's, if it has any; ``compiles``: whether kernels are compiled when they are first used, as on a GPU.
    Times in seconds."""

    def __init__(self, roofline: Roofline, graphs: DecodeGraphs | None, compiles: bool = True) -> None:
        self._graphs, self._compiles = graphs, compiles
        self._models = {drafted: StepTimeModel(roofline) for drafted in (False, True)}
        self._ratios: dict[_Kind, float] = {}
        self._first: dict[_Kind, float] = {}
        self._counts: Counter[_Kind] = Counter()  # observations
        self._runs: Counter[_Kind] = Counter()
        self._captured: set[_Kind] = set()

    def predict(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> float:
        """Of a step of ``num_seqs`` decodes with ``context`` tokens before them in all, which verifies ``num_drafts`` nodes."""
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted)
        return self._model(kind, shape) * self._ratios.get(kind, 1.0)

    def observe(self, num_seqs: int, context: int, num_drafts: int, drafted: bool, seconds: float) -> bool:
        """A step took ``seconds``. False: it does not count, since steps of its size may still compile or be captured."""
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted)
        if not self._warm(kind):
            return False
        before = self._model(kind, shape)
        ratio, count = seconds / before, self._counts[kind]
        self._counts[kind] += 1
        if not count and self._compiles and not kind.graph:
            self._first[kind] = ratio
            return False  # it may have compiled after all: believed when the next one says so, too
        known = self._ratios.get(kind, self._first.get(kind, ratio))
        # Neither an outlier nor a late compilation must move it much: a size that looks dear is not tried again soon.
        if count < SURE:
            self._ratios[kind] = min(ratio, known)
        else:
            self._ratios[kind] = DECAY * known + (1 - DECAY) * min(max(ratio, known / CLIP), CLIP * known)
        self._models[drafted].observe(shape, min(seconds, CLIP * self._ratios[kind] * before), graph=kind.graph)
        # The model has just learnt a part of what the ratio knew.
        self._ratios[kind] *= before / self._model(kind, shape)
        return True

    def _model(self, kind: _Kind, shape: StepShape) -> float:
        return self._models[kind.drafted].predict(shape, graph=kind.graph)

    def _kind(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> tuple[_Kind, StepShape]:
        """Verifying rows share what a sequence's keys cost to read, so a span counts its context once."""
        rows, graphs = num_seqs + num_drafts, self._graphs
        graph = graphs is not None and rows <= (graphs.most_drafted if drafted else graphs.buckets[-1])
        if graph:
            rows = graphs.bucket(rows)
        return _Kind(drafted, graph, rows if graph else self._class(rows)), StepShape(rows=rows, decode_context=context, sequences=num_seqs)

    def _class(self, rows: int) -> int:
        """Up to 16 rows each number is one; beyond, every 8, which is what a GPU's kernels differ by, or four to a doubling."""
        step = 8 if self._compiles else 1 << max(0, rows.bit_length() - 3)
        return rows if rows <= 16 else -(-rows // step) * step

    def _warm(self, kind: _Kind) -> bool:
        """Whether steps of this size have run often enough to be compiled and captured: earlier times tell nothing."""
        self._runs[kind] += 1
        before = kind in self._captured  # this very step may have captured it
        if kind.graph and self._graphs.replays(kind.size, kind.drafted):
            self._captured.add(kind)
        if kind.graph:
            return before or self._runs[kind] > WARM_UP
        return self._runs[kind] > 1 or not self._compiles


class _Kind(NamedTuple):
    """Of a step: steps of a kind are timed together. ``size``: rows of its graph, or the class of its rows."""

    drafted: bool
    graph: bool
    size: int
