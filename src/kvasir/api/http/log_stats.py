"""One log line about the load every few seconds while requests run; nothing while the server is idle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from kvasir.logs import log
from kvasir.types import EngineStats


class LogStats:
    """Logs what happened since the line before. ``stats``: the engine's statistics. ``ended``: number of generation
    requests that have ended since the start of the server. ``interval``: seconds."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        ended: Callable[[], int],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats, self._count_ended, self._interval, self._clock = stats, ended, interval, clock
        self._task: asyncio.Task | None = None
        self._before, self._ended, self._at = EngineStats(), 0, 0.0

    async def start(self) -> None:
        """Begin to log, until ``stop``."""
        self._before, self._ended, self._at = self._stats(), self._count_ended(), self._clock()
        self._task = asyncio.create_task(self._run(), name="log of the load")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if (line := self.line()) is not None:
                log.info("%s", line)

    def line(self) -> str | None:
        """Describe the time since the last call; None when nothing ran."""
        now, stats, ended = self._clock(), self._stats(), self._count_ended()
        before, seconds = self._before, max(1e-9, now - self._at)
        finished = ended - self._ended
        self._before, self._ended, self._at = stats, ended, now
        prompt = stats.prompt_tokens - before.prompt_tokens
        made = stats.generation_tokens - before.generation_tokens
        if not (stats.num_running or stats.num_waiting or stats.num_blocked or prompt or made or finished):
            return None
        parts = [
            f"{stats.num_running} running, {stats.num_waiting + stats.num_blocked} queued, {finished} ended",
            f"{made / seconds:,.0f} tokens/s out, {prompt / seconds:,.0f} prompt tokens/s"
            + _share(" (%s cached)", stats.cached_tokens - before.cached_tokens, prompt),
        ]
        if stats.num_pages:
            parts.append(f"cache {(stats.num_pages - stats.num_free_pages) / stats.num_pages:.0%} in use")
        for tier, counts in stats.tiers.items():
            came = counts["hit_tokens"] - before.tiers.get(tier, {}).get("hit_tokens", 0)
            if tier != "device" and came > 0:
                parts.append(f"{came:,.0f} tokens came back from the {tier} tier")
        drafted = stats.drafted_tokens - before.drafted_tokens
        if drafted > 0:
            accepted = stats.accepted_tokens - before.accepted_tokens
            parts.append(f"drafts {accepted / drafted:.0%} of {drafted:,} tokens accepted")
        if (preempted := stats.preemptions - before.preemptions) > 0:
            parts.append(f"{preempted} preempted")
        return "load: " + "; ".join(parts)


def _share(text: str, part: int, whole: int) -> str:
    return text % f"{part / whole:.0%}" if part > 0 and whole > 0 else ""
