"""Statistics of the engine over all its processes: counters continue when one process ends and the next one starts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

from kvasir.types import EngineStats

# The fields of EngineStats that count from the start of a process. All others describe the present moment.
COUNTERS = (
    "step",
    "prompt_tokens",
    "generation_tokens",
    "forwards",
    "forced_tokens",
    "cached_tokens",
    "prefix_queries",
    "preemptions",
    "tiers",
    "failed",
    "busy_seconds",
    "draft_steps",
    "drafts",
    "drafted_tokens",
    "drafted_by",
    "accepted_tokens",
    "accepted_by_depth",
    "drafted_by_depth",
    "draft_saved_seconds",
)


class Totals:
    """The latest heartbeat, with the counters of all processes that ended before."""

    def __init__(self) -> None:
        self._latest = EngineStats()
        self._ended: dict[str, Any] = {}  # sums over the processes that ended, by name of the counter

    def heartbeat(self, stats: EngineStats) -> None:
        """Take the statistics of the living process."""
        self._latest = stats

    def process_ended(self) -> None:
        """Keep the counters of the process that ended; nothing runs now and no page is in use."""
        self._ended = {name: _sum(self._ended.get(name), getattr(self._latest, name)) for name in COUNTERS}
        self._latest = EngineStats()

    def now(self) -> EngineStats:
        """Statistics at the latest heartbeat, with counters since the first process."""
        counted = {name: _sum(value, getattr(self._latest, name)) for name, value in self._ended.items()}
        return dataclasses.replace(self._latest, **counted)


# The fields that describe the present moment of one replica and add up over several.
GAUGES = (
    "num_waiting",
    "num_blocked",
    "num_running",
    "num_pages",
    "num_free_pages",
    "num_cached_pages",
    "tier_bytes",
    "tier_used",
    "step_rows",
    "weight_bytes",
)


def together(stats: list[EngineStats]) -> EngineStats:
    """The statistics of all replicas as one: sums, and of what does not add up the value of the first."""
    sums = {name: functools.reduce(_sum, [getattr(one, name) for one in stats]) for name in (*COUNTERS, *GAUGES)}
    return stats[0] if len(stats) == 1 else dataclasses.replace(stats[0], **sums)


def _sum(a: Any, b: Any) -> Any:
    """The sum of two counters, of two dicts by key, or of two lists by place; None counts as nothing."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict):
        return {key: _sum(a.get(key), b.get(key)) for key in a | b}
    return [_sum(*pair) for pair in itertools.zip_longest(a, b)] if isinstance(a, list) else a + b
