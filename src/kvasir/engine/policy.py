"""The scheduler policy seam: who goes first, and who gives way when pages run out.

A policy only ranks. The scheduler keeps what every policy must keep: budgets, the prompt quota, ageing (below), and
that a sequence only ever gives way to one of higher rank.

Starvation bound, of every policy: the oldest in the queue is passed by later arrivals in at most ``MAX_SKIPS`` steps.
Then nothing is admitted before it, so it starts once the work that is already running has made room. A sequence with k
older ones in the queue is thus passed in at most ``(k + 1) * MAX_SKIPS`` steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from typing import Any, ClassVar

from kvasir.logs import log
from kvasir.technique import Technique
from kvasir.types import Sequence, Status

POLICIES = "kvasir.engine.schedulers"
MAX_SKIPS = 64


class SchedulerPolicy(Technique):
    """``static``: the order of two sequences never changes while they live, so the scheduler sorts only what is new;
    say False where it depends on ``now`` or on what a sequence has done: all are then sorted each step. ``priorities``:
    it looks at ``Request.priority``.

    What there is to rank by: ``request`` (``arrival`` on the clock of ``now``, ``priority``, ``affinity``, ``tenant``),
    ``num_prompt``, ``max_output``, ``tokens``. It is not told when a sequence ends. A rank that is found once is kept
    in ``Sequence.state``. One that raises is off from then on (``Guarded``)."""

    exact = True
    affects_kv = False
    static: bool = True
    priorities: ClassVar[bool] = False

    @abstractmethod
    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        """The queue, first to admit first. Must be a stable sort of ``seqs``, the same for any two whoever else is
        there (it is asked about two alone, to place what is new), and change none of them. ``now``: monotonic seconds.
        One that is FINISHED has not come yet, and may be refused: who remembers sequences leaves it out."""
        raise NotImplementedError

    def order_running(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        """Rank: rows and pages go to the first. By default as in the queue."""
        return self.order_waiting(seqs, now)

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        """Who of ``running`` (by rank, all below ``incoming`` when that runs itself) loses its pages to ``incoming``.

        A running sequence takes them from the last by rank. A waiting one, which could simply wait, takes them only
        where the policy says so; by default never.
        """
        return running[-1] if running and incoming.status is Status.RUNNING else None


class ByArrival(SchedulerPolicy):
    """The branches of a request in turn."""

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.request.arrival, seq.branch))


class Guarded(SchedulerPolicy):
    """A policy in the step loop, where what it does wrong would end every request, and again after each restart: it is
    asked no more, and they go by arrival. Of one that is not ours, answers are checked: a sequence lost or doubled
    would show later, as another fault."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        super().__init__()
        self._policy, self.static = policy, policy.static

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return self._ask("order_waiting", _check_order, seqs, now)

    def order_running(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return self._ask("order_running", _check_order, seqs, now)

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        return self._ask("victim", _check_victim, running, incoming)

    def _ask(
        self,
        method: str,
        check: abc.Callable[[abc.Sequence[Sequence], Any], None],
        seqs: abc.Sequence[Sequence],
        other: Any,
    ) -> Any:
        try:
            found = getattr(self._policy, method)(list(seqs), other)
            if not self._policy.ours:
                check(seqs, found)
            return found
        except Exception:
            if isinstance(self._policy, ByArrival):
                raise
            log.exception(
                "scheduling policy '%s' failed and is off until a restart; requests go by arrival. Repair its %s, or "
                "choose another --scheduling-policy",
                self._policy.name,
                method,
            )
            self._policy = ByArrival()
            return self._ask(method, check, seqs, other)


def _check_order(seqs: abc.Sequence[Sequence], found: Any) -> None:
    if not isinstance(found, list) or len(found) != len(seqs) or set(found) != set(seqs):
        raise ValueError(f"of {len(seqs)} sequences it must return a list of all, each once, not {found!r}")


def _check_victim(running: abc.Sequence[Sequence], found: Any) -> None:
    if found is not None and found not in running:
        raise ValueError(f"a victim is one of the {len(running)} sequences it is asked about, or None, not {found!r}")
