"""Memory of large bodies, given back to the system.

A decoded body takes several times its length. Three things keep it after its answer. An error refers to the frames that
it passed through, and their locals to the body: ``forget_frames``. A rendered template is a circle of objects, which
the collector may find much later: ``Trimmer``. The C library keeps freed memory for itself, in an arena of each thread:
``limit_allocator`` and ``Trimmer``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys

# Bytes of large bodies after which freed memory is given back, and seconds from then on, so that what arrives at once
# is freed at once. A collection stops every stream while it visits the objects of live requests, 10 ms for some hundred
# of them; the C library needs 0.1 s for a gigabyte, in which streams go on.
TRIM_BYTES, TRIM_SECONDS = 1 << 24, 5.0
# Parameters of ``mallopt(3)``: allocations from this size on are mappings of their own, which end when they are freed
# (the default grows with what is freed, up to 32 MiB), and threads share this many arenas (the default is 8 per core).
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 1 << 18
M_ARENA_MAX, ARENAS = -8, 4


def limit_allocator() -> None:
    """Make the C library keep less freed memory. Other libraries than glibc have no such settings."""
    if (mallopt := _function("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_ARENA_MAX, ARENAS)


class Trimmer:
    """Collects circles of objects and gives freed memory back, some seconds after large bodies. ``trims``: how often
    it did."""

    def __init__(self) -> None:
        self.trims = 0
        self._waiting = 0  # bytes of bodies since the last trim
        self._timer: asyncio.TimerHandle | None = None

    def note(self, size: int) -> None:
        """Count a large body of ``size`` bytes. Called on the event loop."""
        self._waiting += size
        if self._waiting >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def close(self) -> None:
        """Give back nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _trim(self) -> None:
        self._waiting, self._timer = 0, None
        self.trims += 1
        asyncio.get_running_loop().run_in_executor(None, _give_back)


def forget_frames(error: BaseException | None) -> None:
    """Take the frames that it passed through from an error that was answered, and from those before it. The error, the
    future that carried it, and a frame that holds this future refer to each other in a circle, so that bodies would
    stay until the collector looks at all objects."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _give_back() -> None:
    gc.collect()  # what lives since the start is frozen, so this looks at the requests alone
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(0)


def _function(name: str):  # type: ignore[no-untyped-def]
    """A function of the C library; None: it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
