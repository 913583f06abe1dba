"""Invariants of the scheduler, for `Scheduler.check`. Slow."""

from __future__ import annotations

from itertools import chain
from typing import Any

from kvasir.engine.pages.checks import check_pages
from kvasir.types import Status


def check_scheduler(scheduler: Any) -> None:
    """Assert every invariant of a scheduler, those of its pages included."""
    for status, seqs in (
        (Status.WAITING, scheduler.backlog.waiting),
        (Status.RUNNING, scheduler.running),
        (Status.BLOCKED, scheduler.backlog.blocked),
    ):
        for seq in seqs:
            assert seq.status is status, f"{seq} is listed as {status}"
            assert (seq.seat >= 0) == bool(seq.tables) == (status is Status.RUNNING), f"{seq} holds what it should not"
            assert seq.num_computed < seq.num_tokens, f"{seq} has nothing left to compute"
            assert status is Status.RUNNING or not (seq.num_ahead or seq.num_drawn), f"{seq} has rows in flight"
            assert scheduler.in_flight() is not None or not (seq.num_ahead or seq.num_drawn), (
                f"{seq} counts on a step that has ended"
            )
    seats = [seq.seat for seq in scheduler.running] + scheduler.free_seats + [seat for _, seat in scheduler.limbo_seats]
    assert sorted(seats) == list(range(scheduler.config.max_num_seqs)), "a seat is in no place or in two"
    scheduler.backlog.check()
    scheduler.room.check()
    scheduler.residents.check()
    check_pages(scheduler.pages, chain(scheduler.running, scheduler.room.leased()))
