"""The draft trees of a step, end to end in arrays, so that one native call handles all of them
(``kernels/native/forest.c``).

A ``Forest`` is a sequence of ``DraftTree``; a tree object is made when it is asked for. Without a C compiler the
controller goes through lists of trees one by one, with the same result.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_double, c_int64, c_void_p
from itertools import accumulate, chain
from pathlib import Path
from typing import overload

import numpy as np

from kvasir.kernels import native as folder
from kvasir.kernels.native.library import Native, shared
from kvasir.speculation.tree import DraftTree

SOURCE = Path(folder.__file__).with_name("forest.c")


@functools.cache
def native() -> Native:
    """Return this process's native library. Never raises; ``library`` is None where it cannot be compiled."""
    return shared(SOURCE, _declare)


def _declare(library: ctypes.CDLL) -> None:
    rank, keep, learn = library.kvasir_forest_rank, library.kvasir_forest_keep, library.kvasir_forest_learn
    rank.restype, rank.argtypes = c_int64, (c_int64, *[c_void_p] * 5, c_double, *[c_void_p] * 2)
    keep.restype, keep.argtypes = c_int64, (c_int64, *[c_void_p] * 6, c_int64, *[c_void_p] * 5)
    learn.restype, learn.argtypes = c_int64, (c_int64, *[c_void_p] * 9)


class Forest(Sequence[DraftTree]):
    """Trees of one drafter, ``source``, without guests.

    ``ints`` [3, N] int32: tokens, parents and depths by node, as in ``DraftTree``; ``est`` [N] float64; ``ends``
    [trees] int32: index after the last node of each tree."""

    __slots__ = ("ints", "est", "ends", "source")

    def __init__(self, ints: np.ndarray, est: np.ndarray, ends: np.ndarray, source: str = "") -> None:
        self.ints, self.est, self.ends, self.source = ints, est, ends, source

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Forest | None:
        """Pack the trees. None when they come from several drafters, or have guests."""
        if isinstance(trees, Forest):
            return trees
        if any(tree.guests for tree in trees) or len({tree.source for tree in trees}) > 1:
            return None

        def flat(parts: Iterable[list[int]]) -> array:
            return array("i", chain.from_iterable(parts))

        ints = [
            flat(tree.tokens for tree in trees),
            flat(tree.parents for tree in trees),
            flat(tree.depths for tree in trees),
        ]
        est = np.frombuffer(array("d", chain.from_iterable(tree.est for tree in trees)), np.float64)
        return cls(
            np.array(ints, np.int32),
            est,
            np.array(list(accumulate(map(len, trees))), np.int32),
            trees[0].source if trees else "",
        )

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> DraftTree: ...
    @overload
    def __getitem__(self, at: slice) -> list[DraftTree]: ...

    def __getitem__(self, at: int | slice) -> DraftTree | list[DraftTree]:
        if isinstance(at, slice):
            return list(self)[at]
        at = range(len(self))[at]
        start, end = int(self.ends[at - 1]) if at else 0, int(self.ends[at])
        tokens, parents, depths = self.ints[:, start:end].tolist()
        return DraftTree(tokens, parents, self.est[start:end].tolist(), depths, self.source)

    def __iter__(self) -> Iterator[DraftTree]:
        """Yield all trees; the arrays are converted once."""
        (tokens, parents, depths), est, start = self.ints.tolist(), self.est.tolist(), 0
        for end in self.ends.tolist():
            yield DraftTree(tokens[start:end], parents[start:end], est[start:end], depths[start:end], self.source)
            start = end

    @property
    def num_nodes(self) -> int:
        return self.ints.shape[1]

    @property
    def sizes(self) -> np.ndarray:
        """Number of nodes of each tree [trees]."""
        return np.diff(self.ends, prepend=0)

    @property
    def chains(self) -> list[bool]:
        """Whether each tree is a chain."""
        sizes = self.sizes
        forks = self.ints[1] != np.arange(self.num_nodes, dtype=np.int32) - np.repeat(self.ends - sizes, sizes) - 1
        before = np.concatenate([[0], np.cumsum(forks)])
        return (before[self.ends] == before[self.ends - sizes]).tolist()

    def rank(self, bins: array, first: float) -> tuple[np.ndarray, list[float]]:
        """Return all nodes in falling order of survival, and ``first`` plus the summed survival of the best 0, 1, ...
        nodes.

        ``bins``: from ``Survival.bins``."""
        order, expected = np.empty(self.num_nodes, np.int32), np.empty(self.num_nodes + 1, np.float64)
        _done(
            native().library.kvasir_forest_rank(
                len(self),
                _at(self.ends),
                _at(self.ints[1]),
                _at(self.ints[2]),
                _at(self.est),
                bins.buffer_info()[0],
                first,
                _at(order),
                _at(expected),
            )
        )
        return order, expected.tolist()

    def keep(self, order: np.ndarray, count: int) -> Forest:
        """Return the forest of the first ``count`` nodes of ``order``, which contain the parent of each.

        Trees that lose nodes come out as from ``DraftTree.keep``."""
        ints, est, ends = np.empty((3, count), np.int32), np.empty(count, np.float64), np.empty_like(self.ends)
        _done(
            native().library.kvasir_forest_keep(
                len(self),
                _at(self.ends),
                *map(_at, self.ints),
                _at(self.est),
                _at(order),
                count,
                _at(ends),
                *map(_at, ints),
                _at(est),
            )
        )
        return Forest(ints, est, ends, self.source)

    def learn(self, which: list[int], paths: list[list[int]], bins: array) -> tuple[int, list[list[int]]]:
        """Update ``bins`` with verified trees. Returns the number of their nodes, and [tried, accepted] by depth.

        ``which``: indices of the trees; ``paths``: for each, the accepted rows (see ``SpanResult.path``), the anchor's
        first."""
        chosen, rows = array("i", which), array("i", chain.from_iterable(paths))
        ends = array("i", accumulate(map(len, paths)))
        by_depth = np.zeros((int(self.ints[2].max(initial=-1)) + 1, 2), np.int64)
        total = native().library.kvasir_forest_learn(
            len(chosen),
            *(a.buffer_info()[0] for a in (chosen, rows, ends)),
            _at(self.ends),
            _at(self.ints[1]),
            _at(self.ints[2]),
            _at(self.est),
            bins.buffer_info()[0],
            _at(by_depth),
        )
        return total, [counts for counts in by_depth.tolist() if counts[0]]


def _at(numbers: np.ndarray) -> int:
    return numbers.ctypes.data


def _done(result: int) -> None:
    if result < 0:
        raise MemoryError("no memory to choose among drafts")
