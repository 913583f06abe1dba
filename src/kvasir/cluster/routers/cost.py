"""The replica with the least predicted cost: seconds to the first token, and what its decodes lose meanwhile.

A request's cost at a replica is (queued + own) / rate + 0.1 * decodes * own / rate. ``queued`` prompt tokens are
computed before its ``own`` uncached ones, at the replica's measured ``rate``; every running decode waits while the own
ones are computed. A cached prefix, a queue and a slow device are so weighed in one unit, seconds, without thresholds.

A decode's wait counts a tenth. Counted in full it draws requests to the replica with the longest queue: what waits
there does not decode yet, so its decodes are the fewest, and near the limit the queue only grows.

The choice is among two candidates at random and the one with the longest cached prefix. Two at random are enough to
spread load (Mitzenmacher 2001), and keep several fronts with reports of the same age from choosing the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvasir.cluster.router import Candidate, Router
from kvasir.types import Request

TRIES = 2  # candidates that are drawn at random
# A second that a decode waits, in seconds to the first token. Simulated on Mooncake's trace with 0, 0.02, 0.1 and 1.
DECODE_WAIT = 0.1


class Cost(Router):
    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random()

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        drawn = self._random.sample(candidates, min(TRIES, len(candidates)))
        nearest = max(candidates, key=lambda c: c.cached)
        return min([*drawn, nearest], key=lambda c: seconds(request, c))


def seconds(request: Request, candidate: Candidate) -> float:
    """Predicted cost of ``request`` at a candidate, in seconds."""
    own = max(1, len(request.prompt_ids) - candidate.cached)
    return (candidate.queued + own + DECODE_WAIT * candidate.decodes * own) / candidate.rate
