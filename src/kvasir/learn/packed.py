"""Verified trees packed for one pass: all guesses that can be judged, along committed text and rejected branches.

A draft starts from a *root*, a committed row, and knows the token after it. Guess j of a draft predicts the token that
follows j further ones. It is judged by the distribution of the served model in the row of the last token known to it,
its *judge*:

- along committed text, from every root, and with the row that lies j + 1 places on as judge;
- along a rejected branch, from the root that this branch was drafted from, and with the rejected row itself as judge.
  What the model wants after a wrong token is known, since the verification has just computed it.

Branches that begin alike share their guesses. Context rows see the rows of their text up to their own. A guess sees the
context up to its root, the guesses of its own path, and nothing of other branches (`branch_mask`).

Legend: R committed rows, A all rows, M guesses of a level, K keys, L tapped layers, E model dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from kvasir.learn.base import Base
from kvasir.learn.trace import PLAIN, REJECTED, Trace
from kvasir.speculation.head import Head, Level


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses of one level, by index: ``root`` [M] among committed rows, ``above`` [M] one level up, ``token`` [M]
    that is known last, ``judge`` [M] among all rows (-1: none), ``rejected`` [M]: whether that row was rejected."""

    root: np.ndarray
    above: np.ndarray
    token: np.ndarray
    judge: np.ndarray
    rejected: np.ndarray


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows and guesses of some traces.

    ``states`` [A, L, E] of all rows, in the order of the traces, for the tapped ``layers``; ``committed`` [R]: which of
    them are committed; ``positions`` and ``text`` [R]: their positions, and the number of their trace.
    """

    states: torch.Tensor
    layers: tuple[int, ...]
    committed: np.ndarray
    positions: np.ndarray
    text: np.ndarray
    levels: tuple[Guesses, ...]


class PlacedGuesses(NamedTuple):
    """The guesses of one level as a head reads them, on a device."""

    root: torch.Tensor
    above: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """The rows of `Packed` as a head reads them, on a device, by the same names. ``further``: arrays that
    came along."""

    packed: Packed
    states: torch.Tensor
    committed: torch.Tensor
    positions: torch.Tensor
    text: torch.Tensor
    levels: tuple[PlacedGuesses, ...]
    further: list[torch.Tensor]

    def unroll(self, head: Head, base: Base, normed_AE: torch.Tensor) -> Iterator[torch.Tensor]:
        """The guesses of each level, as `Head.unroll_paths` yields them. ``normed_AE``: all rows' last states, after
        the model's final norm."""
        layers, wanted = self.packed.layers, head.shape.layers
        states = self.states
        if wanted != layers:
            states = torch.stack([states[:, layers.index(layer)] for layer in wanted], 1)
        levels = [
            Level(level.root, level.above, base.embed(level.token), mask)
            for level, mask in zip(self.levels, branch_mask(self))
        ]
        num_positions = int(self.packed.positions.max()) + len(levels) + 1
        return head.unroll_paths(
            states[self.committed], normed_AE[self.committed], self.positions, num_positions, levels
        )


def place(packed: Packed, device: torch.device, further: Sequence[np.ndarray] = ()) -> Placed:
    """Copy rows, and ``further`` arrays [N], to a device in two transfers. With one for each array a slice would wait
    for the device some fifty times, and each time let those who share it go first."""
    states = packed.states
    arrays = [packed.committed, packed.positions, packed.text]
    arrays += [array for level in packed.levels for array in (level.root, level.above, level.token)]
    arrays += further
    words = [_in_words(array) for array in arrays]
    buffer = torch.from_numpy(np.concatenate(words))
    if device.type == "cuda":
        states, buffer = states.pin_memory(), buffer.pin_memory()
    parts = buffer.to(device, non_blocking=True).split([len(part) for part in words])
    committed, positions, text, *rest = [
        part.view(torch.from_numpy(array[:0]).dtype)[: array.size] for part, array in zip(parts, arrays)
    ]
    levels = tuple(PlacedGuesses(*rest[3 * i : 3 * i + 3]) for i in range(len(packed.levels)))
    return Placed(
        packed,
        states.to(device, non_blocking=True),
        committed,
        positions,
        text,
        levels,
        rest[3 * len(levels) :],
    )


def _in_words(array: np.ndarray) -> np.ndarray:
    """The bytes of an array [N] as int64, with zeros at the end where they do not fill the last word."""
    bytes_ = np.ascontiguousarray(array).view(np.uint8)
    return np.pad(bytes_, (0, -bytes_.size % 8)).view(np.int64)


def pack(traces: Sequence[Trace], depth: int, rejected: bool = True) -> Packed:
    """Lay out the guesses of all drafts of at most ``depth`` tokens. ``rejected``: also along rejected branches."""
    all_rows = np.cumsum([0, *(trace.num_rows for trace in traces)])
    committed = [np.flatnonzero(trace.kinds != REJECTED) for trace in traces]
    roots = np.cumsum([0, *map(len, committed)])
    judged = [
        [_along_text(trace, rows, depth), _along_branches(trace, rows, depth) if rejected else []]
        for trace, rows in zip(traces, committed)
    ]
    levels: list[Guesses] = []
    places: dict[tuple[int, int], int] = {}  # (root, judge) of a guess one level up -> its place
    for j in range(depth):
        here = [
            (guess.root + roots[n], guess.known + all_rows[n], guess.token, guess.judge + all_rows[n])
            for part in range(2)
            for n, both in enumerate(judged)
            for guess in both[part]
            if guess.level == j
        ]
        if j == 0:  # the context: all committed rows, judged or not
            judge_of = {root: judge for root, _, _, judge in here}
            here = [
                (root, root, _token_after(trace, int(row)), judge_of.get(root, -1))
                for n, (trace, rows) in enumerate(zip(traces, committed))
                for root, row in enumerate(rows, roots[n])
            ]
        if not here:
            break
        root, known, token, judge = np.array(here, np.int64).T
        above = root if j == 0 else np.array([places[pair] for pair in zip(root.tolist(), known.tolist())], np.int64)
        kinds = np.concatenate([trace.kinds for trace in traces])
        levels.append(Guesses(root, above, token, judge, (judge >= 0) & (kinds[judge] == REJECTED)))
        places = {pair: i for i, pair in enumerate(zip(root.tolist(), judge.tolist()))}
    return Packed(
        torch.cat([trace.tensor() for trace in traces]),
        traces[0].layers,
        np.concatenate([rows + all_rows[n] for n, rows in enumerate(committed)]),
        np.concatenate([trace.positions[rows] for trace, rows in zip(traces, committed)]).astype(np.int64),
        np.repeat(np.arange(len(traces)), [len(rows) for rows in committed]),
        tuple(levels),
    )


def evened(packed: Packed, multiple: int) -> Packed:
    """The same rows and guesses, and behind them as many again as make their numbers multiples of ``multiple``. Those
    are judged by nothing, and no other guess sees them, so that they change no loss.

    A GPU chooses how to compute a product when it first meets its shape. That takes longer than the product itself, and
    no two slices draw equally many rows."""
    count = len(packed.committed)
    added = -count % multiple
    levels = []
    for j, level in enumerate(packed.levels):
        more = -len(level.root) % multiple
        # Those of the context are a text of their own; those of other levels repeat their level's first guess.
        own = np.arange(count, count + more) if j == 0 else np.repeat(level.root[:1], more)
        levels.append(
            Guesses(
                np.concatenate([level.root, own]),
                np.concatenate([level.above, own if j == 0 else np.repeat(level.above[:1], more)]),
                np.concatenate([level.token, np.repeat(level.token[:1], more)]),
                np.pad(level.judge, (0, more), constant_values=-1),
                np.pad(level.rejected, (0, more)),
            )
        )
    return replace(
        packed,
        committed=np.pad(packed.committed, (0, added)),
        positions=np.pad(packed.positions, (0, added)),
        text=np.pad(packed.text, (0, added), constant_values=-1),
        levels=tuple(levels),
    )


def branch_mask(placed: Placed) -> list[torch.Tensor]:
    """Visible keys of the guesses of each level [M, K]: rows of their text up to their root, and of each level
    from 1 on the guess on their own path."""
    position, text = placed.positions, placed.text
    seen_RR = (text[:, None] == text) & (position[:, None] >= position)
    found, trails = [], []
    for j, level in enumerate(placed.levels):
        if j:
            count = len(level.root)
            trails = [(trail[level.above], size) for trail, size in trails]
            trails.append((torch.arange(count, device=position.device), count))
        own = [trail[:, None] == torch.arange(size, device=position.device) for trail, size in trails]
        found.append(torch.cat([seen_RR[level.root], *own], 1))
    return found


class _Guess(NamedTuple):
    """A guess in one trace. ``root``: among its committed rows; ``known``: the judge of the guess that it continues."""

    level: int
    root: int
    known: int
    token: int
    judge: int


def _along_text(trace: Trace, committed: np.ndarray, depth: int) -> list[_Guess]:
    """Guesses of a reply's tokens from every committed row that others follow without a gap."""
    positions = trace.positions[committed].tolist()
    found = []
    for root, position in enumerate(positions):
        if position < trace.prompt - 1:  # the first token of a reply is drawn before any draft
            continue
        for j in range(min(depth, len(positions) - root - 1)):
            judge = root + 1 + j
            if positions[judge] != position + 1 + j:
                break
            row = int(committed[judge])
            found.append(_Guess(j, root, int(committed[judge - 1]), int(trace.row_tokens[row]), row))
    return found


def _along_branches(trace: Trace, committed: np.ndarray, depth: int) -> list[_Guess]:
    """Guesses behind rejected rows whose draft can be followed back to the root that it was made from."""
    place = {int(row): i for i, row in enumerate(committed)}
    kinds, parents, positions = trace.kinds.tolist(), trace.parents.tolist(), trace.positions.tolist()
    found = []
    for row in np.flatnonzero(trace.kinds == REJECTED).tolist():
        anchor = parents[row]
        while anchor >= 0 and kinds[anchor] != PLAIN:
            anchor = parents[anchor]
        before = parents[anchor] if anchor >= 0 else -1
        if before < 0 or positions[before] < trace.prompt - 1:
            continue
        level, root = positions[row] - positions[anchor], place[before]
        if level < depth:
            found.append(_Guess(level, root, parents[row], int(trace.row_tokens[row]), row))
    return found


def _token_after(trace: Trace, row: int) -> int:
    """The committed token after a committed row's."""
    return int(trace.tokens[trace.positions[row] + 1 - trace.start])
