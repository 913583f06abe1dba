"""The router seam: which replica gets a request.

A router only chooses. The front holds the requests, knows which replicas can take one, and repairs what dies; so a
router may be wrong without harm, and a request's tokens do not depend on its choice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
