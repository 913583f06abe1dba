"""Predict how long a step takes, as learnt while serving, and from it the largest chunk within a time and the wait for
a first token.

T = c0 + c1 rows + c2 sum over chunks of q (context + q / 2) + c3 sum over decode rows of context + c4 sequences

c0 is the launch and the read of the weights (in a mixture of experts, of the experts that the rows choose), c1 the
matmuls, c2 and c3 attention by arithmetic and by bytes, c4 the work that is done once a sequence. Steps replayed from
CUDA graphs have coefficients of their own.

The fit is recursive least squares with forgetting. It starts from a roofline and minimises *relative* errors, so a step
of 0.3 ms counts as much as one of 300 ms. It bounds the effect of a single outlier and keeps every coefficient at or
above zero. Times are in seconds. It is pure numpy; one update costs some 20 us.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FORGETTING = 0.999  # factor on the weight of past steps, once a step; the weight halves in about 700 steps
PRIOR_TRUST = 0.05  # noise of a measurement relative to the uncertainty of the roofline
SAME = 0.05  # share of a term's variance that is left once another kind of step has shown what the term costs
OUTLIER = 5.0  # mean deviations from which on an error is cut off
ERROR_DECAY = 0.98  # decay of the running means of errors, once a step: they cover about the last 50 steps
SLACK_SHARE = 0.9  # share of the time left that a step is planned to take
TILE_ROWS = 128  # rows of a tile in matmul kernels; a few rows more cost a whole tile more


@dataclass(frozen=True, slots=True)
class StepShape:
    """The numbers that a step's time depends on. ``rows``: rows that are computed, padding of a graph included."""

    rows: int = 0
    # Number of keys that all queries look at: sum of q * (context + q / 2) over spans of more than one row.
    chunk_pairs: float = 0.0
    decode_context: int = 0  # sum of context over spans of one row
    sequences: int = 0

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> StepShape:
        """The shape of a step with spans of (start, length)."""
        rows = context = count = 0
        pairs = 0.0
        for start, length in spans:
            rows += length
            count += 1
            if length > 1:
                pairs += length * (start + length / 2)
            else:
                context += start
        return cls(rows, pairs, context, count)

    def plus(self, start: int, length: int) -> StepShape:
        """The shape with one more span of ``length`` rows from position ``start``."""
        chunk = length > 1
        return StepShape(
            self.rows + length,
            self.chunk_pairs + (length * (start + length / 2) if chunk else 0),
            self.decode_context + (0 if chunk else start),
            self.sequences + 1,
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Limits that the device and the model set on the time of a step."""

    bandwidth: float  # bytes a second
    flops: float  # FLOP a second
    weight_bytes: float  # bytes that a step of many rows reads
    row_flops: float  # 2 x active parameters
    pair_flops: float  # 4 x heads x head dim x layers
    kv_bytes: float  # bytes of one token in all layers
    routed: tuple[tuple[float, float], ...] = ()  # (share of experts that one row does not use, bytes of all experts)

    def share_read(self, rows: int) -> float:
        """Expected share of the weights that ``rows`` rows read, if they choose experts evenly."""
        return 1.0 - sum(size * alone**rows for alone, size in self.routed) / self.weight_bytes

    def vector(self, shape: StepShape) -> np.ndarray:
        """The factors of the coefficients c0 to c4."""
        return np.array(
            [self.share_read(shape.rows), shape.rows, shape.chunk_pairs, shape.decode_context, shape.sequences]
        )

    def prior(self) -> np.ndarray:
        """Coefficients of a good engine: 0.8 and 0.7 of the bandwidth, and 0.6 of the arithmetic."""
        return np.array(
            [
                self.weight_bytes / (0.8 * self.bandwidth),
                self.row_flops / (0.6 * self.flops),
                self.pair_flops / (0.6 * self.flops),
                self.kv_bytes / (0.7 * self.bandwidth),
                1e-6,
            ]
        )

    def bound(self, shape: StepShape) -> float:
        """Lower bound on the seconds of a step."""
        moved = (self.weight_bytes * self.share_read(1) + self.kv_bytes * shape.decode_context) / self.bandwidth
        return max(moved, (self.row_flops * shape.rows + self.pair_flops * shape.chunk_pairs) / self.flops)


class _Fit:
    """Recursive least squares on relative errors. ``factors`` multiply the prior's coefficients."""

    def __init__(self, prior: np.ndarray) -> None:
        self.prior = prior
        self.factors = np.ones(len(prior))
        self._most = 1.0 / PRIOR_TRUST**2
        self._covariance = self._most * np.eye(len(prior))
        self._deviation = 0.5
        self.relative_error: float | None = None

    def start_from(self, factors: np.ndarray) -> None:
        self.factors = factors.copy()
        self._covariance = self._most * np.diag([1.0, SAME, SAME, SAME, 1.0])

    @property
    def coefficients(self) -> np.ndarray:
        return self.prior * self.factors

    def observe(self, x: np.ndarray, seconds: float) -> None:
        # The share of the measured time that each term explains; the shares should add up to 1.
        z = x * self.prior / seconds
        residual = 1.0 - float(z @ self.factors)
        error = abs(residual)
        self.relative_error = (
            error if self.relative_error is None else ERROR_DECAY * self.relative_error + (1 - ERROR_DECAY) * error
        )
        bound = OUTLIER * self._deviation
        # A lasting change widens the bound step by step; a single outlier does not.
        self._deviation = max(ERROR_DECAY * self._deviation + (1 - ERROR_DECAY) * 1.25 * min(error, bound), 1e-4)
        spread = self._covariance @ z
        gain = spread / (FORGETTING + float(z @ spread))
        freely = self.factors + gain * max(-bound, min(bound, residual))
        factors = np.maximum(freely, 0.0)
        # Cutting a factor off at zero raises the prediction of this very step; scale the others so that it stays the
        # same.
        self.factors = factors * (float(z @ freely) / max(float(z @ factors), 1e-30))
        covariance = (self._covariance - np.outer(gain, spread)) / FORGETTING
        # Without steps that tell about a term, forgetting would raise its variance without end; bound it by that of the
        # start.
        scale = np.minimum(1.0, np.sqrt(self._most / np.maximum(np.diag(covariance), 1e-30)))
        self._covariance = (covariance + covariance.T) / 2 * np.outer(scale, scale)


class StepTimeModel:
    """Predicts step times: from a roofline at first, soon from measurements."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self._fits = {graph: _Fit(roofline.prior()) for graph in (False, True)}

    @classmethod
    def fitted(cls, roofline: Roofline, *, decodes: Iterable[float], prompts: Iterable[float]) -> StepTimeModel:
        """The model with coefficients c0 to c4 that were fitted before, in seconds: those of steps of decodes alone,
        which are replayed from graphs, and those of steps with prompts."""
        model = cls(roofline)
        for graph, terms in ((True, decodes), (False, prompts)):
            model._fits[graph].start_from(np.array(list(terms)) / roofline.prior())
        return model

    def observe(self, shape: StepShape, seconds: float, *, graph: bool = False) -> None:
        """Learn that a step of this shape took ``seconds`` on the device."""
        if seconds > 0.0 and math.isfinite(seconds):
            self._fits[graph].observe(self.roofline.vector(shape), seconds)

    def start_from(self, known: StepTimeModel, *, graph: bool, other: bool) -> None:
        """Start the fit of ``graph`` from what ``known`` has learnt about steps of ``other``, before the first
        observation.

        The two kinds are expected to differ in the launch and in the work once a sequence, rather than in the cost of a
        row or a key.
        """
        self._fits[graph].start_from(known._fits[other].factors)

    def predict(self, shape: StepShape, *, graph: bool = False) -> float:
        return max(float(self.roofline.vector(shape) @ self._fits[graph].coefficients), self.roofline.bound(shape))

    def coefficients(self, *, graph: bool = False) -> np.ndarray:
        """The coefficients c0 to c4 as learnt, in seconds."""
        return self._fits[graph].coefficients

    def relative_error(self, *, graph: bool = False) -> float | None:
        """Mean of |predicted - measured| / measured over about the last 50 steps. Each is predicted before it is
        learnt."""
        return self._fits[graph].relative_error

    def chunk_for(self, budget: float, running: StepShape, start: int, most: int) -> int:
        """Rows of the largest chunk from position ``start`` that may join ``running`` within ``budget`` seconds, at
        most ``most``; 0: none may. If more rows of the prompt remain, the step's rows are rounded down to a whole tile.
        """
        if most < 1 or self.predict(running.plus(start, 1)) > budget:
            return 0
        low, high = 1, most + 1  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.predict(running.plus(start, middle)) <= budget else (low, middle)
        if low == most:
            return low
        whole = (running.rows + low) // TILE_ROWS * TILE_ROWS - running.rows
        return whole if whole > 0 else low

    def time_to_first_token(self, tokens_ahead: int, prompt_tokens: int, running: StepShape, step_rows: int) -> float:
        """Predicted seconds until a prompt that arrives now has its first token.

        ``tokens_ahead`` uncached prompt tokens are computed before its own ``prompt_tokens``, in steps of ``step_rows``
        rows that also carry the decode rows of ``running``.
        """
        chunk = max(1, step_rows - running.rows)
        whole, rest = divmod(max(0, tokens_ahead), chunk)
        # Only the number of tokens ahead is known, so their chunks count as chunks without context.
        seconds = whole * self.predict(running.plus(0, chunk)) + (self.predict(running.plus(0, rest)) if rest else 0.0)
        for start in range(0, max(1, prompt_tokens), chunk):
            seconds += self.predict(running.plus(start, min(chunk, max(1, prompt_tokens) - start)))
        return seconds


def step_budget(limit: float, waited: Iterable[float]) -> float:
    """Seconds that the next step may take so that no running request waits more than ``limit`` between tokens.
    ``waited``: seconds since the last token of each."""
    return SLACK_SHARE * max(0.0, limit - max(waited, default=0.0))


def retry_after(predicted: float, deadline: float) -> int | None:
    """Whole seconds (1 or more) for the ``Retry-After`` of a 429; None: the ``predicted`` time to the first token is
    within ``deadline``, so the request is admitted."""
    return None if predicted <= deadline else max(1, math.ceil(predicted - deadline))
