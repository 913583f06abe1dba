"""Short prompts first, as far as there is a queue, and nobody long after his time.

Where prompts wait for rows, the mean wait is least when the shortest go first; but then the long ones wait for ever,
and where nothing waits there is nothing to win. Here a prompt stands as if it had come later by ``WEIGHT`` x (mean wait
x its length / mean length) of the requests before it. One of mean length lets pass what came within twice the mean wait
behind it, and nothing later; without a queue the order is that of arrival. Ranks are given once. The simulation of
traces that chose the weight: ``tools/simulate_serving.py``.
"""

from __future__ import annotations

from collections import abc, deque

from kvasir.engine.policy import SchedulerPolicy
from kvasir.types import Sequence, Status

WEIGHT = 2.0
LAST = 32  # requests before it that tell how long one waits
RANK = "shortest"  # in a sequence's state


class Shortest(SchedulerPolicy):
    def __init__(self, config: None = None) -> None:
        super().__init__(config)
        self._last: deque[Sequence] = deque(maxlen=LAST)

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        new = [seq for seq in seqs if RANK not in seq.state]
        if new:
            self._give_ranks(new, now)
        return sorted(seqs, key=lambda seq: (seq.state[RANK], seq.request.arrival, seq.branch))

    def _give_ranks(self, seqs: list[Sequence], now: float) -> None:
        """When they would have come, had they come by this order. The branches of a request stand together."""
        waits = sum(
            max(0.0, (now if s.first_scheduled is None else s.first_scheduled) - s.request.arrival) for s in self._last
        )
        behind = WEIGHT * waits / max(1, sum(s.num_prompt for s in self._last))  # seconds a token
        for seq in sorted(seqs, key=lambda seq: seq.branch):
            parent = seq.parent if seq.branch else None
            if parent is not None and RANK in parent.state:
                seq.state[RANK] = parent.state[RANK]
            else:
                seq.state[RANK] = seq.request.arrival + behind * seq.num_prompt
                if seq.status is not Status.FINISHED:
                    self._last.append(seq)
