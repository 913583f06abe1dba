"""Views of stored tensors: the part of a tensor that fills a slot, and whether views together read all of it. Needs no
torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Index = int | slice
# The positions that a view picks along each dimension of the stored tensor.
Picked = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class View:
    """The part of the stored tensor ``name`` that fills a slot.

    ``index`` picks along the first dimensions, and the others are whole: a number picks an expert and drops the
    dimension, a slice picks rows, perhaps every second one. ``transposed``: the last two dimensions then change places.
    """

    name: str
    index: tuple[Index, ...] = ()
    transposed: bool = False

    def picks(self, shape: Sequence[int]) -> Picked | None:
        """Positions along each dimension of a tensor of ``shape``; None: the tensor has not so many."""
        if len(self.index) > len(shape):
            return None
        found = []
        for size, pick in zip(shape, (*self.index, *[slice(None)] * (len(shape) - len(self.index)))):
            part = slice(pick, pick + 1) if isinstance(pick, int) else pick
            if not 0 <= (part.start or 0) < max(size, 1) or (part.stop or 0) > size:
                return None
            found.append(range(size)[part])
        return tuple(found)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the part of a tensor of ``shape``; None: the tensor has no such part."""
        found = list(shape)
        if self.index:
            picked = self.picks(shape)
            if picked is None:
                return None
            dropped = [isinstance(pick, int) for pick in self.index] + [False] * (len(picked) - len(self.index))
            found = [len(part) for part, drop in zip(picked, dropped) if not drop]
        if self.transposed:
            if len(found) < 2:
                return None
            found[-2:] = found[-1], found[-2]
        return tuple(found)


def view_of(found: str | View) -> View:
    """Return what a family's ``stored`` gave, as a view; a name means the whole tensor."""
    return View(found) if isinstance(found, str) else found


def rows_of(name: str, part: str, sizes: Mapping[str, int]) -> View:
    """The rows of ``part`` in the tensor ``name``, which holds ``sizes`` rows of each part, one below the other."""
    first = 0
    for other, size in sizes.items():
        if other == part:
            return View(name, (slice(first, first + size),))
        first += size
    raise AssertionError(f"{name} has no part {part}")


@functools.cache  # layers repeat
def uneven(shape: tuple[int, ...], picked: tuple[Picked, ...]) -> tuple[tuple[int, ...], bool] | None:
    """An element of a tensor of ``shape`` that these views do not read exactly once, and whether they read it; None:
    every element is read once.

    Positions that the same views pick are counted as one, so the cost is that of the views and not of the elements.
    """
    import numpy as np  # here, because front ends read families without it

    if 0 in shape:
        return None
    members, firsts = [], []  # by dimension: which views have which class of positions, and each class's first position
    for dim, size in enumerate(shape):
        kinds = list(dict.fromkeys(view[dim] for view in picked))
        inside = np.zeros((len(kinds), size), bool)
        for row, kind in zip(inside, kinds):
            row[kind.start : kind.stop : kind.step] = True
        _, first = np.unique(inside, axis=1, return_index=True)
        firsts.append(first)
        members.append({kind: np.flatnonzero(row[first]) for kind, row in zip(kinds, inside)})
    counts = np.zeros([len(first) for first in firsts], np.int64)
    for view in picked:
        counts[np.ix_(*(member[kind] for member, kind in zip(members, view)))] += 1
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return None
    at = tuple(int(first[i]) for first, i in zip(firsts, wrong[0]))
    return at, bool(counts[tuple(wrong[0])])
