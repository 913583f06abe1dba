"""Hold back prompts that would push out of the cache more than they find in it.

Once prefixes that will be asked for again fill the pool, every new prompt evicts one that comes back a moment later,
and is evicted itself before it comes back: all are computed again and again. It is cheaper to serve those first whose
prefixes are there, while the others wait. So a prompt is *held* while the tokens that it would have evicted, each
weighed with the chance that it is asked for (`kvasir.engine.pages.returns`), are more than those that it finds in the
cache. Where nobody comes back, nothing is held.

Nobody waits for ever. Every computed row, and rows that steps without prompts leave unused, add to a *credit* in
tokens. The first held prompt by rank starts as soon as the credit covers what it evicts, and spends that. Nothing is
held while nothing runs, nor is a sequence that has begun to answer, or that has waited too long for pages.

With tiers below the device, what is evicted is copied back, until they are full, too. From then on each page that is
computed has one page written over in the lowest tier. So only pages that no level has count as evicting, as far as that
tier has no free slots for them, and what any level has counts as found. The chance that the lost pages are asked for is
taken from those that leave the device next.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Many
from itertools import accumulate

from kvasir.engine.pages.page_pool import PagePool, pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.pages.tier_reach import reachable
from kvasir.engine.schedule.spans import Step, computed_from
from kvasir.types import Sequence

# Tokens of credit for each computed row, and for each row that a step without prompts leaves unused. More lets held
# prompts start sooner, and has more prefixes computed again.
COMPUTED = 1 / 32
UNUSED = 1 / 8
# Steps for which it stays valid how much of a held prompt the tiers have: to look walks the whole prompt.
REACH_STEPS = 32
# Most credit, as a share of the pool, so that an idle hour is not paid back with the whole cache. It always covers what
# the first held prompt evicts.
MOST = 1 / 8


class Holds:
    """Decides which prompts of the queue wait for the cache's sake. ``held``: those of the last step.

    ``active``: False under policies whose order says who is urgent.
    """

    def __init__(self, pages: PageManager, active: bool) -> None:
        self.pages = pages
        self.held: dict[Sequence, None] = {}
        self._pool: PagePool | None = next((pool for pool in pages.pools if pool.nested), None) if active else None
        self._credit = 0.0
        self._wanted = 0.0  # the loss that the first held sequence must cover
        self._runs: tuple[list[int], list[float]] | None = None  # sums over the first runs: pages, and their loss
        self._reach: dict[Sequence, tuple[int, int]] = {}  # tokens that all levels have of a prompt, and in which step
        self._steps = 0

    def begin(self) -> None:
        """Begin to fill a step from the queue."""
        self._steps += 1
        self._reach = {seq: found for seq, found in self._reach.items() if seq in self.held}
        self.held = {}
        self._wanted = 0.0
        self._runs = None

    def started(self) -> None:
        """A sequence has started, which changes what is idle."""
        self._runs = None

    def hold(self, seq: Sequence, hit: int, num_tokens: int, promised: Many[int]) -> bool:
        """Whether a waiting sequence is held in this step.

        ``hit``: tokens that it finds in the cache; ``num_tokens``: those that it needs pages for; ``promised``: pages
        by group that other prompts will still take.
        """
        if self._pool is None or seq.num_preempted or seq.num_output:
            return False
        before = promised[self._pool.group]
        needed = pages_for(num_tokens, self.pages.page_slots) - hit // self.pages.page_slots
        loss = (self._loss(before + needed) - self._loss(before)) * self.pages.page_slots
        if loss <= hit:
            return False
        if self.pages.tiers is not None:
            hit = max(hit, self._reached(seq))
            computed = pages_for(num_tokens, self.pages.page_slots) - hit // self.pages.page_slots
            loss *= max(0, computed - len(self.pages.tiers.shelves[-1][self._pool.group].free)) / needed
            if loss <= hit:
                return False
        if not self.held and self._credit >= loss:
            self._credit -= loss
            return False
        if not self.held:
            self._wanted = loss
        self.held[seq] = None
        return True

    def end(self, step: Step, budget: int) -> None:
        """A step of at most ``budget`` rows is full, or the queue has nothing for it."""
        if self._pool is None:
            return
        prompts = any(span.length > 1 + seq.num_look_ahead for seq, span in step.spans.items())
        self._credit += COMPUTED * (budget - step.left) + (0.0 if prompts else UNUSED * step.left)
        most = max(self._wanted, MOST * self._pool.num_pages * self.pages.page_slots)
        self._credit = min(self._credit, most)

    def _reached(self, seq: Sequence) -> int:
        """Tokens of a waiting prompt that some level has, or had a few steps ago."""
        reach, since = self._reach.get(seq, (0, self._steps - REACH_STEPS))
        if self._steps - since >= REACH_STEPS:
            reach, since = reachable(self.pages, seq, computed_from(seq)), self._steps
            self._reach[seq] = reach, since
        return reach

    def _loss(self, count: int) -> float:
        """Pages that are expected to be computed again if ``count`` pages are taken now."""
        count -= len(self._pool.free)
        if count <= 0:
            return 0.0
        if self._runs is None:
            runs = list(self._pool.cached.losses())
            self._runs = (
                list(accumulate((pages for pages, _ in runs), initial=0)),
                list(accumulate((pages * chance for pages, chance in runs), initial=0.0)),
            )
        taken, lost = self._runs
        i = min(bisect.bisect_left(taken, count), len(taken) - 1)
        if not i or taken[i] <= count:
            return lost[i]
        return lost[i] - (taken[i] - count) * (lost[i] - lost[i - 1]) / (taken[i] - taken[i - 1])
