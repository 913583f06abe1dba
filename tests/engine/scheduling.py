"""Schedulers in the states that their tests start from."""

from __future__ import annotations

import random

from kvasir.types import Sequence
from tests.engine.fake import FULL, Driver, manager, scheduler, sequence


def driver(num_pages=40, page_slots=4, groups=(FULL,), prefix_root=b"root", policy=None, **options) -> Driver:
    return Driver(scheduler(manager(num_pages, page_slots, groups, prefix_root), policy, **options))


def unique(length: int, name: str, **options) -> Sequence:
    """A prompt that shares nothing with any other."""
    first = random.Random(name).randrange(10**6, 10**9)
    return sequence(range(first, first + length), name=name, **options)


def rows(plan) -> dict[str, int]:
    return {span.seq.request.id: span.length for span in plan.spans}


def running(d: Driver, n: int, length: int = 5, **options) -> list[Sequence]:
    """``n`` decodes."""
    seqs = [d.add(unique(length, f"d{i}", arrival=d.now, max_tokens=50, **options)) for i in range(n)]
    while any(s.num_output == 0 for s in seqs):
        d.step()
    return seqs


def crowd(policy=None, n=3, num_pages=10, **options) -> tuple[Driver, list[Sequence]]:
    """``n`` decodes of two pages each, and a pool with room for one or two more."""
    d = driver(num_pages=num_pages, policy=policy, max_num_seqs=8, **options)
    seqs = [d.add(unique(6, f"s{i}", arrival=float(i), max_tokens=20)) for i in range(n)]
    d.step()
    return d, seqs


def until_preemption(d: Driver):
    for _ in range(60):
        plan = d.step()
        if plan.preempted:
            return plan
    raise AssertionError("nothing was preempted")
