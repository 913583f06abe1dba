"""Plans of an engine, made again by a scheduler of its own from the calls that the engine's had: what a simulation
decides is what the engine decides.

A plan may depend on the calls before it and on the times that they name, and on nothing else: no clock, no order of
hashes, no tensor.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvasir.engine.pages.evictions.expected_loss import ExpectedLoss
from kvasir.engine.pages.evictions.lru import Lru
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.schedule.scheduler import Scheduler
from kvasir.engine.schedule.schedulers.fcfs import Fcfs
from kvasir.types import Plan, Sequence
from tests.engine.driver import Driver

PAGES = 40


def seen(plan: Plan) -> list[tuple]:
    return [(s.seq.request.id, s.start, s.length) for s in plan.spans] + [("out", s.request.id) for s in plan.preempted]


class Recorder:
    """Records the calls that a scheduler gets, and what it answered."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.calls: list[tuple] = []
        for name in ("add", "finish", "plan", "advance", "complete"):
            setattr(scheduler, name, self._recorded(name, getattr(scheduler, name)))

    def _recorded(self, name: str, call: Any) -> Any:
        def recorded(*args: Any, **options: Any) -> Any:
            known = args
            if name == "add":
                known = (args[0].request, args[0].max_output, args[0].stop_ids)
            elif name == "finish":
                known = (args[0].request.id, args[1])
            elif name == "advance":
                known = (args[0].seq.request.id, args[0].start, list(args[1]))
            elif name == "complete":
                known = (args[0].step,)
            self.calls.append((name, known, options))
            at = len(self.calls)
            found = call(*args, **options)
            if name == "plan":
                self.calls.insert(at, ("planned", tuple(seen(found)), {}))
            return found

        return recorded


def replay(calls: list[tuple], scheduler: Scheduler) -> int:
    """Make the calls again and compare the plans. Returns their number."""
    seqs: dict[str, Sequence] = {}
    plans: dict[int, Plan] = {}
    compared = 0
    for name, args, options in calls:
        if name == "add":
            seq = Sequence(args[0])
            seq.max_output, seq.stop_ids = args[1:]
            seqs[args[0].id] = seq
            scheduler.add(seq)
        elif name == "finish":
            scheduler.finish(seqs[args[0]], args[1])
        elif name == "plan":
            plan = scheduler.plan(*args, **options)
            plans[plan.step] = plan
        elif name == "planned":
            assert tuple(seen(plan)) == args, f"plan {compared} is another one"
            compared += bool(args)
        elif name == "advance":
            span = next(
                s for p in plans.values() for s in p.spans if s.seq.request.id == args[0] and s.start == args[1]
            )
            scheduler.advance(span, args[2])
            span.seq = None  # each span is committed once
            for plan_ in plans.values():
                plan_.spans[:] = [s for s in plan_.spans if s.seq is not None]
        else:
            scheduler.complete(plans.pop(args[0]))
    return compared


@pytest.mark.parametrize("name, eviction", [("lru", Lru), ("expected_loss", ExpectedLoss)])
def test_a_scheduler_alone_makes_the_engines_plans(name, eviction):
    rng = random.Random(5)
    driver = Driver(num_pages=PAGES, max_num_seqs=6, max_num_batched_tokens=64, prefix_eviction=name)
    engine = driver.engine
    recorder = Recorder(engine.scheduler)
    sessions = [[rng.randrange(5, 400) for _ in range(48)] for _ in range(8)]
    for turn in range(5):
        for i, tokens in enumerate(sessions):
            driver.submit(driver.request(f"{i} {turn}", tokens, max_tokens=4, temperature=0.0, ignore_eos=True))
            tokens += [rng.randrange(5, 400) for _ in range(rng.randrange(8, 24))]
            for _ in range(rng.randrange(3)):
                driver.step()
    driver.run([])
    assert engine.pages.cached_tokens and sum(pool.num_available for pool in engine.pages.pools) == PAGES - 1

    def again(num_pages: int) -> tuple[Scheduler, PageManager]:
        old = engine.scheduler
        pages = PageManager(engine.pages.groups, [num_pages], 16, b"x", eviction=eviction())
        limits = {"max_rows": old.max_rows, "max_model_len": old.max_model_len, "pace": old.pace}
        return Scheduler(old.config, pages, Fcfs(), **limits), pages

    scheduler, pages = again(PAGES)
    assert replay(recorder.calls, scheduler) > 20 and pages.cached_tokens == engine.pages.cached_tokens
    with pytest.raises(AssertionError, match="is another one"):
        replay(recorder.calls, again(PAGES - 12)[0])
