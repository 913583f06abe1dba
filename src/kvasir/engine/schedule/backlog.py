"""Sequences that do not run: those in the queue, and those that are set aside until somebody unblocks them.

The policy ranks the queue. A sequence that it passes over too often is *overdue* and goes first; ``policy.py`` gives
the bound.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from kvasir.engine.schedule.policy import MAX_SKIPS, SchedulerPolicy
from kvasir.engine.schedule.queue import Queue
from kvasir.types import Sequence, Status


class Backlog:
    """The queue and the blocked sequences.

    ``prompt_tokens``: tokens of all sequences that wait or are blocked. A prompt with several branches counts once.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self.waiting = Queue(policy.order_waiting, policy.static)
        self.blocked: dict[Sequence, None] = {}
        self.overdue: OrderedDict[Sequence, None] = OrderedDict()  # these are in ``waiting``, too
        self.prompt_tokens = 0

    def add(self, seq: Sequence, now: float, rows: int) -> None:
        """Put ``seq`` into the queue. ``rows``: estimate of the rows that it has to compute."""
        seq.status = Status.WAITING
        self.waiting.add(seq, now, rows)
        self.prompt_tokens += seq.num_unshared

    def block(self, seq: Sequence, until: float) -> None:
        """Set aside a sequence that waits or has just been stopped. If it is blocked, only ``until`` changes."""
        if seq.status is Status.WAITING:
            self.remove(seq)
        if seq not in self.blocked:
            self.blocked[seq] = None
            self.prompt_tokens += seq.num_unshared
        seq.status, seq.blocked_until = Status.BLOCKED, until

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that waits or is blocked, because it starts or ends."""
        if seq.status is Status.BLOCKED:
            del self.blocked[seq]
            seq.blocked_until = 0.0
        else:
            self.waiting.discard(seq)
            self.overdue.pop(seq, None)
        self.prompt_tokens -= seq.num_unshared

    def candidates(self, now: float) -> Iterator[Sequence]:
        """The queue in the order of admission, as it is now, without branches that cannot start yet."""
        overdue = self.overdue.copy()
        ordered = chain(overdue, (seq for seq in self.waiting.ordered(now) if seq not in overdue))
        return (seq for seq in ordered if not self.waits_for_parent(seq))

    def waits_for_parent(self, seq: Sequence) -> bool:
        """Whether a branch must wait until its parent has computed the prompt's pages.

        An overdue branch no longer waits, and none waits for a blocked parent.
        """
        parent = seq.parent
        if parent is None or parent.status not in (Status.WAITING, Status.RUNNING) or seq in self.overdue:
            return False
        return parent.num_computed < seq.num_prompt - 1

    def age(self, skipped: list[Sequence], admitted: list[Sequence], held: Collection[Sequence] = ()) -> None:
        """Count the step for the sequences that it passed over: those in ``skipped``, which did not fit, and the oldest
        that the step left in the queue, wherever the policy ranks it, but for those ``held``."""
        latest = max((seq.request.arrival for seq in admitted), default=-math.inf)
        oldest = next((seq for seq in self.waiting if seq not in held), None)
        if oldest is not None and oldest not in skipped and oldest.request.arrival <= latest:
            skipped.append(oldest)
        for seq in skipped:
            seq.num_skipped += 1
            if seq.num_skipped >= MAX_SKIPS:
                self.overdue[seq] = None

    def check(self) -> None:
        """Assert the invariants of the queue and of the blocked sequences."""
        assert self.prompt_tokens == sum(seq.num_unshared for seq in chain(self.waiting, self.blocked)), (
            "queued tokens are miscounted"
        )
        assert all(seq in self.waiting for seq in self.overdue), "an overdue sequence does not wait"
