"""Share the engine equally between API keys, whatever each of them asks for.

Every key has a counter of the work done for it: ``PROMPT`` a computed prompt token and ``OUTPUT`` a generated one. The
key with the lowest counter goes first, so many requests or long answers of one key delay that key alone (Sheng et al.
2024, "Fairness in Serving Large Language Models": virtual token counters). A key that comes back after a pause starts
at the lowest counter of the busy keys, since unused time is no credit.

Answers hold their seats for long, so a key that waits with a counter far below also takes the seat of a running answer.
Requests without a key, or with a single key, are all of one caller and go by arrival.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass

from kvasir.engine.schedule.policy import SchedulerPolicy
from kvasir.errors import ConfigError
from kvasir.types import Sequence, Span, Status

PROMPT, OUTPUT = 1.0, 2.0  # work of a token, as in the paper: a generated token costs about twice a prompt's
COMPUTED = "fair"  # key of the number of prompt tokens charged so far, in a sequence's state


@dataclass(frozen=True)
class Config:
    """``displace``: by how much work (2 a generated token) the counter of a waiting request's key must be below that of
    the running request it displaces; 0: never."""

    displace: int = 4096


class Fair(SchedulerPolicy):
    """Orders requests by the work done for their key."""

    static = False
    urgent = True  # a key with much in the cache must not overtake the one for which least was done

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.config.displace < 0:
            raise ConfigError(f"fair:displace={self.config.displace} must be 0 (never displace) or more")
        self.work: dict[str, float] = {}  # by tenant
        self._met: dict[str, deque[Sequence]] = {}  # by tenant, without those that have ended at either end

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        for seq in seqs:
            if COMPUTED not in seq.state and seq.status is not Status.FINISHED:
                self._meet(seq)
        return sorted(seqs, key=lambda seq: (self._work(seq), seq.request.arrival, seq.branch))

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        if not running or incoming.status is Status.RUNNING or not self.config.displace:
            return super().victim(running, incoming)
        last = running[-1]
        return last if self._work(last) - self._work(incoming) >= self.config.displace else None

    def charge(self, span: Span, emitted: int) -> None:
        seq = span.seq
        charged = max(seq.state.get(COMPUTED, 0), span.start)
        end = min(span.start + span.length, seq.num_prompt)
        rows = max(0, end - charged)
        seq.state[COMPUTED] = max(charged, end)
        self.work[_key(seq)] = self._work(seq) + PROMPT * rows + OUTPUT * emitted

    def _work(self, seq: Sequence) -> float:
        return self.work.get(_key(seq), 0.0)

    def _meet(self, seq: Sequence) -> None:
        """Remember a sequence. If its key had nothing to do, its counter rises to the lowest of the busy keys."""
        tenant = _key(seq)
        seq.state[COMPUTED] = 0
        if not self._busy(tenant):
            busy = [self.work.get(other, 0.0) for other in self._met if other != tenant and self._busy(other)]
            self.work[tenant] = max(self.work.get(tenant, 0.0), min(busy, default=0.0))
        self._met.setdefault(tenant, deque()).append(seq)

    def _busy(self, tenant: str) -> bool:
        """Whether a sequence of ``tenant`` has not ended."""
        seqs = self._met.get(tenant, deque())
        while seqs and seqs[0].status is Status.FINISHED:
            seqs.popleft()
        while seqs and seqs[-1].status is Status.FINISHED:
            seqs.pop()
        return bool(seqs)


def _key(seq: Sequence) -> str:
    """Name of the caller's key. A tenant also has the cache salt of the request behind a colon, which a caller may
    change at will."""
    return seq.request.tenant.partition(":")[0]
