"""Shares a device: work comes in slices, and after each the device is left alone for as long as the share asks.

A slice takes time to launch, however few rows it has: some thousand short operations, and gradients of all weights. Its
rows may take as long again, or `SLICE_SECONDS` where that is more. If all of a slice had to be short, slices would
shrink to their fewest rows and launch as much for each of them, so that a share of the time would teach many times
less. The rest that follows a slice counts all of it, except that the first ones load and compile kernels for seconds
while the device is free: of those `LONGEST` counts at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SLICE_SECONDS = 0.005  # time that a slice's rows may always take
LEAST_ROWS = 32
MARGIN = 0.9  # part of that time which is aimed at
FIRST, LONGEST = 16, 0.05  # slices that load and compile, and the seconds of each that are followed by a rest
SLOWER, FASTER = 0.5, 1.8  # factors by which the rows of a slice change at most
SHOWN_SECONDS = 10.0  # time over which the shown share is a mean


class Pace:
    """Times slices and says how long to rest. ``share``: largest share of the time to be busy (1: never rest)."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share, self._clock = share, clock
        self._busy = 0.0  # seconds, of which the past fades
        self._begun = self._noted = clock()
        self._least = math.inf  # seconds of the shortest slice
        self._slices = 0  # so far

    def rows(self, rows: int, planned: int, most: int, seconds: float) -> int:
        """Rows to plan for the next slice, after one of ``rows`` that took ``seconds`` and for which ``planned`` were
        planned: as many as a slice has time for.

        The shortest slice tells what it takes to launch one. The smallest are noted anew each time, since a device that
        others use more makes all slices longer."""
        if self.share >= 1:
            return most
        if rows <= LEAST_ROWS or seconds < self._least:
            self._least = seconds
        if 2 * rows < planned:  # the end of a step
            return planned
        own, wanted = seconds - self._least, MARGIN * max(SLICE_SECONDS, self._least)
        factor = wanted / own if own > 0 else FASTER
        return int(max(LEAST_ROWS, min(most, rows * min(FASTER, max(SLOWER, factor)))))

    def rest(self, seconds: float) -> float:
        """Seconds to rest after ``seconds`` of work."""
        self._fade()
        self._busy += seconds
        self._slices += 1
        if self.share >= 1:
            return 0.0
        return (min(seconds, LONGEST) if self._slices <= FIRST else seconds) * (1 / self.share - 1)

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
