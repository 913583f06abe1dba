"""Exact attention on a CPU: a row's bits are a function of its queries, its keys and its position, of nothing else.

Keys are cut at multiples of the block's length of their positions, and rows into tiles of ``TILE``. The last block that
a row sees is cut to the smallest size (``reach``) that holds what it sees there, and a tile ends where that size
changes. So the shape of every product is a function of the row's position. Every exp is computed by vectors alone,
because no call is large enough for torch to share it among threads (`kvasir.kernels.activation.gated` says why that
matters). Blocks are merged in their order by their largest score. A block that a row does not see multiplies by one and
adds zero, so it changes no bit. One call computes all KV heads: a decode over a short context costs what its calls
cost.

Legend: G KV heads, R query heads of a KV head, M rows of a span times R, N keys, n keys of a block, D head dim, V value
dim, V' the same rounded up to ``COLUMNS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvasir.attention.backend import AttentionSpec

# Rows of a tile. A decode fills R of them: with 8 rows it was up to a quarter slower for R = 2 (heads of 128), and with
# 2 a prompt would have twice the calls. It divides the lengths of vectors, so that where a number a row goes through
# exp or log, all rows of a head are computed by vectors, or none.
TILE = 4
# Keys of the last block that a row sees: one of these, or a multiple of the last.
SIZES = (64, 128, 256, 512)
# Keys of every block before: few calls for a long context, and few keys in vain before the edge of a window.
BLOCK, WINDOW_BLOCK = 4096, 512
# Columns of a product are a multiple of this, as in ``layers.products``.
COLUMNS = 16
# Bytes. Every matrix begins at a multiple of this, which a BLAS may look at when it picks a kernel.
ALIGNMENT = 64
# Elements of the largest call that torch computes by one thread.
UNSHARED = 32_768
INF = float("inf")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Keys [G, n, D] and values [G, n, V'] of a span by block, each head's dense, zero where there are none. n is
    ``block``, and a size in the last block. ``first``: number of the first block. ``width``: V."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    first: int
    width: int
    block: int

    @classmethod
    def of(cls, k_GND: torch.Tensor, v_GNV: torch.Tensor, position: int, block: int) -> Blocks:
        """The blocks of keys that begin at ``position``. Whole blocks are views where their addresses allow it."""
        _, count, width = v_GNV.shape
        first, end = position // block, position + count
        keys, values = [], []
        for at in range(first * block, end, block):
            low, high = max(at, position), min(at + block, end)
            there, front, behind = slice(low - position, high - position), low - at, _size(high - at) - (high - at)
            keys.append(_dense(k_GND[:, there], front, behind, 0))
            values.append(_dense(v_GNV[:, there], front, behind, -width % COLUMNS))
        return cls(keys, values, first, width, block)

    def with_tail(self, k_GND: torch.Tensor, v_GNV: torch.Tensor, position: int) -> Blocks:
        """The same keys up to ``position``, and others from there on."""
        number = position // self.block
        kept, rest = number - self.first, position - number * self.block
        spare = reach(position + k_GND.shape[1], self.block) - position - k_GND.shape[1]
        keys = [self.keys[kept][:, :rest]] if rest else []
        values = [self.values[kept][:, :rest, : self.width]] if rest else []
        k_GND = torch.cat((*keys, k_GND, k_GND.new_zeros(len(k_GND), spare, k_GND.shape[2])), 1)
        v_GNV = torch.cat((*values, v_GNV, v_GNV.new_zeros(len(v_GNV), spare, self.width)), 1)
        tail = Blocks.of(k_GND, v_GNV, number * self.block, self.block)
        return replace(
            tail, keys=self.keys[:kept] + tail.keys, values=self.values[:kept] + tail.values, first=self.first
        )


@dataclass(frozen=True, slots=True)
class Exact:
    """Attention of rows over blocks of ``block`` keys: ``share`` query heads of a KV head (R), for each of consecutive
    positions. A row sees the keys before its end, and with a window the last of these alone.

    ``later`` [R + TILE, n]: whether the row that stands so many rows behind the first of a position does not see the
    key that stands so many keys behind what that one sees."""

    share: int
    scale: float
    window: int | None
    softcap: float | None
    block: int
    later: torch.Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, device: torch.device | None = None) -> Exact:
        """Build it from the spec of a layer, for rows on ``device`` (None: the CPU)."""
        share = spec.num_heads // spec.num_kv_heads
        behind = torch.arange(share + TILE, device=device) // share
        later = torch.arange(SIZES[-1], device=device) >= behind[:, None]
        block = BLOCK if spec.window is None else WINDOW_BLOCK
        return cls(share, spec.scale, spec.window, spec.softcap, block, later)

    def rows(
        self, q_GMD: torch.Tensor, end: int, blocks: Blocks, sinks_GR: torch.Tensor | None = None, want_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results [G, M, V] and, when wanted, the log-sum-exp [G, M]. ``end``: of the first row."""
        outs, lses = [], []
        count, share = q_GMD.shape[1], self.share
        for low, high in self._tiles(count, end):
            q = F.pad(q_GMD[:, low:high] * self.scale, (0, 0, 0, TILE - (high - low)))
            largest, sums, weight = self._tile(q, end + low // share, end + (high - 1) // share, low % share, blocks)
            if sinks_GR is not None:
                sinks = sinks_GR[:, [row % share for row in range(low, low + TILE)], None]
                top = torch.maximum(largest, sinks)
                shrink = torch.exp(largest - top)
                sums, weight = sums * shrink, weight * shrink + torch.exp(sinks - top)
                largest = top
            outs.append((sums / weight)[:, : high - low, : blocks.width])
            if want_lse:
                lses.append((largest + torch.log(weight))[:, : high - low, 0])
        return _joined(outs), _joined(lses) if want_lse else None

    def _tile(
        self, q: torch.Tensor, low: int, high: int, skip: int, blocks: Blocks
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The largest score [G, TILE, 1] of each row, the sums [G, TILE, V'] of values weighted by exp(score - largest)
        and the sums [G, TILE, 1] of weights. ``low``, ``high``: ends of the first and the last row. ``skip``: rows of
        the first position that are in the tile before."""
        window = self.window
        block, start = self.block, 0 if window is None else max(0, low - window) // self.block
        largest = sums = weight = None
        for number in range(max(start, blocks.first), -(-high // block)):
            at = number * block
            size = _size(min(block, high - at))
            keys, values = blocks.keys[number - blocks.first], blocks.values[number - blocks.first]
            scores = torch.bmm(q, keys[:, :size].transpose(1, 2))
            if self.softcap is not None:
                _apply(torch.Tensor.tanh_, scores.div_(self.softcap)).mul_(self.softcap)
            if at + size > low or (window is not None and at < high - window):
                self._hide(scores, at, low, high, skip)
            top = scores.amax(2, keepdim=True)
            if largest is not None:
                top = torch.maximum(largest, top)
            base = top
            if window is not None and at + block <= high - window:  # rows that have seen nothing yet weigh nothing
                base = top.masked_fill(top == -INF, 0.0)
            _apply(torch.Tensor.exp_, scores.sub_(base))
            part, part_weight = torch.bmm(scores, values[:, :size]), scores.sum(2, keepdim=True)
            if largest is None:
                sums, weight = part, part_weight
            else:
                shrink = largest.sub_(base).exp_()
                sums, weight = part.add_(sums.mul_(shrink)), part_weight.add_(weight.mul_(shrink))
            largest = top
        assert sums is not None, "every row sees its own key"
        return largest, sums, weight

    def _hide(self, scores: torch.Tensor, at: int, low: int, high: int, skip: int) -> None:
        """Take the keys that a row does not see out of its scores [G, TILE, n] of the keys from position ``at``."""
        if low == high:
            scores[:, :, max(0, low - at) :].fill_(-INF)
            if self.window is not None:
                scores[:, :, : max(0, low - self.window - at)].fill_(-INF)
            return
        if self.window is None:
            unseen = scores[:, :, low - at :]
            unseen.masked_fill_(self.later[skip : skip + TILE, : unseen.shape[2]], -INF)
            return
        ends_M1 = (torch.arange(skip, skip + TILE, device=scores.device) // self.share + low)[:, None]
        positions = torch.arange(at, at + scores.shape[2], device=scores.device)
        scores.masked_fill_((positions >= ends_M1) | (positions < ends_M1 - self.window), -INF)

    def _tiles(self, count: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut ``count`` rows into tiles, first row and the row behind, whose last blocks have one number and size."""
        row = 0
        while row < count:
            alike = reach(end + row // self.share, self.block) + 1 - end  # positions up to the last with such a block
            stop = min(row + TILE, count, alike * self.share)
            yield row, stop
            row = stop


def reach(end: int, block: int) -> int:
    """The position behind the last block of a row that sees the keys before ``end``."""
    at = (end - 1) // block * block
    return at + _size(end - at)


def _size(count: int) -> int:
    """The size of a last block in which a row sees ``count`` keys."""
    return next((size for size in SIZES if count <= size), -(-count // SIZES[-1]) * SIZES[-1])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _apply(function: Callable[[torch.Tensor], torch.Tensor], x_GMN: torch.Tensor) -> torch.Tensor:
    """Apply ``function`` in place, in calls that torch does not share among threads."""
    if x_GMN.numel() <= UNSHARED:
        return function(x_GMN)
    for part in x_GMN.split(max(1, UNSHARED // x_GMN[0].numel())):
        function(part)
    return x_GMN


def _dense(x_GND: torch.Tensor, front: int, behind: int, beside: int) -> torch.Tensor:
    """x with so many rows of zeros in front and behind, and so many columns. A view where nothing is added and each
    head's matrix is dense and aligned."""
    addresses = x_GND.data_ptr(), x_GND.stride(0) * x_GND.element_size()
    aligned = all(address % ALIGNMENT == 0 for address in addresses)
    if aligned and not (front or behind or beside) and x_GND.stride()[1:] == (x_GND.shape[2], 1):
        return x_GND
    return F.pad(x_GND, (0, beside, front, behind))
