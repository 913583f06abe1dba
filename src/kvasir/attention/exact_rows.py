"""Exact attention on a CPU: a row's bits are a function of its queries, its keys and its position, of nothing else.

Keys are cut at multiples of ``BLOCK`` of their positions, and rows into tiles of ``TILE``. Every product has one shape,
whatever the span, and so does every exp: all its elements are computed by vectors, because a tile is too small for
torch to share it among threads (`kvasir.kernels.activation.gated` says why that matters). Blocks are merged in their
order by their largest score. A block that a row does not see multiplies by one and adds zero, so it changes no bit.

Legend: M rows of a span times the query heads of one KV head, G KV heads, N keys, D head dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Rows of a tile: few, because a decode fills one of them.
TILE = 16
# Keys of a block. TILE * BLOCK elements stay below the number from which torch uses several threads (32,768).
BLOCK = 512
# Columns of a product are a multiple of this, as in ``layers.products``.
COLUMNS = 16
INF = float("inf")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Keys [G, BLOCK, D] and values [G, BLOCK, V'] of a span by block, each head's dense, zero where there are none. A
    column of ones follows the V values. ``first``: number of the first block."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    first: int

    @classmethod
    def of(cls, k_GND: torch.Tensor, v_GNV: torch.Tensor, position: int) -> Blocks:
        """The blocks of keys that begin at ``position``."""
        groups, count, width = v_GNV.shape
        first = position // BLOCK
        size = -(-(position + count) // BLOCK) * BLOCK - first * BLOCK
        at = slice(position - first * BLOCK, position - first * BLOCK + count)
        keys = k_GND.new_zeros(groups, size, k_GND.shape[2])
        keys[:, at] = k_GND
        values = v_GNV.new_zeros(groups, size, -(-(width + 1) // COLUMNS) * COLUMNS)
        values[:, at, :width] = v_GNV
        values[:, at, width] = 1
        return cls(list(keys.split(BLOCK, 1)), list(values.split(BLOCK, 1)), first)

    def with_tail(self, k_GND: torch.Tensor, v_GNV: torch.Tensor, position: int) -> Blocks:
        """The same keys up to ``position``, and others from there on."""
        number = position // BLOCK
        kept, rest = number - self.first, position - number * BLOCK
        width = v_GNV.shape[2]
        if rest:
            k_GND = torch.cat((self.keys[kept][:, :rest], k_GND), 1)
            v_GNV = torch.cat((self.values[kept][:, :rest, :width], v_GNV), 1)
        tail = Blocks.of(k_GND, v_GNV, number * BLOCK)
        return Blocks(self.keys[:kept] + tail.keys, self.values[:kept] + tail.values, self.first)


def attend_rows(
    q_MD: torch.Tensor,
    ends_M: torch.Tensor,
    blocks: Blocks,
    group: int,
    width: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [M, V] of ``width`` V and the log-sum-exp [M] of rows over the keys of one KV head. A row sees the keys
    before its end, and with a window the last of these alone."""
    outs, lses = [], []
    for first in range(0, len(q_MD), TILE):
        rows = slice(first, first + TILE)
        count = min(TILE, len(q_MD) - first)
        q = F.pad(q_MD[rows] * scale, (0, 0, 0, TILE - count))
        ends = F.pad(ends_M[rows], (0, TILE - count), value=int(ends_M[first]))
        largest, sums = _tile(q, ends, blocks, group, window, softcap)
        weight = sums[:, width]
        if sinks_M is not None:
            sinks = F.pad(sinks_M[rows], (0, TILE - count))
            top = torch.maximum(largest, sinks)
            shrink = torch.exp(largest - top)
            sums, weight = sums * shrink[:, None], weight * shrink + torch.exp(sinks - top)
            largest = top
        outs.append(sums[:count, :width] / weight[:count, None])
        lses.append((largest + torch.log(weight))[:count])
    return torch.cat(outs), torch.cat(lses)


def _tile(
    q: torch.Tensor, ends: torch.Tensor, blocks: Blocks, group: int, window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each of ``TILE`` rows, and the sums of values weighted by exp(score - largest)."""
    low, high = int(ends.min()), int(ends.max())
    start = 0 if window is None else max(0, low - window) // BLOCK
    largest, sums = q.new_full((TILE,), -INF), None
    for number in range(max(start, blocks.first), -(-high // BLOCK)):
        at = number * BLOCK
        scores = F.linear(q, blocks.keys[number - blocks.first][group])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if at + BLOCK > low or (window is not None and at < high - window):
            positions = torch.arange(at, at + BLOCK)
            unseen = positions >= ends[:, None]
            if window is not None:
                unseen |= positions < ends[:, None] - window
            scores.masked_fill_(unseen, -INF)
        top = torch.maximum(largest, scores.amax(1))
        base = top.masked_fill(top == -INF, 0.0)  # a row that has seen nothing yet: its weights are all zero
        part = torch.exp(scores - base[:, None]) @ blocks.values[number - blocks.first][group]
        sums = part if sums is None else sums * torch.exp(largest - base)[:, None] + part
        largest = top
    assert sums is not None, "every row sees its own key"
    return largest, sums
