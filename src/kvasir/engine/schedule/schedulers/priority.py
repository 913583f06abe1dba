"""Order by ``Request.priority`` (lower first), then by arrival. A far more urgent request displaces a running one."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.errors import ConfigError
from kvasir.types import Sequence, Status


@dataclass(frozen=True)
class Config:
    """``threshold``: by how much a waiting request's priority must be below that of the running one it displaces."""

    threshold: int = 10


class Priority(SchedulerPolicy):
    """Orders requests by their priority."""

    priorities = True
    urgent = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.config.threshold < 1:
            raise ConfigError(
                f"priority:threshold={self.config.threshold} must be at least 1, or equals would displace each other"
            )

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.request.priority, seq.request.arrival, seq.branch))

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        if not running or incoming.status is Status.RUNNING:
            return super().victim(running, incoming)
        urgency = running[-1].request.priority - incoming.request.priority
        return running[-1] if urgency >= self.config.threshold else None
