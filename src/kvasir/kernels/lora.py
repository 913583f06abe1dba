"""y += B A x for rows of different adapters: each row names the slot of the low-rank pair that it adds, or none.

A product has two parts. *Shrink* makes s = A x, a few numbers a row, in fp32; *expand* adds B s to y. Outputs that read
the same x (q, k and v; gate and up) are *parts* of one launch, each with an A of its own.

Shrink is a launch of its own. K is cut into runs, whose sums expand adds in their order. It may take x before the norm,
and then leaves the factor 1 / rms(x) to expand. Row by row, for a few rows and in exact mode, the order of summation
follows from K alone, so a row's bits do not depend on its batch. In tiles, rows are sorted by slot, and a tile has rows
of one slot only, for the tensor cores. Which rows a tile has is computed on the device, so that a captured step may
have any mixture.

Expand is the end of the product where ``kernels.gemv`` computes it (``lora_sums``, ``lora_block``, ``lora_row``), and
else a kernel that updates y. After gate and up it applies the activation, too, for rows without an adapter as well.

An A whose rows are one-hot (PaCA) is kept as column numbers, and shrink gathers. A row without an adapter keeps the
bits that it has without this file.

Bytes, row by row: 2 r (K + N) itemsize a row, less where rows share a slot in the L2 cache. Legend: T rows, K inputs, N
outputs, S slots, P parts, R rank of the buffers, C = P * R, U runs of K, O outputs after the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.activation import KINDS, activate

# Most rows of a step that runs row by row. Beyond, reading a slot's matrices once for each row costs more than sorting.
FEW_ROWS = 8
# Most rows whose tiles are small and whose K is cut into runs, so that there are programs enough.
MAX_ROWS = 128
# Inputs of a run, row by row: a program holds its whole block of A in registers, and asks for it before the kernel
# before it has ended. A constant, so that the order of summation depends on K alone.
RUN = 512
TILE_RUN = 1024  # inputs of a run of small tiles
BLOCK_N = 256  # outputs of a program, row by row
RANKS = 16  # rows of A that a program multiplies, row by row, and of B at a time
SMALL_M, SHRINK_M, TILE_M = 16, 32, 64  # rows of a tile: of few rows; of many, in shrink and in expand
TILE_N, TILE_K = 128, 128
FUSED_RANK = 64  # largest rank of buffers that the end of a product takes
HIGH_N = 64  # outputs of a program, row by row, beyond that rank: programs read more, so there are more of them
UNGATED = -1
MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class Pairs:
    """The resident low-rank pairs of one product. ``a_SCK``: the A of each part below the other, padded with zeros to
    rank R; ``b_SNR``: B times its scale; ``columns_SC`` int32: the column that a one-hot row of A picks (-1: a row of
    padding), or -1 in all of a slot whose A is dense; ``ranks_S`` int32: the rank that each slot uses. ``widths``:
    outputs of each part."""

    a_SCK: torch.Tensor
    b_SNR: torch.Tensor
    columns_SC: torch.Tensor
    ranks_S: torch.Tensor
    widths: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b_SNR.shape[2]

    @property
    def numbers(self) -> int:
        """Count of a row's numbers between shrink and expand."""
        return len(self.widths) * self.rank


@dataclass(frozen=True, slots=True)
class Sorted:
    """The rows of a step by slot. ``order_T``: rows, those without an adapter first; ``starts_S`` [S + 1]: where the
    rows of each slot start in it, and T; ``present_S`` [S + 1]: the slots that rows have, and last their number; None
    beyond MAX_ROWS rows. All int32."""

    order_T: torch.Tensor
    starts_S: torch.Tensor
    present_S: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A x of a step's rows, for whatever adds B times it. ``sums_UTC`` fp32: of each run of K; rows without an adapter
    hold anything. ``by_slot``: None where rows go one by one, however many."""

    sums_UTC: torch.Tensor
    pairs: Pairs
    slots_T: torch.Tensor
    by_slot: Sorted | None


def sort_rows(slots_T: torch.Tensor, num_slots: int) -> Sorted:
    """Sort rows by slot; the same calls whatever the rows, so that a graph may capture them. ``slots_T`` int32: 1 + the
    slot of each row; 0: none."""
    ordered_T, order_T = slots_T.sort(stable=True)
    ends = torch.arange(1, num_slots + 2, dtype=torch.int32, device=slots_T.device)
    return Sorted(order_T.int(), torch.searchsorted(ordered_T, ends, out_int32=True))


def sort_few_rows(slots_T: torch.Tensor, num_slots: int) -> Sorted:
    """Do what ``sort_rows`` does for up to MAX_ROWS rows in one launch, and list the slots that rows have."""
    rows = len(slots_T)
    assert rows <= MAX_ROWS, "more rows are sorted by torch"
    room = cdiv(num_slots + 1, 4) * 4  # aligned to 16 bytes
    memory = slots_T.new_empty(2 * room + rows)
    starts_S, present_S, order_T = memory[: num_slots + 1], memory[room : room + num_slots + 1], memory[2 * room :]
    _sort_few[(1,)](slots_T, order_T, starts_S, present_S, rows, S=num_slots, ROWS=max(16, next_power_of_2(rows)),
                    SLOTS=max(16, next_power_of_2(num_slots + 1)), num_warps=8)
    return Sorted(order_T, starts_S, present_S)


def wide_of(x: torch.Tensor) -> torch.dtype:
    """The dtype between shrink and expand: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lora_reference(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs, slots_T: torch.Tensor) -> torch.Tensor:
    """Add B A x of each row's slot to ``y_TN``, and return it. Reads the slots on the host."""
    wide = wide_of(x_TK)
    for slot in sorted(set(slots_T.tolist()) - {0}):
        rows = (slots_T == slot).nonzero()[:, 0]
        x, delta = x_TK[rows].to(wide), []
        shrunk = (x @ pairs.a_SCK[slot - 1].to(wide).t()).split(pairs.rank, 1)
        for s, b in zip(shrunk, pairs.b_SNR[slot - 1].split(pairs.widths)):
            delta.append(s @ b.to(wide).t())
        y_TN[rows] = (y_TN[rows].to(wide) + torch.cat(delta, 1)).to(y_TN.dtype)
    return y_TN


def lora_static(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs, slots_T: torch.Tensor) -> torch.Tensor:
    """Do what ``lora_reference`` does by calls that depend on shapes alone, so that a tape may repeat them. Gathers the
    matrices of every row: for few rows."""
    wide = wide_of(x_TK)
    at_T, parts = (slots_T - 1).clamp(min=0).long(), len(pairs.widths)
    s_TC = torch.bmm(pairs.a_SCK.index_select(0, at_T).to(wide), x_TK.to(wide)[:, :, None])[:, :, 0]
    b_TNR = pairs.b_SNR.index_select(0, at_T).to(wide)
    s_TPR = s_TC.view(-1, parts, pairs.rank)
    pieces = [torch.bmm(b, s_TPR[:, p, :, None])[:, :, 0] for p, b in enumerate(b_TNR.split(pairs.widths, 1))]
    added_TN = (y_TN.to(wide) + torch.cat(pieces, 1)).to(y_TN.dtype)
    y_TN.copy_(torch.where((slots_T > 0)[:, None], added_TN, y_TN))
    return y_TN


# -------------------------------------------------------------------------------------------------------------- kernels


@jit(do_not_specialize=["rows"])
def _sort_few(slots_ptr, order_ptr, starts_ptr, present_ptr, rows, S: tl.constexpr, ROWS: tl.constexpr,
              SLOTS: tl.constexpr):
    """One program. Every row counts those that come before it."""
    i, s = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    mine = tl.load(slots_ptr + i, mask=i < rows, other=S + 1)
    before = (mine[None, :] < mine[:, None]) | ((mine[None, :] == mine[:, None]) & (i[None, :] < i[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), i, mask=i < rows)
    starts = tl.sum((mine[None, :] <= s[:, None]).to(tl.int32), 1)
    tl.store(starts_ptr + s, starts, mask=s <= S)
    here = (tl.sum((mine[None, :] == s[:, None] + 1).to(tl.int32), 1) > 0) & (s < S)
    last = tl.cumsum(here.to(tl.int32), 0)
    tl.store(present_ptr + last - 1, s, mask=here)
    tl.store(present_ptr + S, tl.sum(here.to(tl.int32), 0))


@jit(do_not_specialize=["num_rows"])
def _shrink_rows(x_ptr, a_ptr, columns_ptr, s_ptr, slots_ptr, ranks_ptr, scale_ptr, num_rows, x_row, K: tl.constexpr,
                 C: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
                 NORM: tl.constexpr, PDL: tl.constexpr):
    """One run of K for one row: BLOCK_R sums of s [runs, T, C]."""
    row, first, run = tl.program_id(0), tl.program_id(1) * BLOCK_R, tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row) - 1
    held = tl.maximum(slot, 0)
    live = (slot >= 0) & (first % R < tl.load(ranks_ptr + held))
    c, k = first + tl.arange(0, BLOCK_R), run * RUN + tl.arange(0, BLOCK_K)
    inside = k < K
    column = tl.load(columns_ptr + held * C + c)
    gathers = tl.load(columns_ptr + held * C) >= 0
    a = tl.load(a_ptr + (held.to(tl.int64) * C + c)[:, None] * K + k[None, :],
                mask=inside[None, :] & live & (not gathers), other=0.0)
    if NORM:
        scale = tl.load(scale_ptr + k, mask=inside & live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()  # also where nothing is left to do: the next kernel relies on it
    if live:
        x = x_ptr + row.to(tl.int64) * x_row
        if gathers:
            mine = (column >= 0) & (run == 0)
            sums = tl.load(x + column, mask=mine, other=0.0).to(tl.float32)
            if NORM:
                sums *= tl.load(scale_ptr + column, mask=mine, other=0.0).to(tl.float32)
        else:
            values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                values *= scale
            sums = tl.sum(a.to(tl.float32) * values[None, :], 1)
        tl.store(s_ptr + (run * num_rows + row).to(tl.int64) * C + c, sums)


@jit
def lora_part(n, W0: tl.constexpr, W1: tl.constexpr):
    """The part that output n belongs to."""
    return (n >= W0).to(tl.int32) + (n >= W0 + W1).to(tl.int32)


@jit
def lora_sums(s_ptr, rows, row, c, keep, C: tl.constexpr, RUNS: tl.constexpr, RUNS_2: tl.constexpr):
    """The numbers c of one row: sums over all runs, in their order."""
    u = tl.arange(0, RUNS_2)
    at = s_ptr + (u[:, None] * rows + row).to(tl.int64) * C + c[None, :]
    return tl.sum(tl.load(at, mask=(u < RUNS)[:, None] & keep[None, :], other=0.0), 0)


@jit
def lora_row(b_ptr, s_ptr, ranks_ptr, slot, rows, row, n, live, part, N: tl.constexpr, C: tl.constexpr,
             R: tl.constexpr, RUNS: tl.constexpr, RUNS_2: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums that the adapter of one row adds to its outputs n [BLOCK], which are of one part; of no slot: zeros."""
    added = tl.zeros([BLOCK], tl.float32)
    held = tl.maximum(slot, 0)
    rank = tl.where(slot >= 0, tl.load(ranks_ptr + held), 0)
    at = b_ptr + (held.to(tl.int64) * N + n)[:, None] * R
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        sums = lora_sums(s_ptr, rows, row, part * R + r, r < rank, C, RUNS, RUNS_2)
        b = tl.load(at + r[None, :], mask=live[:, None] & (r < rank)[None, :], other=0.0).to(tl.float32)
        added += tl.sum(b * sums[None, :], 1)
    return added


@jit
def lora_block(b_ptr, s_ptr, slots_ptr, ranks_ptr, present_ptr, rows, n, live, part, S: tl.constexpr,
               N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_N: tl.constexpr, RANK: tl.constexpr):
    """The sums that the adapters of up to ROWS rows add to outputs n [BLOCK_N] of one part: [BLOCK_N, ROWS]. RANK:
    that of the buffers, at least 16.

    A product for each slot that rows have, in which the rows of other slots are zeros. s becomes two numbers of B's
    type, the rounded one and the rest, so that little is lost.
    """
    m, r = tl.arange(0, ROWS), tl.arange(0, RANK)
    own = tl.load(slots_ptr + m, mask=m < rows, other=0) - 1
    used = r[:, None] < tl.load(ranks_ptr + own, mask=own >= 0, other=0)[None, :]
    at = s_ptr + m[None, :] * C + (part * R + r)[:, None]
    sums = tl.load(at, mask=used, other=0.0)
    for run in tl.static_range(1, RUNS):
        sums += tl.load(at + run * rows * C, mask=used, other=0.0)
    high = sums.to(b_ptr.dtype.element_ty)
    low = (sums - high.to(tl.float32)).to(b_ptr.dtype.element_ty)
    nothing = tl.zeros([RANK, ROWS], b_ptr.dtype.element_ty)
    added = tl.zeros([BLOCK_N, ROWS], tl.float32)
    b_at = b_ptr + n[:, None] * R + r[None, :]
    inside = live[:, None] & (r < R)[None, :]
    for i in tl.range(0, tl.load(present_ptr + S), num_stages=3):
        slot = tl.load(present_ptr + i)
        b = tl.load(b_at + slot.to(tl.int64) * (N * R), mask=inside, other=0.0)
        mine = (own == slot)[None, :]
        added = tl.dot(b, tl.where(mine, high, nothing), added, input_precision="ieee")
        if b_ptr.dtype.element_ty != tl.float32:
            added = tl.dot(b, tl.where(mine, low, nothing), added, input_precision="ieee")
    return added


@jit
def _part(block, BLOCK: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):
    """The part that a block of outputs belongs to, its first output there, and where the part begins and its width."""
    blocks_0: tl.constexpr = (W0 + BLOCK - 1) // BLOCK
    blocks_1: tl.constexpr = (W1 + BLOCK - 1) // BLOCK
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    block -= tl.where(part > 0, blocks_0, 0) + tl.where(part > 1, blocks_1, 0)
    begin = tl.where(part > 0, W0, 0) + tl.where(part > 1, W1, 0)
    width = tl.where(part == 0, W0, tl.where(part == 1, W1, W2))
    return part, block * BLOCK, begin, width


@jit(do_not_specialize=["num_rows"])
def _expand_rows(s_ptr, b_ptr, y_ptr, out_ptr, slots_ptr, ranks_ptr, num_rows, y_row, out_row, N: tl.constexpr,
                 W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                 RUNS: tl.constexpr, RUNS_2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
                 KIND: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_N outputs of one row."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row) - 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    if KIND >= 0 or slot >= 0:
        part, first, begin, width = _part(tl.program_id(1), BLOCK_N, W0, W1, W2)
        n = begin + first + tl.arange(0, BLOCK_N)
        inside = n < begin + width
        y = y_ptr + row.to(tl.int64) * y_row + n
        acc = tl.load(y, mask=inside, other=0.0).to(tl.float32)
        added = lora_row(b_ptr, s_ptr, ranks_ptr, slot, num_rows, row, n, inside, part, N, C, R, RUNS, RUNS_2, BLOCK_N,
                         BLOCK_R)
        acc = tl.where(slot >= 0, acc + added, acc)
        if KIND >= 0:
            up = tl.load(y + W0, mask=inside, other=0.0).to(tl.float32)
            added = lora_row(b_ptr, s_ptr, ranks_ptr, slot, num_rows, row, W0 + n, inside, 1, N, C, R, RUNS, RUNS_2,
                             BLOCK_N, BLOCK_R)
            acc = activate(acc, tl.where(slot >= 0, up + added, up), KIND)
        tl.store(out_ptr + row.to(tl.int64) * out_row + n, acc.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _tile(tile, starts_ptr, S: tl.constexpr, SLOTS: tl.constexpr, TILE_M: tl.constexpr, ALL: tl.constexpr):
    """The slot of a tile (-1: of rows without an adapter, only if ALL), the first and end of its rows in the order, and
    whether there is such a tile."""
    group = tl.arange(0, SLOTS)
    start = tl.load(starts_ptr + group - 1, mask=(group > 0) & (group <= S), other=0)
    end = tl.load(starts_ptr + group, mask=group <= S, other=0)
    if not ALL:
        end = tl.where(group == 0, 0, end)
    tiles = (end - start + TILE_M - 1) // TILE_M
    last = tl.cumsum(tiles, 0)
    mine = tl.sum((last <= tile).to(tl.int32), 0)
    here = group == mine
    first = tl.sum(tl.where(here, start + (tile - last + tiles) * TILE_M, 0), 0)
    return mine - 1, first, tl.sum(tl.where(here, end, 0), 0), mine <= S


@jit(do_not_specialize=["rows"])
def _shrink_tiles(x_ptr, a_ptr, columns_ptr, s_ptr, order_ptr, starts_ptr, ranks_ptr, scale_ptr, rows, x_row,
                  S: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                  RUN: tl.constexpr, BLOCK_C: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
                  NORM: tl.constexpr, PDL: tl.constexpr):
    """One run of K for TILE_M rows of one slot and BLOCK_C numbers: s [runs, T, C]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot, first, end, live = _tile(tl.program_id(0), starts_ptr, S, SLOTS, TILE_M, False)
    run = tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    if live:
        live = tl.program_id(1) * BLOCK_C % R < tl.load(ranks_ptr + slot)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if live:
        at = first + tl.arange(0, TILE_M)
        held = at < end
        row = tl.load(order_ptr + at, mask=held, other=0).to(tl.int64)
        x = x_ptr + row[:, None] * x_row
        if tl.load(columns_ptr + slot * C) >= 0:
            column = tl.load(columns_ptr + slot * C + c, mask=inside & (run == 0), other=-1)
            mine = held[:, None] & (column >= 0)[None, :]
            acc = tl.load(x + column[None, :], mask=mine, other=0.0).to(tl.float32)
            if NORM:
                acc *= tl.load(scale_ptr + column, mask=column >= 0, other=0.0).to(tl.float32)[None, :]
        else:
            k = run * RUN + tl.arange(0, TILE_K)
            a = a_ptr + (slot.to(tl.int64) * C + c)[None, :] * K
            acc = tl.zeros([TILE_M, BLOCK_C], tl.float32)
            for k0 in range(0, RUN, TILE_K):
                near = k0 + k < K
                part = tl.load(x + (k0 + k)[None, :], mask=held[:, None] & near[None, :], other=0.0)
                if NORM:
                    scale = tl.load(scale_ptr + k0 + k, mask=near, other=0.0).to(tl.float32)
                    part = (part.to(tl.float32) * scale[None, :]).to(x_ptr.dtype.element_ty)
                acc = tl.dot(part, tl.load(a + (k0 + k)[:, None], mask=near[:, None] & inside[None, :], other=0.0),
                             acc, input_precision="ieee")
        tl.store(s_ptr + (run * rows + row)[:, None] * C + c[None, :], acc, mask=held[:, None] & inside[None, :])


@jit
def _tile_sums(b_ptr, s_ptr, ranks_ptr, slot, rows, row, held, n, inside, part, N: tl.constexpr, C: tl.constexpr,
               R: tl.constexpr, RUNS: tl.constexpr, BLOCK_R: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
               PRECISION: tl.constexpr):
    """The sums that a slot adds to outputs n of one part of a tile's rows: [TILE_M, TILE_N]; of no slot: zeros."""
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    known = tl.maximum(slot, 0)
    rank = tl.where(slot >= 0, tl.load(ranks_ptr + known), 0)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        near = r < rank
        at = s_ptr + row[:, None] * C + (part * R + r)[None, :]
        keep = held[:, None] & near[None, :]
        sums = tl.load(at, mask=keep, other=0.0)
        for run in tl.static_range(1, RUNS):
            sums += tl.load(at + (run * rows).to(tl.int64) * C, mask=keep, other=0.0)
        b = tl.load(b_ptr + (known.to(tl.int64) * N + n)[None, :] * R + r[:, None],
                    mask=inside[None, :] & near[:, None], other=0.0)
        acc = tl.dot(sums, b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@jit(do_not_specialize=["rows"])
def _expand_tiles(s_ptr, b_ptr, y_ptr, out_ptr, order_ptr, starts_ptr, ranks_ptr, rows, y_row, out_row,
                  S: tl.constexpr, SLOTS: tl.constexpr, N: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
                  W2: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr, BLOCK_R: tl.constexpr,
                  TILE_M: tl.constexpr, TILE_N: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
                  PDL: tl.constexpr):
    """TILE_M rows of one slot, TILE_N outputs of one part; with an activation, also of the rows without a slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot, first, end, live = _tile(tl.program_id(1), starts_ptr, S, SLOTS, TILE_M, KIND >= 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if live:
        part, n0, begin, width = _part(tl.program_id(0), TILE_N, W0, W1, W2)
        n = begin + n0 + tl.arange(0, TILE_N)
        at = first + tl.arange(0, TILE_M)
        held, inside = at < end, n < begin + width
        row = tl.load(order_ptr + at, mask=held, other=0).to(tl.int64)
        keep = held[:, None] & inside[None, :]
        y = y_ptr + row[:, None] * y_row + n[None, :]
        acc = tl.load(y, mask=keep, other=0.0).to(tl.float32)
        added = _tile_sums(b_ptr, s_ptr, ranks_ptr, slot, rows, row, held, n, inside, part, N, C, R, RUNS, BLOCK_R,
                           TILE_M, TILE_N, PRECISION)
        acc = tl.where(slot >= 0, acc + added, acc)
        if KIND >= 0:
            up = tl.load(y + W0, mask=keep, other=0.0).to(tl.float32)
            added = _tile_sums(b_ptr, s_ptr, ranks_ptr, slot, rows, row, held, W0 + n, inside, 1, N, C, R, RUNS,
                               BLOCK_R, TILE_M, TILE_N, PRECISION)
            acc = activate(acc, tl.where(slot >= 0, up + added, up), KIND)
        out = out_ptr + row[:, None] * out_row + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep)


# ------------------------------------------------------------------------------------------------------------- launches


def goes_by_row(rows: int, pairs: Pairs, by_slot: Sorted | None) -> bool:
    """Whether each row reads its slot's matrices by itself. At high ranks tiles are faster from two rows on."""
    return by_slot is None or rows <= (FEW_ROWS if pairs.rank <= FUSED_RANK else 1)


def fuses(pairs: Pairs, block_n: int) -> bool:
    """Whether a product whose programs have ``block_n`` outputs may end in expand: each program has one part."""
    return pairs.rank <= FUSED_RANK and (len(pairs.widths) == 1 or all(w % block_n == 0 for w in pairs.widths))


def shrink(x_TK: torch.Tensor, pairs: Pairs, slots_T: torch.Tensor, by_slot: Sorted | None = None,
           scale_K: torch.Tensor | None = None, early: bool | None = None) -> Shrunk:
    """Compute A x of each row's slot; with ``scale_K``, the weight of an RMS norm, A (x * scale). ``by_slot``: in
    tiles, beyond FEW_ROWS rows; None: row by row. ``early`` False: the kernel waits for the one before it, which wrote
    ``by_slot``."""
    (rows, width), numbers = x_TK.shape, pairs.numbers
    assert x_TK.stride(1) == 1 and pairs.a_SCK.is_contiguous() and pairs.b_SNR.is_contiguous(), "rows lie densely"
    assert len(pairs.widths) <= MAX_PARTS, "too many parts"
    small, tiles = rows <= MAX_ROWS, not goes_by_row(rows, pairs, by_slot)
    run = RUN if not tiles else TILE_RUN if small else width
    runs = cdiv(width, run)
    s = torch.empty(runs, rows, numbers, dtype=torch.float32, device=x_TK.device)
    shrunk = Shrunk(s, pairs, slots_T, by_slot)
    if rows == 0:
        return shrunk
    scale = x_TK if scale_K is None else scale_K
    shared = {"K": width, "C": numbers, "R": pairs.rank, "NORM": scale_K is not None}
    early = pdl(x_TK.device) if early is None else early
    if not tiles:
        block_r = min(RANKS, pairs.rank)
        _shrink_rows[(rows, numbers // block_r, runs)](
            x_TK, pairs.a_SCK, pairs.columns_SC, s, slots_T, pairs.ranks_S, scale, rows, x_TK.stride(0), RUN=run,
            BLOCK_R=block_r, BLOCK_K=min(run, next_power_of_2(width)), **shared, PDL=early, num_warps=4,
            launch_pdl=early)
        return shrunk
    tile_m, slots = SMALL_M if small else SHRINK_M, len(pairs.ranks_S)
    block_c = min(16 if small else 64, max(16, next_power_of_2(numbers)))
    early = early and small
    _shrink_tiles[(_tiles(rows, slots, tile_m), cdiv(numbers, block_c), runs)](
        x_TK, pairs.a_SCK, pairs.columns_SC, s, by_slot.order_T, by_slot.starts_S, pairs.ranks_S, scale, rows,
        x_TK.stride(0), S=slots, SLOTS=next_power_of_2(slots + 1), RUN=min(run, cdiv(width, TILE_K) * TILE_K),
        BLOCK_C=block_c, TILE_M=tile_m, TILE_K=TILE_K, **shared, PDL=early, num_warps=4, num_stages=3,
        launch_pdl=early)
    return shrunk


def expand(shrunk: Shrunk, y_TN: torch.Tensor, activation: Callable[..., torch.Tensor] | None = None,
           out_TO: torch.Tensor | None = None) -> torch.Tensor:
    """Add B times ``shrunk`` to ``y_TN``, and return it; with ``activation`` (of ``activation.KINDS``), write that of
    gate and up to ``out_TO``, for every row, and return that."""
    pairs, by_slot, (runs, rows, numbers) = shrunk.pairs, shrunk.by_slot, shrunk.sums_UTC.shape
    out_TO = y_TN if activation is None else out_TO
    assert y_TN.stride(1) == 1 and out_TO.stride(1) == 1 and len(y_TN) == rows, "rows lie densely"
    assert sum(pairs.widths) == y_TN.shape[1] and pairs.rank >= 8, "parts are the outputs"
    if rows == 0:
        return out_TO
    widths = pairs.widths if activation is None else pairs.widths[:1]
    assert activation is None or (len(pairs.widths) == 2 and out_TO.shape[1] * 2 == y_TN.shape[1]), "gate and up"
    kind, early = UNGATED if activation is None else KINDS[activation], pdl(y_TN.device) and rows <= MAX_ROWS
    shared = {**_widths(pairs), "N": y_TN.shape[1], "C": numbers, "R": pairs.rank, "RUNS": runs, "KIND": kind,
              "PDL": early, "launch_pdl": early}
    if goes_by_row(rows, pairs, by_slot):
        block_n = BLOCK_N if pairs.rank <= FUSED_RANK else HIGH_N
        _expand_rows[(rows, sum(cdiv(w, block_n) for w in widths))](
            shrunk.sums_UTC, pairs.b_SNR, y_TN, out_TO, shrunk.slots_T, pairs.ranks_S, rows, y_TN.stride(0),
            out_TO.stride(0), RUNS_2=next_power_of_2(runs), BLOCK_R=min(RANKS, pairs.rank), BLOCK_N=block_n, **shared,
            num_warps=4)
        return out_TO
    tile_m, slots = SMALL_M if rows <= MAX_ROWS else TILE_M, len(pairs.ranks_S)
    tiles = _tiles(rows, slots + (activation is not None), tile_m)
    _expand_tiles[(sum(cdiv(w, TILE_N) for w in widths), tiles)](
        shrunk.sums_UTC, pairs.b_SNR, y_TN, out_TO, by_slot.order_T, by_slot.starts_S, pairs.ranks_S, rows,
        y_TN.stride(0), out_TO.stride(0), S=slots, SLOTS=next_power_of_2(slots + 1),
        BLOCK_R=min(32, max(16, pairs.rank)), TILE_M=tile_m, TILE_N=TILE_N,
        PRECISION="ieee" if y_TN.dtype == torch.float32 and pairs.b_SNR.dtype == torch.float32 else "tf32", **shared,
        num_warps=4 if rows <= MAX_ROWS else 8)
    return out_TO


def lora_rows(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs, slots_T: torch.Tensor) -> torch.Tensor:
    """Compute ``lora_reference`` row by row: a row's bits depend on the row alone."""
    return expand(shrink(x_TK, pairs, slots_T), y_TN)


def _tiles(rows: int, groups: int, tile_m: int) -> int:
    """The most tiles that rows of so many groups may have: each group may have one that is not full."""
    return min(rows, rows // tile_m + groups)


def _widths(pairs: Pairs) -> dict[str, int]:
    return dict(zip(("W0", "W1", "W2"), (*pairs.widths, 0, 0)))


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``slots``: 1 + the slot of each row; ``ranks``: of each slot; ``gathered``: slots
    whose A is one-hot."""

    slots: tuple[int, ...]
    width: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...] = (8, 16)
    rank: int = 16
    gathered: tuple[int, ...] = field(default=())


def grid() -> Iterator[Case]:
    yield Case((), 64, (32,))
    yield Case((0, 0), 64, (32,))
    yield Case((1,), 64, (32,))
    yield Case((2, 0, 1, 1, 2), 320, (48, 16, 16))
    yield Case((1, 2) * 40 + (0,) * 9 + (1,), 96, (64, 64))  # tiles that are not full
    yield Case((3, 0, 1) * 43, 72, (40,), ranks=(64, 8, 33), rank=64)
    yield Case((1, 2, 3, 0), 2100, (33, 17), ranks=(8, 8, 5), rank=8, gathered=(1,))  # two runs of K and a rest
    yield Case((2,) * 5 + (1,) * 3, 160, (140, 20, 20), ranks=(128, 100), rank=128, gathered=(0,))
    yield Case((1,) * 65, 64, (130,), ranks=(16,))
