"""The scheduler policy seam: who goes first, and who gives way when pages run out.

A policy only ranks. The scheduler enforces the rules that hold for every policy: the budgets, the prompts' share,
ageing (below), and that a sequence only ever gives way to one of higher rank.

Ageing bounds starvation: later arrivals pass the oldest in the queue in at most ``MAX_SKIPS`` steps. After that nothing
is admitted before it, so it starts once running sequences have made room. A sequence with k older ones in the queue is
thus passed in at most ``(k + 1) * MAX_SKIPS`` steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from typing import Any, ClassVar

from kvasir.logs import log
from kvasir.technique import Technique
from kvasir.types import Sequence, Span, Status

POLICIES = "kvasir.engine.schedule.schedulers"
MAX_SKIPS = 64  # steps in which later arrivals may pass the oldest sequence in the queue


class SchedulerPolicy(Technique):
    """Ranks the sequences in the queue and those that run.

    ``static``: the order of two sequences never changes while they live, so the scheduler sorts only new ones. Set it
    to False if the order depends on ``now`` or on what a sequence has done; all are then sorted every step.
    ``priorities``: the policy looks at ``Request.priority``. ``urgent``: who goes first is not to wait for the sake of
    the cache (``holds.py``).

    A policy may rank by ``request`` (``arrival`` on the clock of ``now``, ``priority``, ``affinity``, ``tenant``),
    ``num_prompt``, ``max_output`` and ``tokens``. Keep a rank that is computed once in ``Sequence.state``: a policy is
    not told when a sequence ends. A policy that raises is switched off (``Guarded``).
    """

    exact = True
    affects_kv = False
    static: bool = True
    priorities: ClassVar[bool] = False
    urgent: ClassVar[bool] = False

    @abstractmethod
    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        """The queue in the order of admission. ``now``: monotonic seconds.

        It must be a stable sort of ``seqs`` that changes none of them, and the order of two must not depend on the
        others: the queue asks about two alone to place a new one. A FINISHED sequence among them has not been queued
        yet and may still be refused; do not remember it.
        """
        raise NotImplementedError

    def order_running(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        """Running sequences by rank: the first get rows and pages first. By default the order is that of the queue."""
        return self.order_waiting(seqs, now)

    def charge(self, span: Span, emitted: int) -> None:  # noqa: B027  # most policies count nothing
        """Count a span that was committed and the number of tokens that it emitted. By default nothing is counted."""

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        """The sequence of ``running`` that loses its pages to ``incoming``; None: no sequence does.

        ``running`` is in order of rank, and if ``incoming`` runs itself, all of them rank below it. A running sequence
        takes pages from the last by rank. A waiting one, which could simply wait, takes them only if the policy says
        so; by default it never does.
        """
        return running[-1] if running and incoming.status is Status.RUNNING else None


class ByArrival(SchedulerPolicy):
    """First come, first served; branches of a request go in the order of their numbers."""

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return sorted(seqs, key=lambda seq: (seq.request.arrival, seq.branch))


class Guarded(SchedulerPolicy):
    """Guards the step loop against faults of a policy, which would otherwise end every request, and again after each
    restart.

    A policy that raises is switched off, and requests go by arrival from then on. Answers of policies from outside the
    package are checked as well: a lost or doubled sequence would show only later, as another fault.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        super().__init__()
        self._policy, self.static = policy, policy.static
        self.charges = type(policy).charge is not SchedulerPolicy.charge  # else a step saves a call for each span

    def order_waiting(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return self._ask("order_waiting", _check_order, seqs, now)

    def order_running(self, seqs: abc.Sequence[Sequence], now: float) -> list[Sequence]:
        return self._ask("order_running", _check_order, seqs, now)

    def victim(self, running: abc.Sequence[Sequence], incoming: Sequence) -> Sequence | None:
        return self._ask("victim", _check_victim, running, incoming)

    def charge(self, span: Span, emitted: int) -> None:
        try:
            self._policy.charge(span, emitted)
        except Exception:
            self._switch_off("charge")

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
            self._switch_off(method)
            return self._ask(method, check, seqs, other)

    def _switch_off(self, method: str) -> None:
        """Go by arrival from now on. Called in an exception handler."""
        log.exception(
            "scheduling policy '%s' failed and is off until a restart; requests go by arrival. "
            "Repair its %s, or choose another --scheduling-policy",
            self._policy.name,
            method,
        )
        self._policy = ByArrival()


def _check_order(seqs: abc.Sequence[Sequence], found: Any) -> None:
    if not isinstance(found, list) or len(found) != len(seqs) or set(found) != set(seqs):
        raise ValueError(f"it must return a list of all {len(seqs)} sequences, each once, not {found!r}")


def _check_victim(running: abc.Sequence[Sequence], found: Any) -> None:
    if found is not None and found not in running:
        raise ValueError(
            f"it must return one of the {len(running)} sequences it is asked about, or None, not {found!r}"
        )
