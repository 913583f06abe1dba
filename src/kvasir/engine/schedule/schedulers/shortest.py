"""Short prompts first while there is a queue, with a bound on how long a long prompt waits.

Where prompts wait for rows, the mean wait is shortest when the shortest prompts go first, but then long ones may wait
for ever. Here a prompt is ranked as if it had arrived later, by ``WEIGHT`` x mean wait x its length / mean length, with
means over the requests before it. A prompt of mean length thus lets pass those that arrive within ``WEIGHT`` mean waits
after it, and no later ones. Without a queue the mean wait is 0 and the order is that of arrival. A rank is given once.
``kvasir_lab/studies/simulate_serving.py`` is the simulation of traces that chose the weight.
"""

from __future__ import annotations

from collections import abc, deque

from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.types import Sequence, Status

WEIGHT = 2.0  # mean waits by which a prompt of mean length is set back
LAST = 32  # number of latest requests that the mean wait and length are taken over
RANK = "shortest"  # key of the rank in a sequence's state


class Shortest(SchedulerPolicy):
    """Orders requests by arrival, set back by the length of their prompts."""

    def __init__(self, config: None = None) -> None:
        super().__init__(config)
        self._last: deque[Sequence] = deque(maxlen=LAST)

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        new = [seq for seq in seqs if RANK not in seq.state]
        if new:
            self._give_ranks(new, now)
        return sorted(seqs, key=lambda seq: (seq.state[RANK], seq.request.arrival, seq.branch))

    def _give_ranks(self, seqs: list[Sequence], now: float) -> None:
        """Give each sequence its rank, an arrival time set back by its length. Branches of a request share one."""
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
