"""The router seam: which replica gets a request.

A router only chooses. The front holds the requests, knows which replicas can take one, and repairs what dies; so a
router may be wrong without harm, and a request's tokens do not depend on its choice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvasir.logs import log
from kvasir.technique import Technique
from kvasir.types import Request

ROUTERS = "kvasir.cluster.routers"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can take a request now.

    ``queued``: prompt tokens that it has to compute before those of a new request; what was sent to it since its latest
    report is counted in. ``rate``: prompt tokens that it computes in a second. ``decodes``: sequences that wait for
    their next token. ``cached``: tokens of this request's prompt that it should have in its prefix cache.
    """

    number: int
    queued: int
    rate: float
    decodes: int
    cached: int


class Router(Technique):
    """Chooses a replica for a request."""

    exact: ClassVar[bool] = True
    affects_kv: ClassVar[bool | None] = False

    @abstractmethod
    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        """Return one of ``candidates``; there is at least one."""
        raise NotImplementedError


class Guarded(Router):
    """Guards the front against faults of a router. One that raises, or answers with something else than a candidate,
    is switched off until a restart, and requests go where the fewest prompt tokens are queued."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router: Router | None = router

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        if self._router is not None:
            try:
                chosen = self._router.choose(request, candidates)
                if chosen in candidates:
                    return chosen
                raise ValueError(f"it must return one of the {len(candidates)} candidates, not {chosen!r}")
            except Exception:
                log.exception(
                    "router '%s' failed and is off until a restart. Repair its choose, or choose another --router",
                    self._router.name,
                )
                self._router = None
        return min(candidates, key=lambda c: (c.queued, c.decodes))
