"""When forced chains pay: the time of steps with chains and without, from one step's end to the next one's.

That is all that a step costs: its kernels, the host's work on rows and masks, and with chains the pause of a device
that waits until the step before was read. A plain step gives each sequence one token. Where a share of the text is
forced, a step with chains gives 1 / (1 - share). So chains pay while that is at least the ratio of the two times, which
is measured for each size of batch.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

# While nothing was measured yet, chains are tried if this share is forced.
FIRST_SHARE = 1 / 8
# Steps of a kind that must be measured before its time is believed: the shortest counts, for the first may compile
# kernels, or be launched one by one and captured later.
SURE = 4
# Steps of one kind after which the other's time is measured anew: contexts have grown, graphs were captured.
STALE = 512
# Weight of the present time in the running mean, and what an outlier counts at most, as a multiple of it.
DECAY, CLIP = 0.9, 1.25


class _Kind(NamedTuple):
    """Steps that are timed together. ``size``: the number of decodes, rounded up to a power of two."""

    chains: bool
    size: int


class _Flight(NamedTuple):
    kind: _Kind | None  # None: the step tells nothing
    captures: int  # graphs there were when it was launched


class ChainTimes:
    """Running means of the seconds that steps with and without chains take."""

    def __init__(self) -> None:
        self._seconds: dict[_Kind, float] = {}
        self._counts: Counter[_Kind] = Counter()
        self._idle: Counter[_Kind] = Counter()  # steps of the other kind since the last one of this kind
        self._flying: dict[int, _Flight] = {}  # by step
        self._last = -1, _Flight(None, 0), 0.0  # the step read last, and when its end was seen

    def pays(self, decodes: int, share: float) -> bool:
        """Whether to plan the next step of ``decodes`` sequences with chains, if ``share`` of the text is forced. What
        was not measured lately is tried: chains where there are enough, and then steps without."""
        chains, plain = self._mean(True, decodes), self._mean(False, decodes)
        if chains is None:
            return share >= FIRST_SHARE
        return plain is not None and plain >= chains * (1 - share)

    def launched(self, step: int, decodes: int, chains: bool, captures: int) -> None:
        """Note a launched step of ``decodes`` sequences (0: it tells nothing), and how many graphs there are."""
        self._flying[step] = _Flight(_kind(chains, decodes) if decodes else None, captures)

    def ended(self, step: int, now: float) -> None:
        """Learn from a step that was read at ``now``, in seconds, if the one before it was of the same kind: else it
        began otherwise than most. A step that captured a graph tells nothing."""
        flight = self._flying.pop(step, None)
        if flight is None:
            return
        before, last, then = self._last
        self._last = step, flight, now
        if flight.kind is not None and before == step - 1 and last == flight:
            self._learn(flight.kind, now - then)

    def _learn(self, kind: _Kind, seconds: float) -> None:
        self._counts[kind] += 1
        self._idle[kind] = 0
        mean = self._seconds.get(kind)
        if mean is None or self._counts[kind] <= SURE:
            self._seconds[kind] = min(seconds, mean or seconds)
        else:
            self._seconds[kind] = DECAY * mean + (1 - DECAY) * min(seconds, CLIP * mean)
        other = _Kind(not kind.chains, kind.size)
        self._idle[other] += 1
        if self._idle[other] > STALE:
            self._idle[other] = self._counts[other] = 0
            self._seconds.pop(other, None)

    def _mean(self, chains: bool, decodes: int) -> float | None:
        kind = _kind(chains, decodes)
        return self._seconds[kind] if self._counts[kind] >= SURE else None


def _kind(chains: bool, decodes: int) -> _Kind:
    return _Kind(chains, 1 << (decodes - 1).bit_length())
