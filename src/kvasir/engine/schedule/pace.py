"""Derive from the model of step times how many prompt rows a step may take and how long a prompt waits."""

from __future__ import annotations

from typing import NamedTuple

from kvasir import tuned
from kvasir.engine.schedule.spans import Step
from kvasir.engine.schedule.step_time import TILE_ROWS, Roofline, StepShape, StepTimeModel, step_budget

# Short steps: see ``kvasir.tuned``, which says what these bound and how they were measured.
MIXED_STEP, SHORT_STEP, SHORT_STEPS = tuned.MIXED_STEP.value, tuned.SHORT_STEP.value, tuned.SHORT_STEPS.value
SEVERAL_DECODES = tuned.SEVERAL_DECODES.value
# Number of steps in which all queued prompt rows should be computed. A longer queue gets larger steps, which compute
# more rows a second.
BACKLOG = 8


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
