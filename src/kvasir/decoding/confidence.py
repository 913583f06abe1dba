"""Confidence of a text, from the model's confidence in every token. Needs no torch, since front ends use it, too.

The confidence of a token is the mean negative log-probability of the k most likely tokens (Fu et al. 2025, "Deep Think
with Confidence", eq. 2); it is large where the distribution is peaked. The confidence of a text is the mean over its
tokens, or the lowest mean of a window of tokens (lowest group confidence, eq. 5), which a single weak passage pulls
down.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub


def summed_up(confidences: Sequence[float], window: int = 0) -> tuple[float | None, float | None]:
    """Return the mean, and the lowest mean of ``window`` successive tokens. A text shorter than the window is one
    window.

    None stands for an empty text, or for no window."""
    count = len(confidences)
    if not count:
        return None, None
    sums = [0.0, *accumulate(confidences)]
    mean = sums[-1] / count
    if not window:
        return mean, None
    width = min(window, count)
    return mean, min(map(sub, sums[width:], sums)) / width
