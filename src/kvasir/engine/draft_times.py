"""What a step costs with drafts and without: from one step's end to the next one's, so that drafting, its host work and the
overlap that a drafted step does without are part of the price.

Two models of step times, plain and drafted, whose rows are those that are computed: the padding of a CUDA graph is work like
any other. Until drafted steps were measured they are expected to cost what plain ones of as many rows do, which is what the other
model says. A linear model is off by some per cent at the edges of buckets and tiles, which is what the controller decides
about, so each size also has a running ratio of measured to predicted.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvasir.engine.graphs import DecodeGraphs
from kvasir.engine.step_time import Roofline, StepShape, StepTimeModel

WARM_UP = 5  # steps of a size after which it is captured, where that cannot be seen
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
        self._seen: set[tuple[bool, bool]] = set()  # (drafted, in a graph) of which there were observations
        self._counts: Counter[_Kind] = Counter()  # observations
        self._runs: Counter[_Kind] = Counter()
        self._captured: set[_Kind] = set()

    def predict(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> float:
        """Of a step of ``num_seqs`` decodes with ``context`` tokens before them in all, which verifies ``num_drafts`` nodes."""
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted)
        return self._model(kind, shape) * self._ratios.get(kind, 1.0)

    def observe(self, num_seqs: int, context: int, num_drafts: int, drafted: bool, seconds: float) -> bool:
        """A step took ``seconds``. False: it does not count, since it took more than expected and may have compiled or captured something."""
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted)
        before = self._model(kind, shape)
        ratio, count, warm = seconds / before, self._counts[kind], self._warm(kind)
        known = self._ratios.get(kind, 1.0)
        if ratio > CLIP * known and not warm:
            return False
        if ratio > CLIP * known and not count and self._compiles and kind not in self._first:
            self._first[kind] = ratio  # it may have compiled after all: believed when the next one says so, too
            return False
        self._counts[kind] += 1
        # Neither an outlier nor a late compilation must move it much: a size that looks dear is not tried again soon.
        if count < SURE:
            self._ratios[kind] = min(ratio, self._ratios.get(kind, self._first.get(kind, ratio)))
        else:
            self._ratios[kind] = DECAY * known + (1 - DECAY) * min(max(ratio, known / CLIP), CLIP * known)
        model = self._models[drafted]
        if (drafted, kind.graph) not in self._seen:
            self._seen.add((drafted, kind.graph))
            if drafted:
                model.start_from(self._models[False], graph=kind.graph, other=self._plain_graph(kind))
        model.observe(shape, min(seconds, CLIP * self._ratios[kind] * before), graph=kind.graph)
        # The model has just learnt a part of what the ratio knew.
        self._ratios[kind] *= before / self._model(kind, shape)
        return True

    def _plain_graph(self, kind: _Kind) -> bool:
        """Which plain steps show what unmeasured drafted ones will cost: those of the same sort, if there were any."""
        return kind.graph if (False, kind.graph) in self._seen else not kind.graph

    def _model(self, kind: _Kind, shape: StepShape) -> float:
        if kind.drafted and (True, kind.graph) not in self._seen:
            return self._models[False].predict(shape, graph=self._plain_graph(kind))
        return self._models[kind.drafted].predict(shape, graph=kind.graph)

    def _kind(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> tuple[_Kind, StepShape]:
        """Verifying rows share what a sequence's keys cost to read, so a span counts its context once."""
        rows, graphs = num_seqs + num_drafts, self._graphs
        graph = graphs is not None and rows <= (graphs.most_drafted if drafted else graphs.buckets[-1])
        if graph:
            rows = graphs.bucket(rows)
        return _Kind(drafted, graph, rows if graph else self._class(rows)), StepShape(rows=rows, decode_context=context, sequences=num_seqs)

    def _class(self, rows: int) -> int:
        """Up to 16 rows each number is one; beyond, every 8, which is what a GPU's kernels differ by, or 8 to a doubling, on a CPU 4."""
        step = max(8, 1 << rows.bit_length() - 4) if self._compiles else 1 << max(0, rows.bit_length() - 3)
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
