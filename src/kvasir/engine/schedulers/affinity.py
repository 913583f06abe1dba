"""Order by problem: requests of one ``Request.affinity`` stand together, where the first of them came, so that they
find the prompt they share while it is still in the cache, and a problem that was begun is ended before the next one
takes its pages. Others by arrival.

Ordinary requests on the same engine are passed by calls of older problems; ageing bounds for how long (``policy.py``).
"""

from __future__ import annotations

from collections import OrderedDict, abc

from kvasir.engine.policy import SchedulerPolicy
from kvasir.types import Sequence

MAX_KNOWN = 4096  # problems whose first arrival is remembered, the last used ones


class Affinity(SchedulerPolicy):
    def __init__(self, config: None = None) -> None:
        super().__init__(config)
        self._first: OrderedDict[tuple[str, str], float] = OrderedDict()  # by tenant and affinity

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (self._rank(seq), seq.request.arrival, seq.branch))

    def _rank(self, seq: Sequence) -> float:
        """When its problem came. Found once for every sequence, so that the order of two never changes."""
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
