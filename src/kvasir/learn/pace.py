"""Shares a device: work comes in slices, and after each the device is left alone for as long as the share asks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SLICE_SECONDS = 0.005  # a decode step of another process waits for at most so long
LEAST_ROWS = 32
SHOWN_SECONDS = 10.0  # time over which the shown share is a mean


class Pace:
    """Times slices and says how long to rest. ``share``: largest share of the time to be busy (1: never rest)."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share, self._clock = share, clock
        self._busy = 0.0  # seconds, of which the past fades
        self._begun = self._noted = clock()

    def rows(self, rows: int, most: int, seconds: float) -> int:
        """Rows of the next slice, after one of ``rows`` that took ``seconds``: as many as a slice has time for."""
        if self.share >= 1:
            return most
        wanted = rows * min(2.0, SLICE_SECONDS / max(seconds, 1e-6)) * 0.9
        return int(max(LEAST_ROWS, min(most, wanted)))

    def rest(self, seconds: float) -> float:
        """Seconds to rest after ``seconds`` of work."""
        self._fade()
        self._busy += seconds
        return 0.0 if self.share >= 1 else seconds * (1 / self.share - 1)

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
