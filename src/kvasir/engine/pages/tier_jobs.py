"""Copies between tiers, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from kvasir.kv.tier import Move


@dataclass(slots=True, eq=False)
class Job:
    """Copies between tier ``tier`` and the level above, by group. ``held``: places of the level above that it holds, in
    the order of the prefix. ``tokens``: that a request finds because of it."""

    tier: int
    down: bool
    moves: dict[int, list[Move]]
    held: dict[int, list[int]]
    num_bytes: int
    tokens: int = 0
    began: float = 0.0
    future: Future | None = None
    landed: bool = False


@dataclass(slots=True)
class Counts:
    """Counters of one tier since the start."""

    hit_tokens: int = 0  # tokens of prefixes that came back from it to the device
    waits: int = 0  # copies up
    wait_seconds: float = 0.0  # of all copies up
    read_bytes: int = 0
    written_bytes: int = 0
    failed: int = 0  # pages that could not be written
    broken: int = 0  # pages that were not what they should be when they were read
    rest: int = 0  # steps until it is written again, and the last such number
    last_rest: int = 0

    def told(self) -> dict[str, float]:
        """The counters by name, for `EngineStats.tiers`."""
        return {
            "hit_tokens": self.hit_tokens,
            "waits": self.waits,
            "wait_seconds": round(self.wait_seconds, 6),
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "failed_pages": self.failed,
            "broken_pages": self.broken,
        }


def evictions(counts: Iterable[list[int]]) -> dict[str, float]:
    """Pages that left a level by whether another level had them, from the counts of its groups."""
    lost, kept = map(sum, zip(*counts))
    return {"evicted_lost": lost, "evicted_kept": kept}


@dataclass(slots=True)
class Wait:
    """A request's copies up: how many it waited for, and the last one."""

    job: Job
    count: int = 0
