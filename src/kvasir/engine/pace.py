"""Measured steps teach the model of step times; it says how many prompt rows a step may take, and how long a prompt will wait.

On a GPU a step's time is what passes on the device between an event before its launch and one after: with the next step
launched meanwhile, its own kernels and what the host let the device wait for. On a CPU a launch is the step.
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
BACKLOG = 8  # steps that it may take to compute all prompts that wait: where more do, large steps get more of them done
ALIKE_SHARE = 8  # of decode steps that are a replay, or one native call, one in so many is learnt from: there are many, and the host is in a hurry


@dataclass(slots=True)
class Lap:
    """A step being timed: CUDA events, or seconds. ``rows``: with the padding of a graph, whose replay it is if ``graph``."""

    begin: Any
    end: Any
    rows: int = 0
    graph: bool = False
    captures: int = 0  # of graphs: the runner's before the step, then those in it


class StepClock:
    """Times launches of ``runner`` for ``model``."""

    def __init__(self, model: StepTimeModel, runner: Runner) -> None:
        self.model = model
        self._runner = runner
        self._events = runner.device.type == "cuda"
        self._spare: list[Lap] = []
        self._num_alike = 0

    def start(self, spans: list[Span]) -> Lap | None:
        """Before a launch. None: this one is not timed. Decodes that will be replayed soon, and now compile or are captured,
        tell nothing about either kind of step; nor do replays that verify drafts, whose graphs and times are others
        (``draft_times.py``)."""
        graphs, rows, graph = self._runner.graphs, 0, False
        if graphs is not None and graphs.takes(spans):
            if any(span.length > 1 for span in spans):
                return None
            rows, graph = graphs.bucket(len(spans)), True
            self._num_alike += 1
            if self._num_alike % ALIKE_SHARE or not graphs.replays(rows):
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
        """After the launch."""
        lap.captures = self._runner.captures - lap.captures
        if self._events:
            lap.end.record()
        else:
            lap.end = time.perf_counter()

    def learn(self, lap: Lap, spans: list[Span]) -> None:
        """After the step was read: it has ended."""
        if self._events:
            lap.end.synchronize()  # the read waited for the copies just before it
            seconds = lap.begin.elapsed_time(lap.end) * 1e-3
        else:
            seconds = lap.end - lap.begin
        shape = StepShape.of((span.start, span.length) for span in spans)
        if lap.rows > shape.rows:
            shape = StepShape(lap.rows, shape.chunk_pairs, shape.decode_context, shape.sequences)
        if not lap.captures:  # they are done once, and may take longer than the step
            self.model.observe(shape, seconds, graph=lap.graph)
        self._spare.append(lap)

    def _lap(self) -> Lap:
        if not self._events:
            return Lap(0.0, 0.0)
        return Lap(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def errors(self) -> dict[str, float]:
        """Mean relative error of the predictions of late, by kind of step; of kinds that ran."""
        found = {kind: self.model.relative_error(graph=graph) for kind, graph in (("eager", False), ("graph", True))}
        return {kind: error for kind, error in found.items() if error is not None}


class Beside(NamedTuple):
    """Rows of prompts that a step has which others decode in: ``most``, and in a ``short`` one."""

    most: int
    short: int


def mixed_rows(roofline: Roofline) -> Beside:
    """More rows beside decodes make everybody's next token wait, and hardly cost less time a row. Of a mixture's weights those that one row
    reads count: all of them would make steps many times as long."""
    read, row = float(roofline.prior()[0]) * roofline.share_read(1), float(roofline.prior()[1])
    most, short = (max(TILE_ROWS, int(step * read / row) // TILE_ROWS * TILE_ROWS) for step in (MIXED_STEP, SHORT_STEP))
    return Beside(most, short)


class Pace:
    """How many prompt rows a step may take. ``target``: seconds that no running request should have to wait for its next
    token, or None. Every running request has a row in every step, so its wait is the step. ``beside``: rows of prompts in a step that
    others decode in, where there is no target; None: any."""

    def __init__(self, model: StepTimeModel | None, target: float | None, beside: Beside | None = None) -> None:
        assert model is not None or target is None, "to keep a time takes a model of it"
        self.model = model
        self.target = target
        self.beside = None if target is not None else beside

    def most(self, decodes: int, decode_rows: int, rows: int, ahead: int) -> int:
        """Of the ``rows`` that a step may have, those it gets beside ``decode_rows`` of so many ``decodes``, while ``ahead`` of prompts
        are to be computed. Short steps take equal shares: the p99 between tokens is the longest steps but a few."""
        if self.beside is None or not decodes:
            return rows
        most, short = self.beside
        steps = -(-ahead // short)
        if decodes in SEVERAL_DECODES and steps <= SHORT_STEPS:
            most = short if steps < 2 else -(-ahead // (steps * TILE_ROWS)) * TILE_ROWS
        else:
            most = max(most, ahead // BACKLOG)
        return min(rows, most + decode_rows)

    def room(self, step: Step, start: int, claim: int = 0) -> int:
        """Rows that ``step`` has left for a chunk from position ``start``: no more than keep the target, but for those that
        the prompt has a claim to."""
        if self.target is None or not any(seq.num_output for seq in step.spans):
            return step.left  # nobody waits for a next token
        running = StepShape.of((span.start, span.length) for span in step.spans.values())
        return min(step.left, max(claim, self._chunk(running, start, step.left)))

    def _chunk(self, running: StepShape, start: int, most: int) -> int:
        return self.model.chunk_for(step_budget(self.target, ()), running, start, most)

    def first_token(self, running: StepShape, tokens_ahead: int, prompt_tokens: int, max_rows: int) -> float:
        """Seconds until a prompt that arrives now, of which ``prompt_tokens`` must be computed, has its first token, behind
        ``tokens_ahead`` of other prompts, in steps of ``max_rows`` rows. What its pages may have to wait for is not counted."""
        max_rows = self.most(running.sequences, running.rows, max_rows, tokens_ahead + prompt_tokens)
        rows = max(max_rows - running.rows, max_rows // 10, 1)  # a tenth is the oldest prompt's in any case
        if self.target is not None and running.rows:
            rows = max(self._chunk(running, 0, rows), max_rows // 10, 1)
        return self.model.time_to_first_token(tokens_ahead, prompt_tokens, running, running.rows + rows)
