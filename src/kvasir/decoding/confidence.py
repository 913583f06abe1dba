"""How sure a model was of a text, from its confidence in every token. Needs no torch: front ends use it as well.

Confidence of a token: the mean negative log-probability of the k likeliest (Fu et al. 2025, "Deep Think with Confidence", eq. 2), large
where the distribution is peaked. Of a text: the mean over its tokens, or the lowest mean of a window of them (their lowest
group confidence, eq. 5), which a single weak passage pulls down.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub


def summed_up(confidences: Sequence[float], window: int = 0) -> tuple[float | None, float | None]:
    """(mean, lowest mean of ``window`` successive tokens); a text shorter than the window is one. None: nothing to sum up, or no
    window."""
    count = len(confidences)
    if not count:
        return None, None
    sums = [0.0, *accumulate(confidences)]
    mean = sums[-1] / count
    if not window:
        return mean, None
    width = min(window, count)
    return mean, min(map(sub, sums[width:], sums)) / width
