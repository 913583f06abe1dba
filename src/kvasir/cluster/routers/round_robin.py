"""The replicas in turn, without a look at prompts or load; the baseline of the other routers."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.cluster.router import Candidate, Router
from kvasir.types import Request


class RoundRobin(Router):
    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        chosen = next((c for c in candidates if c.number > self._last), candidates[0])
        self._last = chosen.number
        return chosen
