"""Time steps to teach the model of step times, and derive from it how many prompt rows a step may take and how long a
prompt waits.

On a GPU a step's time is what passes on the device between an event before its launch and one after it. The next step
is launched meanwhile, so this is the time of the step's own kernels and of waits for the host. On a CPU the launch is
the whole step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvasir import tuned
from kvasir.engine.runner import Runner
from kvasir.engine.spans import ONE_SAMPLE, Step
from kvasir.engine.step_time import TILE_ROWS, Roofline, StepShape, StepTimeModel, step_budget
from kvasir.types import Span

# Short steps: see ``kvasir.tuned``, which says what these bound and how they were measured.
MIXED_STEP, SHORT_STEP, SHORT_STEPS = tuned.MIXED_STEP.value, tuned.SHORT_STEP.value, tuned.SHORT_STEPS.value
SEVERAL_DECODES = tuned.SEVERAL_DECODES.value
# Number of steps in which all queued prompt rows should be computed. A longer queue gets larger steps, which compute
# more rows a second.
BACKLOG = 8
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


class MixedRows(NamedTuple):
    """Bounds on the prompt rows of a step with decodes: ``most`` usually, ``short`` in a short step."""

    most: int
    short: int


def mixed_rows(roofline: Roofline) -> MixedRows:
    """Bounds on the prompt rows of steps with decodes, as multiples of the time to read all weights.

    More prompt rows would delay everybody's next token and hardly cost less time a row. In a mixture of experts only
    the weights that one row reads count: all of them would make steps many times as long.
    """
    read, row = float(roofline.prior()[0]) * roofline.share_read(1), float(roofline.prior()[1])
    most, short = (max(TILE_ROWS, int(step * read / row) // TILE_ROWS * TILE_ROWS) for step in (MIXED_STEP, SHORT_STEP))
    return MixedRows(most, short)


class Pace:
    """Limits the prompt rows of a step.

    ``target``: most seconds that a running request should wait for its next token, or None. Every running request has a
    row in every step, so it waits as long as the step takes. ``mixed``: bounds on the prompt rows of steps with
    decodes, used if there is no target; None: no bound.
    """

    def __init__(self, model: StepTimeModel | None, target: float | None, mixed: MixedRows | None = None) -> None:
        assert model is not None or target is None, "a target needs a model of step times"
        self.model = model
        self.target = target
        self.mixed = None if target is not None else mixed

    def most(self, decodes: int, decode_rows: int, rows: int, ahead: int) -> int:
        """Row budget of a mixed step, given its decodes and the prompt rows still queued.

        ``decodes``: number of decodes; ``decode_rows``: their rows; ``rows``: the row budget of any step; ``ahead``:
        prompt rows still to compute. Short steps take equal shares of ``ahead``, because the longest few steps set the
        p99 inter-token latency.
        """
        if self.mixed is None or not decodes:
            return rows
        most, short = self.mixed
        steps = -(-ahead // short)
        if decodes in SEVERAL_DECODES and steps <= SHORT_STEPS:
            most = short if steps < 2 else -(-ahead // (steps * TILE_ROWS)) * TILE_ROWS
        else:
            most = max(most, ahead // BACKLOG)
        return min(rows, most + decode_rows)

    def room(self, step: Step, start: int, claim: int = 0) -> int:
        """Rows that ``step`` has left for a chunk from position ``start``.

        As many as keep the target, but at least the ``claim`` rows that the prompt may have in any case.
        """
        if self.target is None or not any(seq.num_output for seq in step.spans):
            return step.left  # nobody waits for a next token
        running = StepShape.of((span.start, span.length) for span in step.spans.values())
        return min(step.left, max(claim, self._chunk(running, start, step.left)))

    def _chunk(self, running: StepShape, start: int, most: int) -> int:
        return self.model.chunk_for(step_budget(self.target, ()), running, start, most)

    def first_token(self, running: StepShape, tokens_ahead: int, prompt_tokens: int, max_rows: int) -> float:
        """Predicted seconds until a prompt that arrives now has its first token.

        ``tokens_ahead`` tokens of other prompts are computed before its own ``prompt_tokens``, in steps of at most
        ``max_rows`` rows. Time that it may wait for pages is not counted.
        """
        max_rows = self.most(running.sequences, running.rows, max_rows, tokens_ahead + prompt_tokens)
        rows = max(max_rows - running.rows, max_rows // 10, 1)  # the oldest prompt gets a tenth in any case
        if self.target is not None and running.rows:
            rows = max(self._chunk(running, 0, rows), max_rows // 10, 1)
        return self.model.time_to_first_token(tokens_ahead, prompt_tokens, running, running.rows + rows)
