"""First come, first served; branches of a request go in the order of their numbers."""

from __future__ import annotations

from kvasir.engine.schedule.policy import ByArrival


class Fcfs(ByArrival):
    """The default policy. The engine also falls back to this order when another policy fails."""
