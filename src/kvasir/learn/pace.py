"""Shares a device: work comes in slices, and after each the device is left alone for as long as the share asks.

A slice takes time to launch, however few rows it has: some thousand short operations, between which the device works
for others. What its rows add is kept below `SLICE_SECONDS`. If all of a slice had to be as short, slices would shrink
to their fewest rows and launch as much for each of them, so that a share of the time would teach many times less. The
rest that follows a slice counts all of it, up to `LONGEST`: the first slices load and compile kernels for seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SLICE_SECONDS = 0.005  # most time that a slice's rows may take: a decode step of another process waits so long
LEAST_ROWS = 32
MARGIN = 0.9  # part of that time which is aimed at
LONGEST = 0.2  # seconds of a slice that are followed by a rest
SLOWER, FASTER = 0.5, 1.8  # factors by which the rows of a slice change at most
SHOWN_SECONDS = 10.0  # time over which the shown share is a mean


class Pace:
    """Times slices and says how long to rest. ``share``: largest share of the time to be busy (1: never rest)."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share, self._clock = share, clock
        self._busy = 0.0  # seconds, of which the past fades
        self._begun = self._noted = clock()
        self._least = (0, math.inf)  # rows and seconds of the shortest slice

    def rows(self, rows: int, planned: int, most: int, seconds: float) -> int:
        """Rows to plan for the next slice, after one of ``rows`` that took ``seconds`` and for which ``planned`` were
        planned: as many as a slice has time for.

        The shortest slice tells what a row adds. The smallest are noted anew each time, since a device that others use
        more makes all slices longer."""
        if self.share >= 1:
            return most
        if rows <= LEAST_ROWS or seconds < self._least[1]:
            self._least = rows, seconds
        if 2 * rows < planned:  # the end of a step
            return planned
        more_rows, more_seconds = rows - self._least[0], seconds - self._least[1]
        own = rows * more_seconds / more_rows if more_rows > 0 else 0.0
        factor = MARGIN * SLICE_SECONDS / own if own > 0 else FASTER
        return int(max(LEAST_ROWS, min(most, rows * min(FASTER, max(SLOWER, factor)))))

    def rest(self, seconds: float) -> float:
        """Seconds to rest after ``seconds`` of work."""
        self._fade()
        self._busy += seconds
        return 0.0 if self.share >= 1 else min(seconds, LONGEST) * (1 / self.share - 1)

    @property
    def busy_share(self) -> float:
        """Recent share of the time that was spent in slices."""
        self._fade()
        return min(
            1.0, self._busy / max(1e-6, SHOWN_SECONDS * (1 - math.exp((self._begun - self._noted) / SHOWN_SECONDS)))
        )

    def _fade(self) -> None:
        now = self._clock()
        self._busy *= math.exp((self._noted - now) / SHOWN_SECONDS)
        self._noted = now
