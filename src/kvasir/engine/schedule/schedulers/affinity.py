"""Keep requests with one ``Request.affinity`` (calls of one problem) together in the queue, where the first of them
stood.

They then find their shared prompt while it is still in the cache, and a problem is finished before the next one takes
its pages. Requests without an affinity go by arrival. Calls of older problems pass them; ageing bounds for how long
(``policy.py``).
"""

from __future__ import annotations

from collections import OrderedDict, abc

from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.types import Sequence

MAX_KNOWN = 4096  # problems whose first arrival is remembered; the least recently used are forgotten


class Affinity(SchedulerPolicy):
    """Orders requests by the first arrival of their problem."""

    def __init__(self, config: None = None) -> None:
        super().__init__(config)
        self._first: OrderedDict[tuple[str, str], float] = OrderedDict()  # by tenant and affinity

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (self._rank(seq), seq.request.arrival, seq.branch))

    def _rank(self, seq: Sequence) -> float:
        """First arrival of the sequence's problem. It is computed once a sequence, so that the order of two never
        changes."""
        rank = seq.state.get("affinity")
        if rank is None:
            request = seq.request
            rank = request.arrival
            if request.affinity:
                name = request.tenant, request.affinity
                rank = self._first.setdefault(name, rank)
                self._first.move_to_end(name)
                if len(self._first) > MAX_KNOWN:
                    self._first.popitem(last=False)
            seq.state["affinity"] = rank
        return rank
