"""First come, first served: by arrival, the branches of a request in turn."""

from __future__ import annotations

from collections import abc

from kvasir.engine.policy import SchedulerPolicy
from kvasir.types import Sequence


class Fcfs(SchedulerPolicy):
    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.request.arrival, seq.branch))
