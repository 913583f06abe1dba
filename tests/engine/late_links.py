"""Links and tiers without threads or files: copies run and land when a test says so, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from kvasir.engine.pages.tiers import PageTiers
from kvasir.kv.tier import Tier
from tests.engine.fake import Driver, FakeModel


class LateLink:
    """Runs each job at some moment between its submission and its landing, and lands jobs out of order.

    ``early``: futures are done at once, before their bytes are there (a mutation that tests must notice)."""

    def __init__(self, rng: random.Random, early: bool = False) -> None:
        self.rng, self.early = rng, early
        self.waiting: list[tuple[Callable[[], Any], Future]] = []  # not run
        self.ran: list[tuple[Any, Future]] = []  # run, and not landed

    def submit(self, job: Callable[[], Any]) -> Future:
        future: Future = Future()
        self.waiting.append((job, future))
        if self.early:
            future.set_result([[True] * len(call.args[2]) for call in job.__closure__[0].cell_contents])
        return future

    def tick(self, share: float = 0.4) -> None:
        """Let some time pass."""
        for job, future in [entry for entry in self.waiting if self.rng.random() < share]:
            self.waiting.remove((job, future))
            result = job()
            if not self.early:
                self.ran.append((result, future))
        for result, future in [entry for entry in self.ran if self.rng.random() < share]:
            self.ran.remove((result, future))
            future.set_result(result)

    def finish(self) -> None:
        while self.waiting or self.ran:
            self.tick(1.0)

    def close(self) -> None:
        self.finish()


class FakeTier(Tier):
    """Slots that hold what `FakeModel` has for pages. ``fails``: share of reads that fail. A tenth of that
    share of writes fails, because a tier rests after one. ``stale``: a page
    is stored as it was before its last token (a mutation)."""

    name = "fake"

    def __init__(self, num_slots, rng: random.Random, fails: float = 0.0, stale: bool = False) -> None:
        super().__init__()
        self.num_slots, self.rng, self.fails, self.stale = tuple(num_slots), rng, fails, stale
        self.content: list[list] = [[["empty"] * 4 for _ in range(n)] for n in num_slots]

    def open(self, place):
        return []

    def links(self, place):
        return LateLink(self.rng), LateLink(self.rng)

    def write(self, group, rows, moves):
        good = [self.rng.random() >= self.fails / 10 for _ in moves]
        for move, written in zip(moves, good):
            stored = list(rows[move.row])
            if self.stale:
                stored[-1] = None
            self.content[group][move.slot] = stored if written else ["torn"] * 4
        return good

    def read(self, group, rows, moves):
        good = [self.rng.random() >= self.fails for _ in moves]
        for move, whole in zip(moves, good):
            rows[move.row] = list(self.content[group][move.slot]) if whole else ["torn"] * 4
        return good

    def rows(self, group):
        return self.content[group]


class TieredDriver(Driver):
    """Steps a scheduler whose pages have lower tiers, and lets time pass on their links."""

    def __init__(self, scheduler, slots, rng: random.Random, **faults: Any) -> None:
        super().__init__(scheduler, FakeModel(scheduler.pages), rng)
        for pool in scheduler.pages.all_pools:
            pool._on_free = self.model.poison
        place: Any = SimpleNamespace(
            pool=SimpleNamespace(pages=self.model.content), page_bytes=[1] * len(scheduler.pages.all_pools)
        )
        self.tiers = PageTiers(
            scheduler.pages,
            [FakeTier(n, rng, **faults) for n in slots],
            place,
            in_flight=scheduler.in_flight,
            step_pages=16,
        )

    def tick(self, share: float = 0.4) -> None:
        for link in (link for links in self.tiers.links for link in links):
            link.tick(share)

    def step(self, **how):
        self.tick()
        self.tiers.before_plan(None)
        between = how.pop("between", lambda: None)
        plans: list = []
        plan_of = self.scheduler.plan

        def planned(*args):
            plans.append(plan_of(*args))
            self.tick()  # before the page copies of the plan
            return plans[-1]

        def launched() -> None:
            if plans[-1].spans:
                self.tiers.launched(plans[-1])
            self.tick()
            between()

        self.scheduler.plan = planned
        try:
            plan = super().step(between=launched, **how)
        finally:
            del self.scheduler.plan
        if not plan.spans:
            self.tiers.rest()
        return plan

    def drain(self, limit: int = 5000) -> None:
        while len(self.scheduler.backlog.waiting) or len(self.scheduler.running) or self.unread:
            self.now += 0.1
            self.step()
            assert (limit := limit - 1), "the work does not end"
        for plan in self.in_flight:
            self.scheduler.complete(plan)
        self.in_flight.clear()
        self.settle()
        self.scheduler.check()
        self.scheduler.room.begin(self.now + 1000)
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_total, "pages are lost"

    def settle(self) -> None:
        """Let all copies land."""
        self.tiers._launch_queued()
        while self.tiers._flying:
            self.tick(1.0)
            self.tiers._land()
