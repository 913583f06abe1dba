"""Draft budgets that minimise the makespan of a batch: the formula of DAS (arXiv 2511.13841, section 4).

A batch of N forwards and P drafted tokens takes t = c_base N + c_tok P. A sequence with l tokens to come and p drafted
ones gets A(p) = k l (1 - exp(-alpha p / l)) of them accepted. To end within N forwards it needs

    p(N) = -(l / alpha) ln(1 - (1 - N / l) / k)        and nothing where l <= N

The best N is common to all: sum over l > N of 1 / (alpha (k - 1 + N / l)) = c_base / c_tok. (Notes on the paper
multiply by k in p(N); only the division solves A(p) = l - N.) Long sequences get large budgets, and short ones none.

Lengths are predicted as for the three classes (`kvasir.speculation.lengths`), and the costs follow from measured step
times. alpha and k, like the lengths, are those of the problem: they follow from the shares of right drafts by depth
among the recent drafts for its prompt. A(p) holds for the drafts that a forward can verify, so N is never so small that
a sequence would need more.

Legend: n sequences.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence as Many

import numpy as np

from kvasir.speculation.drafter import StepSeconds
from kvasir.speculation.lengths import MAX_PROMPTS, Lengths
from kvasir.types import Sequence

PRIOR, PRIOR_WEIGHT = 0.5, 4.0  # share of right drafts of a depth before it was tried, and the tries it counts for
DEPTHS = 8  # depths that the curve of accepted tokens is fitted to, and the most drafts of a sequence in a forward
FORGETTING = 0.95  # factor on what the earlier drafts for a prompt showed, at each verified draft
FADING = 0.5  # the same at the end of each sequence of the prompt, so that nobody is judged for good by a bad start
ROUNDS = 24  # halvings of an interval, to a ten-millionth: every step takes them, and budgets are whole tokens


def forwards(lengths: np.ndarray, alpha: np.ndarray, k: np.ndarray, ratio: float, most: float = np.inf) -> float:
    """Return the best number of forwards N for sequences with ``lengths`` [n] tokens to come and the curves ``alpha``
    and ``k`` [n]. ``ratio``: c_base over c_tok; ``most``: drafts that a sequence can have in one forward."""
    low, high = float((lengths * np.maximum(0.0, 1.0 - k)).max()), float(lengths.max())
    for _ in range(ROUNDS):  # below ``low``, more accepted tokens would be needed than there can be
        middle = (low + high) / 2
        late = lengths > middle
        left = k[late] - 1.0 + middle / lengths[late]
        if (drafted(lengths, alpha, k, middle) > most * middle).any() or (left <= 0).any():
            low = middle
            continue
        gain = (1.0 / np.maximum(alpha[late] * left, 1e-300)).sum()
        low, high = (middle, high) if gain > ratio else (low, middle)
    return high


def drafted(lengths: np.ndarray, alpha: np.ndarray, k: np.ndarray, count: float) -> np.ndarray:
    """Return p [n]: the tokens that each sequence has to draft to end within ``count`` forwards."""
    missing = np.maximum(0.0, 1.0 - count / lengths) / k
    return -(lengths / alpha) * np.log1p(-np.minimum(missing, 1.0 - 1e-12))


def curve(by_depth: np.ndarray) -> tuple[float, float]:
    """Return alpha and k of A(p), through what one draft a forward and the most drafts a forward give. ``by_depth``
    [depths, 2]: tried and right drafts."""
    tried, right = by_depth.T
    reach = np.cumprod((right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT))
    tokens = np.cumsum(reach)
    # A text of 1 takes 1 / (1 + tokens) forwards, each with as many drafts as the depth.
    x, y = 1.0 / (1.0 + tokens[0]), tokens[0] / (1.0 + tokens[0])
    far_x, far_y = DEPTHS / (1.0 + tokens[-1]), tokens[-1] / (1.0 + tokens[-1])
    low, high = 1e-3, 1e3
    for _ in range(ROUNDS):
        alpha = (low * high) ** 0.5
        share = math.expm1(-alpha * x) / math.expm1(-alpha * far_x)
        low, high = (alpha, high) if share < y / far_y else (low, alpha)
    return high, far_y / -math.expm1(-high * far_x)


class Optimal(Lengths):
    """Budgets by the formula, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[Sequence, int] = {}
        # [tried, right] drafts by depth of late: of each prompt (the one seen last at the end), and of all.
        self._right: OrderedDict[int, np.ndarray] = OrderedDict()
        self._right_of_all = np.zeros((DEPTHS, 2))
        self._curves: dict[int, tuple[float, float]] = {}

    def ended(self, seq: Sequence) -> None:
        super().ended(seq)
        key = self._key(seq)
        if key in self._right:  # a drafter that copies now has one more text to copy from
            self._right[key] *= FADING
            self._curves.pop(key, None)

    def verified(self, seq: Sequence, drafts: int, accepted: int) -> None:
        key = self._key(seq)
        if key not in self._right:
            self._right[key] = self._right_of_all * (PRIOR_WEIGHT / max(PRIOR_WEIGHT, self._right_of_all[0, 0]))
            if len(self._right) > MAX_PROMPTS:
                self._curves.pop(self._right.popitem(last=False)[0], None)
        self._right.move_to_end(key)
        self._curves.pop(key, None)
        for counts in (self._right[key], self._right_of_all):
            counts *= FORGETTING
            counts[: min(drafts, accepted + 1), 0] += 1.0
            counts[:accepted, 1] += 1.0

    def plan(self, seqs: Many[Sequence], seconds: StepSeconds) -> None:
        self._nodes = {}
        if not seqs or not self.known:
            return
        left = np.array([self.left(seq) for seq in seqs], np.float64)
        context, count = sum(len(seq.tokens) for seq in seqs), len(seqs)
        base = seconds(count, context, 0, True)
        token = max(1e-9 * base, (seconds(count, context, 4 * count, True) - base) / (4 * count))
        alpha, k = np.array([self._curve(self._key(seq)) for seq in seqs]).T
        steps = forwards(left, alpha, k, base / token, DEPTHS)
        for seq, tokens in zip(seqs, drafted(left, alpha, k, steps)):
            self._nodes[seq] = round(tokens / steps)

    def budget(self, seq: Sequence, most: int) -> int:
        return min(most, self._nodes.get(seq, most))

    def _curve(self, key: int) -> tuple[float, float]:
        found = self._curves.get(key)
        if found is None:
            found = self._curves[key] = curve(self._right.get(key, self._right_of_all))
        return found
