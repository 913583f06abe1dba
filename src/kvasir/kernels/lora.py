"""y += B A x for rows of different adapters: each row names the slot of the low-rank pair that it adds, or none.

A product is two kernels: *shrink* makes s = A x, a few numbers a row, in fp32; *expand* adds B s to y. Outputs that
read the same x (q, k and v; gate and up) are *parts* of one launch, each with an A of its own.

There are two forms. Row by row, for steps of few rows: a program multiplies one row with the matrices of its slot, and
where K is long it is cut into runs, whose sums expand adds in their order. The order of summation follows from K alone,
so a row's bits do not depend on its batch; exact mode runs every step so. In tiles, for prompts: rows are sorted by
slot, and a tile has rows of one slot only, for the tensor cores. Which rows a tile has is computed on the device, so
that a captured step may have any mixture.

An A whose rows are one-hot (PaCA) is kept as column numbers, and shrink gathers. A slot of lower rank than the buffers
stops at its own. A row without an adapter is left alone, bit for bit.

Bytes, row by row: 2 r (K + N) itemsize a row, less where rows share a slot in the L2 cache. Legend: T rows, K inputs, N
outputs, S slots, P parts, R rank of the buffers, C = P * R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl

# Most rows of a step that runs row by row. Beyond, reading a slot's matrices once for each row costs more than sorting.
MAX_ROWS = 128
# Inputs of a run. A constant, so that the order of summation depends on K alone.
RUN = 1024
BLOCK_K = 256  # inputs that a program multiplies at a time
BLOCK_N = 256  # outputs of a program, row by row
RANKS = 16  # rows of A that a program multiplies, row by row
TILE_M, TILE_N, TILE_K = 64, 128, 64
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


@dataclass(frozen=True, slots=True)
class Sorted:
    """The rows of a step by slot. ``order_T``: rows, those without an adapter first; ``starts_S`` [S + 1]: where the
    rows of each slot start in it, and T. Both int32."""

    order_T: torch.Tensor
    starts_S: torch.Tensor


def sort_rows(slots_T: torch.Tensor, num_slots: int) -> Sorted:
    """Sort rows by slot; the same calls whatever the rows, so that a graph may capture them. ``slots_T`` int32: 1 + the
    slot of each row; 0: none."""
    ordered_T, order_T = slots_T.sort(stable=True)
    ends = torch.arange(1, num_slots + 2, dtype=torch.int32, device=slots_T.device)
    return Sorted(order_T.int(), torch.searchsorted(ordered_T, ends, out_int32=True))


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


@jit(do_not_specialize=["num_rows"])
def _shrink_rows(x_ptr, a_ptr, columns_ptr, s_ptr, slots_ptr, ranks_ptr, num_rows, x_row, K: tl.constexpr,
                 C: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
                 PDL: tl.constexpr):
    """One run of K for one row: BLOCK_R sums of s [runs, T, C]."""
    row, first, run = tl.program_id(0), tl.program_id(1) * BLOCK_R, tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row) - 1
    live = slot >= 0
    if live:
        live = first % R < tl.load(ranks_ptr + slot)
    if PDL:
        tl.extra.cuda.gdc_wait()  # also where nothing is left to do: the next kernel relies on it
    if live:
        c = first + tl.arange(0, BLOCK_R)
        x = x_ptr + row.to(tl.int64) * x_row
        s = s_ptr + (run * num_rows + row).to(tl.int64) * C + c
        column = tl.load(columns_ptr + slot * C + c)
        if tl.load(columns_ptr + slot * C) >= 0:
            picked = tl.load(x + column, mask=(column >= 0) & (run == 0), other=0.0)
            tl.store(s, picked.to(tl.float32))
        else:
            k = run * RUN + tl.arange(0, BLOCK_K)
            a = a_ptr + (slot.to(tl.int64) * C + c)[:, None] * K
            acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            for k0 in range(0, RUN, BLOCK_K):
                inside = k0 + k < K
                acc += (tl.load(a + (k0 + k)[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                        * tl.load(x + k0 + k, mask=inside, other=0.0).to(tl.float32)[None, :])
            tl.store(s, tl.sum(acc, 1))


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
def _expand_rows(s_ptr, b_ptr, y_ptr, slots_ptr, ranks_ptr, num_rows, y_row, N: tl.constexpr, W0: tl.constexpr,
                 W1: tl.constexpr, W2: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr,
                 BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_N outputs of one row."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row) - 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    if slot >= 0:
        part, first, begin, width = _part(tl.program_id(1), BLOCK_N, W0, W1, W2)
        n = first + tl.arange(0, BLOCK_N)
        inside = n < width
        r = tl.arange(0, BLOCK_R)
        s = s_ptr + row.to(tl.int64) * C + part * R + r
        b = b_ptr + (slot.to(tl.int64) * N + begin + n)[:, None] * R + r[None, :]
        acc = tl.zeros([BLOCK_N], tl.float32)
        for r0 in range(0, tl.load(ranks_ptr + slot), BLOCK_R):
            total = tl.load(s + r0)
            for run in tl.static_range(1, RUNS):
                total += tl.load(s + r0 + (run * num_rows).to(tl.int64) * C)
            acc += tl.sum(tl.load(b + r0, mask=inside[:, None], other=0.0).to(tl.float32) * total[None, :], 1)
        y = y_ptr + row.to(tl.int64) * y_row + begin + n
        acc += tl.load(y, mask=inside, other=0.0).to(tl.float32)
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _tile(tile, starts_ptr, S: tl.constexpr, SLOTS: tl.constexpr, TILE_M: tl.constexpr):
    """The slot of a tile, and the first and end of its rows in the order; slot S: there is no such tile."""
    slot = tl.arange(0, SLOTS)
    start = tl.load(starts_ptr + slot, mask=slot < S, other=0)
    end = tl.load(starts_ptr + slot + 1, mask=slot < S, other=0)
    tiles = (end - start + TILE_M - 1) // TILE_M
    last = tl.cumsum(tiles, 0)
    mine = tl.sum((last <= tile).to(tl.int32), 0)
    here = slot == mine
    first = tl.sum(tl.where(here, start + (tile - last + tiles) * TILE_M, 0), 0)
    return tl.minimum(mine, S), first, tl.sum(tl.where(here, end, 0), 0)


@jit
def _shrink_tiles(x_ptr, a_ptr, columns_ptr, s_ptr, order_ptr, starts_ptr, ranks_ptr, x_row, S: tl.constexpr,
                  SLOTS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
                  TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """TILE_M rows of one slot and BLOCK_R numbers of one part: s [T, C], in the order."""
    slot, first, end = _tile(tl.program_id(0), starts_ptr, S, SLOTS, TILE_M)
    part, r = tl.program_id(1), tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = slot < S
    if live:
        live = tl.program_id(2) * BLOCK_R < tl.load(ranks_ptr + slot)
    if live:
        at = first + tl.arange(0, TILE_M)
        held, inside = at < end, r < R
        row = tl.load(order_ptr + at, mask=held, other=0)
        x = x_ptr + row.to(tl.int64)[:, None] * x_row
        c = part * R + r
        if tl.load(columns_ptr + slot * C) >= 0:
            column = tl.load(columns_ptr + slot * C + c, mask=inside, other=-1)
            picked = tl.load(x + column[None, :], mask=held[:, None] & (column >= 0)[None, :], other=0.0)
            acc = picked.to(tl.float32)
        else:
            k = tl.arange(0, TILE_K)
            a = a_ptr + (slot.to(tl.int64) * C + c)[None, :] * K
            acc = tl.zeros([TILE_M, BLOCK_R], tl.float32)
            for k0 in range(0, K, TILE_K):
                near = k0 + k < K
                acc = tl.dot(tl.load(x + (k0 + k)[None, :], mask=held[:, None] & near[None, :], other=0.0),
                             tl.load(a + (k0 + k)[:, None], mask=near[:, None] & inside[None, :], other=0.0),
                             acc, input_precision="ieee")
        tl.store(s_ptr + at.to(tl.int64)[:, None] * C + c[None, :], acc, mask=held[:, None] & inside[None, :])


@jit
def _expand_tiles(s_ptr, b_ptr, y_ptr, order_ptr, starts_ptr, ranks_ptr, y_row, S: tl.constexpr, SLOTS: tl.constexpr,
                  N: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, C: tl.constexpr,
                  R: tl.constexpr, BLOCK_R: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                  PRECISION: tl.constexpr):
    """TILE_M rows of one slot, TILE_N outputs of one part."""
    slot, first, end = _tile(tl.program_id(1), starts_ptr, S, SLOTS, TILE_M)
    if slot < S:
        part, n0, begin, width = _part(tl.program_id(0), TILE_N, W0, W1, W2)
        n = n0 + tl.arange(0, TILE_N)
        at = first + tl.arange(0, TILE_M)
        held, inside = at < end, n < width
        row = tl.load(order_ptr + at, mask=held, other=0)
        r = tl.arange(0, BLOCK_R)
        s = s_ptr + at.to(tl.int64)[:, None] * C + part * R + r[None, :]
        b = b_ptr + (slot.to(tl.int64) * N + begin + n)[None, :] * R + r[:, None]
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for r0 in range(0, tl.load(ranks_ptr + slot), BLOCK_R):
            near = r0 + r < R
            acc = tl.dot(tl.load(s + r0, mask=held[:, None] & near[None, :], other=0.0),
                         tl.load(b + r0, mask=inside[None, :] & near[:, None], other=0.0).to(tl.float32),
                         acc, input_precision=PRECISION)
        keep = held[:, None] & inside[None, :]
        y = y_ptr + row.to(tl.int64)[:, None] * y_row + begin + n[None, :]
        acc += tl.load(y, mask=keep, other=0.0).to(tl.float32)
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=keep)


def lora_rows(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs, slots_T: torch.Tensor) -> torch.Tensor:
    """Compute ``lora_reference`` row by row: a row's bits depend on the row alone."""
    (rows, width), (_, outputs, rank) = x_TK.shape, pairs.b_SNR.shape
    _check(x_TK, y_TN, pairs)
    if rows == 0:
        return y_TN
    block_r, early = min(RANKS, rank), pdl(x_TK.device)
    runs, numbers = cdiv(width, RUN), rank * len(pairs.widths)
    s = torch.empty(runs, rows, numbers, dtype=torch.float32, device=x_TK.device)
    _shrink_rows[(rows, numbers // block_r, runs)](
        x_TK, pairs.a_SCK, pairs.columns_SC, s, slots_T, pairs.ranks_S, rows, x_TK.stride(0), K=width, C=numbers,
        R=rank, RUN=RUN, BLOCK_R=block_r, BLOCK_K=BLOCK_K, PDL=early, num_warps=4, launch_pdl=early)
    blocks = sum(cdiv(w, BLOCK_N) for w in pairs.widths)
    _expand_rows[(rows, blocks)](
        s, pairs.b_SNR, y_TN, slots_T, pairs.ranks_S, rows, y_TN.stride(0), N=outputs, **_widths(pairs), C=numbers,
        R=rank, RUNS=runs, BLOCK_R=block_r, BLOCK_N=BLOCK_N, PDL=early, num_warps=4, launch_pdl=early)
    return y_TN


def lora_tiles(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs, by_slot: Sorted) -> torch.Tensor:
    """Compute ``lora_reference`` in tiles of rows that share a slot."""
    (rows, width), (slots, outputs, rank) = x_TK.shape, pairs.b_SNR.shape
    _check(x_TK, y_TN, pairs)
    if rows == 0:
        return y_TN
    tiles, numbers = rows // TILE_M + slots, rank * len(pairs.widths)  # every slot may have one that is not full
    block_r = min(64, max(16, rank))
    s = torch.empty(rows, numbers, dtype=torch.float32, device=x_TK.device)
    shared = {"S": slots, "SLOTS": next_power_of_2(slots), "C": numbers, "R": rank, "TILE_M": TILE_M}
    _shrink_tiles[(tiles, len(pairs.widths), cdiv(rank, block_r))](
        x_TK, pairs.a_SCK, pairs.columns_SC, s, by_slot.order_T, by_slot.starts_S, pairs.ranks_S, x_TK.stride(0),
        K=width, BLOCK_R=block_r, TILE_K=TILE_K, **shared, num_warps=4, num_stages=3)
    blocks = sum(cdiv(w, TILE_N) for w in pairs.widths)
    _expand_tiles[(blocks, tiles)](
        s, pairs.b_SNR, y_TN, by_slot.order_T, by_slot.starts_S, pairs.ranks_S, y_TN.stride(0), N=outputs,
        **_widths(pairs), BLOCK_R=min(32, block_r), TILE_N=TILE_N,
        PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32", **shared, num_warps=8)
    return y_TN


def _check(x_TK: torch.Tensor, y_TN: torch.Tensor, pairs: Pairs) -> None:
    assert x_TK.stride(1) == 1 and y_TN.stride(1) == 1 and len(x_TK) == len(y_TN), "rows lie densely"
    assert pairs.a_SCK.is_contiguous() and pairs.b_SNR.is_contiguous(), "slots lie densely"
    assert sum(pairs.widths) == y_TN.shape[1] and len(pairs.widths) <= MAX_PARTS, "parts are the outputs"


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
    yield Case((3, 0, 1) * 50, 72, (40,), ranks=(64, 8, 33), rank=64)
    yield Case((1, 2, 3, 0), 2100, (33, 17), ranks=(8, 8, 5), rank=8, gathered=(1,))  # two runs of K and a rest
    yield Case((2,) * 70 + (1,) * 3, 160, (300, 20, 20), ranks=(128, 100), rank=128, gathered=(0,))
    yield Case((1,) * 65, 64, (130,), ranks=(16,))
