"""``suffixes.py`` in C: the same results, one call a step for all sequences, some 40 bytes a state.

The library is compiled on first use, like the kernels for decode steps (``kernels/native/library.py``).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from ctypes import c_int32, c_int64, c_void_p
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from kvasir.kernels import native as folder
from kvasir.kernels.native.library import Native, shared
from kvasir.speculation.drafter import Ask
from kvasir.speculation.forest import Forest
from kvasir.speculation.suffixes import CONTEXT

SOURCE = Path(folder.__file__).with_name("suffix.c")
NAMES = (
    "kvasir_suffix_new",
    "kvasir_suffix_clear",
    "kvasir_suffix_free",
    "kvasir_suffix_cursor_bytes",
    "kvasir_suffix_step",
)


@functools.cache
def native() -> Native:
    """Return this process's native library. Never raises; ``library`` is None where it cannot be compiled."""
    return shared(SOURCE, declare)


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of the library's functions. Raises AttributeError, OSError."""
    new, clear, free, cursor_bytes, step = (getattr(library, name) for name in NAMES)
    new.restype, new.argtypes = c_void_p, (c_int64, c_int64, c_void_p)
    clear.restype, clear.argtypes = None, (c_void_p,)
    free.restype, free.argtypes = None, (c_void_p,)
    cursor_bytes.restype, cursor_bytes.argtypes = c_int64, ()
    step.restype, step.argtypes = c_int64, (c_void_p, c_int64, *[c_void_p] * 9)
    if cursor_bytes() != ctypes.sizeof(Cursor):
        raise OSError("its structures are laid out in another way")


class NativeStore:
    """A store in the library's memory, which is freed with this object."""

    __slots__ = ("owner", "at")

    def __init__(self, owner: NativeSuffixes, at: int) -> None:
        self.owner, self.at = owner, at

    def __del__(self) -> None:
        with self.owner.lock:
            self.owner.library.kvasir_suffix_free(self.at)


class Cursor(ctypes.Structure):
    """The structure of this name in ``suffix.c``.

    Python adds ``owner``, the store, which lives as long as its cursors; ``at``, the structure's address; and ``end``,
    the number of tokens of the text that were read."""

    _fields_ = [
        ("store", c_void_p),
        ("age", c_int64),
        *((name, c_int32) for name in ("last", "state", "length", "num_context")),
        ("context", c_int32 * CONTEXT),
    ]
    owner: NativeStore
    at: int
    end: int


class NativeSuffixes:
    """The native ``Suffixes``. Calls from several threads take turns. Token ids must be below 2^31."""

    def __init__(self, library: ctypes.CDLL, max_tokens: int, min_match: int) -> None:
        # The lock is reentrant, since a store may be collected while its thread is in a call.
        self.library, self.lock = library, threading.RLock()
        self._max_tokens, self._min_match = max_tokens, min_match
        self._totals = (c_int64 * 2)()  # tokens and bytes of all stores
        self._reserve(1024)

    def _reserve(self, nodes: int) -> None:
        """Make room for the nodes of a step: tokens, parents, depths and estimates."""
        self._ints, self._floats = np.empty((3, nodes), np.int32), np.empty(nodes, np.float64)
        self._out = [*(row.ctypes.data for row in self._ints), self._floats.ctypes.data]

    @property
    def num_tokens(self) -> int:
        return self._totals[0]

    @property
    def num_bytes(self) -> int:
        return self._totals[1]

    def store(self) -> NativeStore:
        with self.lock:
            at = self.library.kvasir_suffix_new(self._max_tokens, self._min_match, ctypes.addressof(self._totals))
        if not at:
            raise MemoryError("no memory for a store of texts")
        return NativeStore(self, at)

    def clear(self, store: NativeStore) -> None:
        with self.lock:
            self.library.kvasir_suffix_clear(store.at)

    def cursor(self, store: NativeStore, end: int) -> Cursor:
        cursor = Cursor(store.at, -1)
        cursor.owner, cursor.at, cursor.end = store, ctypes.addressof(cursor), end
        return cursor

    def read(self, cursors: list[Cursor], news: list[list[int]]) -> None:
        with self.lock:
            self._step(cursors, news)

    def propose(self, cursors: list[Cursor], news: list[list[int]], asks: list[Ask]) -> Forest:
        most = array("i", [ask.max_nodes for ask in asks])
        deepest = array("i", [ask.max_depth for ask in asks])
        counts = array("i", bytes(most.itemsize * len(most)))
        with self.lock:
            if (wanted := sum(most)) > len(self._floats):
                self._reserve(2 * wanted)
            total = self._step(cursors, news, *map(_address, (most, deepest, counts)), *self._out)
            return Forest(self._ints[:, :total].copy(), self._floats[:total].copy(), np.cumsum(counts, dtype=np.int32))

    def _step(self, cursors: list[Cursor], news: list[list[int]], *given: int) -> int:
        where = array("Q", [cursor.at for cursor in cursors])
        tokens, ends = array("i", chain.from_iterable(news)), array("i", accumulate(map(len, news)))
        total = self.library.kvasir_suffix_step(
            _address(where), len(where), _address(tokens), _address(ends), *(given or [None] * 7)
        )
        if total < 0:
            for store in {cursor.owner for cursor in cursors}:
                self.clear(store)
            raise MemoryError("no memory for more text; what was known was dropped")
        return total


def _address(numbers: array) -> int:
    return numbers.buffer_info()[0]
