"""The replica with the longest cached prefix of the prompt; among equals, the one with the fewest queued tokens.

It looks at load only to break ties, so a hot prefix stays on one replica however long its queue gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.cluster.router import Candidate, Router
from kvasir.types import Request


class Affinity(Router):
    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (-c.cached, c.queued, c.decodes))
