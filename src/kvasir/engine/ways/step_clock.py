"""Time steps to teach the model of step times.

On a GPU a step's time is what passes on the device between an event before its launch and one after it. The next step
is launched meanwhile, so this is the time of the step's own kernels and of waits for the host. On a CPU the launch is
the whole step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.engine.schedule.spans import ONE_SAMPLE
from kvasir.engine.schedule.step_time import StepShape, StepTimeModel
from kvasir.engine.ways.runner import Runner
from kvasir.types import Span

# One in so many decode steps that are a replay or one native call is timed: there are many of them, and the host is
# busy.
ALIKE_SHARE = 8


@dataclass(slots=True)
class Lap:
    """A step that is being timed. ``begin`` and ``end`` are CUDA events, or seconds on a CPU.

    ``graph``: whether the step replays a graph. ``rows``: then its rows, padding included. ``captures``: the runner's
    count of captured graphs before the step, replaced by those captured in it.
    """

    begin: Any
    end: Any
    rows: int = 0
    graph: bool = False
    captures: int = 0


class StepClock:
    """Times launches of ``runner`` for ``model``."""

    def __init__(self, model: StepTimeModel, runner: Runner) -> None:
        self.model = model
        self._runner = runner
        self._events = runner.device.type == "cuda"
        self._spare: list[Lap] = []
        self._num_alike = 0

    def start(self, spans: list[Span]) -> Lap | None:
        """Start to time a step before its launch; None: this step is not timed.

        Decodes that are compiled or captured now and replayed later tell nothing about either kind of step. Replays
        that verify drafts or chains have graphs and times of their own (``draft_times.py``, ``chain_times.py``).
        """
        graphs, rows, graph = self._runner.graphs, 0, False
        if graphs is not None and graphs.takes(spans):
            if any(span.length > 1 for span in spans):
                return None
            rows, graph = graphs.bucket(len(spans)), True
            self._num_alike += 1
            if self._num_alike % ALIKE_SHARE or not graphs.replays(rows):
                return None
        elif self._runner.chains is not None and self._runner.chains.takes(spans):
            return None
        elif self._runner.native is not None and all(span.want is ONE_SAMPLE for span in spans):
            self._num_alike += 1
            if self._num_alike > 2 * ALIKE_SHARE and self._num_alike % ALIKE_SHARE:
                return None
        lap = self._spare.pop() if self._spare else self._lap()
        lap.rows, lap.graph, lap.captures = rows, graph, self._runner.captures
        if self._events:
            lap.begin.record()
        else:
            lap.begin = time.perf_counter()
        return lap

    def stop(self, lap: Lap) -> None:
        """Take the end time after the launch."""
        lap.captures = self._runner.captures - lap.captures
        if self._events:
            lap.end.record()
        else:
            lap.end = time.perf_counter()

    def learn(self, lap: Lap, spans: list[Span]) -> None:
        """Teach the model the step's time, once the step has been read and so has ended."""
        if self._events:
            lap.end.synchronize()  # reading the step waited for the copies before it only
            seconds = lap.begin.elapsed_time(lap.end) * 1e-3
        else:
            seconds = lap.end - lap.begin
        shape = StepShape.of((span.start, span.length) for span in spans)
        if lap.rows > shape.rows:
            shape = StepShape(lap.rows, shape.chunk_pairs, shape.decode_context, shape.sequences)
        if not lap.captures:  # a capture happens once and may take longer than the step
            self.model.observe(shape, seconds, graph=lap.graph)
        self._spare.append(lap)

    def _lap(self) -> Lap:
        if not self._events:
            return Lap(0.0, 0.0)
        return Lap(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def errors(self) -> dict[str, float]:
        """Recent mean relative error of the predictions, by kind of step, for the kinds that ran."""
        found = {kind: self.model.relative_error(graph=graph) for kind, graph in (("eager", False), ("graph", True))}
        return {kind: error for kind, error in found.items() if error is not None}
