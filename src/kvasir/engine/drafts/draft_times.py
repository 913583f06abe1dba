"""Cost of a step with drafts and without, from one step's end to the next one's: drafting, its host work, and the
overlap that a drafted step does without are part of the price.

There are two models of step times, plain and drafted. Their rows are the rows that are computed: padding of a CUDA
graph is work like any other. Until drafted steps were measured, they are expected to cost what plain ones of as many
rows do by the other model. A linear model is off by some per cent at the edges of buckets and tiles, and the controller
decides about such differences. So each size also has a running time of its own, at the shape it was last seen with. The
model says only what another context or number of sequences makes of it; what it learns from other sizes moves nothing
here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from kvasir.engine.schedule.step_time import Roofline, StepShape, StepTimeModel
from kvasir.engine.ways.graphs import DecodeGraphs

# Steps of a size after which it is captured, if ever.
WARM_UP = 5
# Steps of a size since it was first seen captured, of which the last runs as all later ones will.
SETTLED = 3
# Weight of a size's present time in its running mean; and where a step took much less, for no step is quicker than it
# can be.
DECAY, WRONG = 0.9, 0.5
# First observations of a size, of which the shortest counts.
SURE = 4
# A step that takes so many seconds longer than predicted, and more than twice as long, did something else besides,
# such as compiling. It is forgiven unless that happens often: so many times in a row; so many times with steps of a
# size, and once more for each so many that were as predicted; or for so many seconds in all.
HICCUP, HICCUPS, OF_A_SIZE, GOOD, FORGIVEN = 0.1, 6, 4, 8, 60.0
# A step's time counts up to so many times the present one.
CLIP = 1.25
# A drafted step in a captured graph that was never run is expected to cost at most so many times the next smaller
# size. Without this bound, a linear model that is off by a few per cent keeps a size from ever being measured.
UNTRIED = 1.02


class DraftTimes:
    """Times in seconds. ``graphs`` are the runner's, if it has any; ``compiles`` says whether kernels are compiled when
    they are first used, as on a GPU."""

    def __init__(self, roofline: Roofline, graphs: DecodeGraphs | None, compiles: bool = True) -> None:
        self._graphs, self._compiles = graphs, compiles
        self._models = {drafted: StepTimeModel(roofline) for drafted in (False, True)}
        self._times: dict[_Kind, tuple[float, StepShape]] = {}
        self._hiccups: Counter[_Kind] = Counter()
        self._in_a_row = 0  # hiccups with no drafted step between
        self._forgiven = 0.0  # seconds of hiccups
        self._seen: set[tuple[bool, bool]] = set()  # (drafted, in a graph) that was observed
        self._counts: Counter[_Kind] = Counter()  # observations that were learnt from
        self._runs: Counter[_Kind] = Counter()  # all observations
        self._captured: Counter[_Kind] = Counter()  # observations since the graph is there
        # Whether the last drafted step that a graph has rows for was launched kernel by kernel all the same.
        self._eager = False

    def predict(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> float:
        """Seconds of a step of ``num_seqs`` decodes with ``context`` tokens before them in all, which verifies
        ``num_drafts`` nodes."""
        return self._expected(*self._kind(num_seqs, context, num_drafts, drafted, drafted and self._eager))

    def observe(
        self,
        num_seqs: int,
        context: int,
        num_drafts: int,
        drafted: bool,
        seconds: float,
        eager: bool = False,
        once: bool = False,
    ) -> tuple[float, bool]:
        """Learn that a step took ``seconds``. ``eager`` says that no graph could take it, whatever its rows; ``once``,
        that it captured one.

        Returns what it is to be charged, and whether the next one of its size will take about as long: not if something
        happened that happens once, a capture or, most likely, a compilation."""
        if drafted and num_drafts and self._kind(num_seqs, context, num_drafts, True)[0].graph:
            self._eager = eager
        kind, shape = self._kind(num_seqs, context, num_drafts, drafted, eager)
        expected, warm, count = self._expected(kind, shape), self._warm(kind), self._counts[kind]
        if once:
            return min(seconds, CLIP * expected), False
        if (
            self._compiles
            and seconds > max(expected + HICCUP, 2 * expected)
            and self._in_a_row < HICCUPS
            and self._hiccups[kind] < OF_A_SIZE + count // GOOD
            and self._forgiven < FORGIVEN
        ):
            self._in_a_row += 1
            self._hiccups[kind] += 1
            self._forgiven += seconds
            return CLIP * expected, False
        if drafted:
            self._in_a_row = 0
        if not warm:  # if it was captured just now, that is not charged
            return min(seconds, CLIP * expected) if self._captured[kind] else seconds, False
        self._counts[kind] += 1
        # Neither an outlier nor a late compilation may move it much, for a size that looks dear is not tried again
        # soon.
        if count < SURE:
            learnt = min(seconds, expected) if count else seconds
        else:
            decay = WRONG if seconds < expected / CLIP else DECAY
            learnt = decay * expected + (1 - decay) * min(seconds, CLIP * expected)
        self._times[kind] = learnt, shape
        if drafted:
            self._bound_plain(num_seqs, context, seconds)
        model = self._models[drafted]
        if (drafted, kind.graph) not in self._seen:
            self._seen.add((drafted, kind.graph))
            if drafted:
                model.start_from(self._models[False], graph=kind.graph, other=self._plain_graph(kind))
        model.observe(shape, min(seconds, CLIP * learnt), graph=kind.graph)
        return seconds, True

    def _bound_plain(self, num_seqs: int, context: int, seconds: float) -> None:
        """Bound a plain step's time by that of a drafted one, which took ``seconds``. While drafts are on, there are no
        plain steps to learn from."""
        kind, shape = self._kind(num_seqs, context, 0, False)
        if kind in self._times and self._expected(kind, shape) > CLIP * seconds:
            self._times[kind] = seconds, shape

    def _expected(self, kind: _Kind, shape: StepShape) -> float:
        seconds, then = self._times.get(kind, (0.0, None))
        now = self._model(kind, shape)
        if then is None:
            return min(now, self._at_most(kind, shape))
        return seconds * now / self._model(kind, then)

    def _at_most(self, kind: _Kind, shape: StepShape) -> float:
        """Bound for a size that was never measured, by the next smaller one."""
        graphs = self._graphs
        if graphs is None or not (kind.drafted and kind.graph and graphs.replays(kind.size, True)):
            return math.inf
        sizes = graphs.buckets
        rows = sizes[bisect_left(sizes, kind.size) - 1]
        below = kind._replace(size=rows)
        return UNTRIED * self._expected(below, replace(shape, rows=rows)) if below in self._times else math.inf

    def _plain_graph(self, kind: _Kind) -> bool:
        """Whether plain steps in graphs show what unmeasured drafted ones will cost: those of the same sort do, if
        there were any."""
        return kind.graph if (False, kind.graph) in self._seen else not kind.graph

    def _model(self, kind: _Kind, shape: StepShape) -> float:
        if kind.drafted and (True, kind.graph) not in self._seen:
            return self._models[False].predict(shape, graph=self._plain_graph(kind))
        return self._models[kind.drafted].predict(shape, graph=kind.graph)

    def _kind(
        self, num_seqs: int, context: int, num_drafts: int, drafted: bool, eager: bool = False
    ) -> tuple[_Kind, StepShape]:
        """The kind and shape of a step. A span counts its context once, because verifying rows share the reading of its
        keys."""
        rows, graphs = num_seqs + num_drafts, self._graphs
        graph = graphs is not None and not eager and rows <= (graphs.most_drafted if drafted else graphs.buckets[-1])
        if graph:
            rows = graphs.bucket(rows)
        return _Kind(drafted, graph, rows if graph else self._class(rows)), StepShape(
            rows=rows, decode_context=context, sequences=num_seqs
        )

    def _class(self, rows: int) -> int:
        """The class of a number of rows. Up to 16, each number is its own. Beyond, classes lie 8 rows apart, which is
        what a GPU's kernels differ by, or there are 8 of them to a doubling; on a CPU 4."""
        step = max(8, 1 << max(0, rows.bit_length() - 4)) if self._compiles else 1 << max(0, rows.bit_length() - 3)
        return rows if rows <= 16 else -(-rows // step) * step

    def settled(self, num_seqs: int) -> bool:
        """Whether plain steps of ``num_seqs`` decodes run as they always will, so that drafted ones can be compared
        with them. They do not while they are launched kernel by kernel and captured soon."""
        kind, _ = self._kind(max(1, num_seqs), 0, 0, False)
        return not kind.graph or self._runs[kind] > WARM_UP or self._graphs.replays(kind.size, False)

    def measured_plain(self, num_seqs: int, context: int) -> float | None:
        """Predicted seconds of a plain step; None before one of its sort, in a graph or not, was measured."""
        kind, _ = self._kind(num_seqs, context, 0, False)
        return self.predict(num_seqs, context, 0, False) if (False, kind.graph) in self._seen else None

    def _warm(self, kind: _Kind) -> bool:
        """Count a step, and say whether it ran as the next ones of its size will. One that was captured just now, or is
        launched kernel by kernel and captured soon, did not."""
        self._runs[kind] += 1
        if not kind.graph:
            return True
        if self._graphs.replays(kind.size, kind.drafted):
            # A size that was always captured runs as before. Otherwise the step behind this one, launched already, may
            # have captured it.
            self._captured[kind] += SETTLED if self._runs[kind] == 1 else 1
        return self._captured[kind] >= SETTLED or not self._captured[kind] and self._runs[kind] > WARM_UP


class _Kind(NamedTuple):
    """Steps of a kind are timed together. ``size``: rows of the graph, or the class of the step's rows."""

    drafted: bool
    graph: bool
    size: int
