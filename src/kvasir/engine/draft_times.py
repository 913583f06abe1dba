"""What a step costs with drafts and without: from one step's end to the next one's, so that drafting, its host work and the
overlap that a drafted step does without are part of the price.

Two models of step times, plain and drafted, whose rows are those that are computed: the padding of a CUDA graph is work like
any other. Until drafted steps were measured they are expected to cost what plain ones of as many rows do, which is what the other
model says. A linear model is off by some per cent at the edges of buckets and tiles, which is what the controller decides
about, so each size also has a running time of its own, at the shape it was last seen with, and the model tells only what
another context or number of sequences makes of it: what it learns from other sizes moves nothing here.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvasir.engine.graphs import DecodeGraphs
from kvasir.engine.step_time import Roofline, StepShape, StepTimeModel

WARM_UP = 5  # steps of a size after which it is captured, if ever
SETTLED = 3  # steps of a size since it was seen captured, of which the last is as all will be
DECAY = 0.9  # of a size's time,
SURE = 4  # observations of a size of which the shortest counts,
WRONG = 0.5  # of it where a step took much less than is believed: none is ever quicker than it is
HICCUP = 0.1  # seconds above its prediction, and twice that: so long a step did something else, if it is not always so:
HICCUPS = 6  # so often in a row,
OF_A_SIZE, GOOD = 4, 8  # so often with steps of a size, and once more for so many that did not,
FORGIVEN = 60.0  # and so many seconds in all
CLIP = 1.25  # and how far from the present one a step's counts at most


class DraftTimes:
    """``graphs``: the runner's, if it has any; ``compiles``: whether kernels are compiled when they are first used, as on a GPU.
    Times in seconds."""

    def __init__(self, roofline: Roofline, graphs: DecodeGraphs | None, compiles: bool = True) -> None:
        self._graphs, self._compiles = graphs, compiles
        self._models = {drafted: StepTimeModel(roofline) for drafted in (False, True)}
        self._times: dict[_Kind, tuple[float, StepShape]] = {}
        self._hiccups: Counter[_Kind] = Counter()
        self._in_a_row = 0  # of them, with no drafted step between
        self._forgiven = 0.0  # seconds of them
        self._seen: set[tuple[bool, bool]] = set()  # (drafted, in a graph) of which there were observations
        self._counts: Counter[_Kind] = Counter()  # observations that were learnt from,
        self._runs: Counter[_Kind] = Counter()  # and all
        self._captured: Counter[_Kind] = Counter()  # those since its graph was there
        self._eager = (
            False  # whether the last drafted step that a graph has rows for was launched kernel by kernel all the same
        )

    def predict(self, num_seqs: int, context: int, num_drafts: int, drafted: bool) -> float:
        """Of a step of ``num_seqs`` decodes with ``context`` tokens before them in all, which verifies ``num_drafts`` nodes."""
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
        """A step took ``seconds``; ``eager``: no graph could take it, whatever its rows; ``once``: it captured one. Returns what it is to be
        charged, and whether the next one of its size will take about as long: not if something happened that does so once, a capture or,
        most likely, a compilation."""
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
        # Neither an outlier nor a late compilation must move it much: a size that looks dear is not tried again soon.
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
        """A drafted step took ``seconds``: without drafts it would have taken no longer. Who drafts sees no plain steps to learn that from."""
        kind, shape = self._kind(num_seqs, context, 0, False)
        if kind in self._times and self._expected(kind, shape) > CLIP * seconds:
            self._times[kind] = seconds, shape

    def _expected(self, kind: _Kind, shape: StepShape) -> float:
        seconds, then = self._times.get(kind, (0.0, None))
        now = self._model(kind, shape)
        return now if then is None else seconds * now / self._model(kind, then)

    def _plain_graph(self, kind: _Kind) -> bool:
        """Which plain steps show what unmeasured drafted ones will cost: those of the same sort, if there were any."""
        return kind.graph if (False, kind.graph) in self._seen else not kind.graph

    def _model(self, kind: _Kind, shape: StepShape) -> float:
        if kind.drafted and (True, kind.graph) not in self._seen:
            return self._models[False].predict(shape, graph=self._plain_graph(kind))
        return self._models[kind.drafted].predict(shape, graph=kind.graph)

    def _kind(
        self, num_seqs: int, context: int, num_drafts: int, drafted: bool, eager: bool = False
    ) -> tuple[_Kind, StepShape]:
        """Verifying rows share what a sequence's keys cost to read, so a span counts its context once."""
        rows, graphs = num_seqs + num_drafts, self._graphs
        graph = graphs is not None and not eager and rows <= (graphs.most_drafted if drafted else graphs.buckets[-1])
        if graph:
            rows = graphs.bucket(rows)
        return _Kind(drafted, graph, rows if graph else self._class(rows)), StepShape(
            rows=rows, decode_context=context, sequences=num_seqs
        )

    def _class(self, rows: int) -> int:
        """Up to 16 rows each number is one; beyond, every 8, which is what a GPU's kernels differ by, or 8 to a doubling, on a CPU 4."""
        step = max(8, 1 << max(0, rows.bit_length() - 4)) if self._compiles else 1 << max(0, rows.bit_length() - 3)
        return rows if rows <= 16 else -(-rows // step) * step

    def settled(self, num_seqs: int) -> bool:
        """Whether plain steps of ``num_seqs`` decodes run as they always will, so that drafted ones can be compared with them: not
        while they are launched kernel by kernel to be captured soon."""
        kind, _ = self._kind(max(1, num_seqs), 0, 0, False)
        return not kind.graph or self._runs[kind] > WARM_UP or self._graphs.replays(kind.size, False)

    def measured_plain(self, num_seqs: int, context: int) -> float | None:
        """``predict`` of a plain step; None before one of its sort, in a graph or not, was measured."""
        kind, _ = self._kind(num_seqs, context, 0, False)
        return self.predict(num_seqs, context, 0, False) if (False, kind.graph) in self._seen else None

    def _warm(self, kind: _Kind) -> bool:
        """Once a step: whether it ran as the next ones of its size will: not launched kernel by kernel to be captured soon, nor captured
        just now."""
        self._runs[kind] += 1
        if not kind.graph:
            return True
        if self._graphs.replays(kind.size, kind.drafted):
            # One that always was is as it was. Else the step behind this one may have captured it, which was launched already.
            self._captured[kind] += SETTLED if self._runs[kind] == 1 else 1
        return self._captured[kind] >= SETTLED or not self._captured[kind] and self._runs[kind] > WARM_UP


class _Kind(NamedTuple):
    """Of a step: steps of a kind are timed together. ``size``: rows of its graph, or the class of its rows."""

    drafted: bool
    graph: bool
    size: int
