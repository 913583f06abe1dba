"""Draft budgets that minimise the makespan of a batch: the formula of DAS (arXiv 2511.13841, section 4).

A batch of N forwards and P drafted tokens takes t = c_base N + c_tok P. A sequence with l tokens to come and p drafted
ones gets A(p) = k l (1 - exp(-alpha p / l)) of them accepted. To end within N forwards it needs

    p(N) = -(l / alpha) ln(1 - (1 - N / l) / k)        and nothing where l <= N

The best N is common to all: sum over l > N of 1 / (alpha (k - 1 + N / l)) = c_base / c_tok. (Notes on the paper
multiply by k in p(N); only the division solves A(p) = l - N.) Long sequences get large budgets, and short ones none.

Lengths are predicted as for the three classes (`kvasir.speculation.lengths`). alpha and k follow from the shares of
right drafts by depth, and the costs from measured step times.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvasir.speculation.drafter import StepSeconds
from kvasir.speculation.lengths import Lengths
from kvasir.types import Sequence

PRIOR, PRIOR_WEIGHT = 0.5, 4.0  # share of right drafts of a depth before it was tried, and the tries it counts for
DEPTHS = 8  # depths that the curve of accepted tokens is fitted to
ROUNDS = 60  # halvings of an interval: more than fp64 resolves


def forwards(lengths: np.ndarray, alpha: float, k: float, ratio: float) -> float:
    """Return the best number of forwards N for sequences with ``lengths`` [n] tokens to come. ``ratio``: c_base over
    c_tok."""
    longest = float(lengths.max())
    low, high = longest * max(0.0, 1.0 - k), longest  # fewer would need more accepted tokens than there can be
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        left = k - 1.0 + middle / lengths[lengths > middle]
        gain = (1.0 / np.maximum(alpha * left, 1e-300)).sum() if (left > 0).all() else np.inf
        low, high = (middle, high) if gain > ratio else (low, middle)
    return high


def drafted(lengths: np.ndarray, alpha: float, k: float, count: float) -> np.ndarray:
    """Return p [n]: the tokens that each sequence has to draft to end within ``count`` forwards."""
    missing = np.maximum(0.0, 1.0 - count / lengths) / k
    return -(lengths / alpha) * np.log1p(-np.minimum(missing, 1.0 - 1e-12))


def curve(by_depth: Many[Many[int]]) -> tuple[float, float]:
    """Return alpha and k of A(p), through what one draft a forward and the most drafts a forward give. ``by_depth``:
    [tried, right] drafts."""
    reach, tokens, points = 1.0, 0.0, []
    for depth in range(DEPTHS):
        tried, right = by_depth[depth] if depth < len(by_depth) else (0, 0)
        reach *= (right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
        tokens += reach
        # A text of 1 takes 1 / (1 + tokens) forwards, each with depth + 1 drafts.
        points.append(((depth + 1) / (1.0 + tokens), tokens / (1.0 + tokens)))
    (x, y), (far_x, far_y) = points[0], points[-1]
    low, high = 1e-3, 1e3
    for _ in range(ROUNDS):
        alpha = (low * high) ** 0.5
        share = np.expm1(-alpha * x) / np.expm1(-alpha * far_x)
        low, high = (alpha, high) if share < y / far_y else (low, alpha)
    return high, far_y / float(-np.expm1(-high * far_x))


class Optimal(Lengths):
    """Budgets by the formula, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[Sequence, int] = {}

    def plan(
        self,
        seqs: Many[Sequence],
        by_depth: Many[Many[int]],
        seconds: StepSeconds,
    ) -> None:
        self._nodes = {}
        if not seqs or not self.known:
            return
        left = np.array([self.left(seq) for seq in seqs], np.float64)
        context, count = sum(len(seq.tokens) for seq in seqs), len(seqs)
        base = seconds(count, context, 0, True)
        token = max(1e-9 * base, (seconds(count, context, 4 * count, True) - base) / (4 * count))
        alpha, k = curve(by_depth)
        steps = forwards(left, alpha, k, base / token)
        for seq, tokens in zip(seqs, drafted(left, alpha, k, steps)):
            self._nodes[seq] = round(tokens / steps)

    def budget(self, seq: Sequence, most: int) -> int:
        return min(most, self._nodes.get(seq, most))
