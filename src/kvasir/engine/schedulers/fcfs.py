"""First come, first served: order by arrival, the branches of a request in turn."""

from __future__ import annotations

from kvasir.engine.policy import ByArrival


class Fcfs(ByArrival):
    """The default, and what the engine goes on with where another policy fails."""
