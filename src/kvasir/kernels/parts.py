"""Products whose K is split among programs: the program of a tile that is done last adds all parts, in order.

So the bits do not depend on which program that is, and no second kernel is launched. A tile has a counter (its
*tickets*), which is zero before and after each kernel.

Legend: N outputs of a tile, M rows of a tile.
"""

from __future__ import annotations

import functools

import torch

from kvasir.kernels._triton import cdiv, jit, tl

SHORTEST = 512  # inputs of a split at least
MAX_TILES = 1 << 14  # of a product whose K is split: it has far fewer tiles than this, or it would not be split


def splits_for(tiles: int, width: int, programs: int) -> int:
    """Splits of K, a power of two, that give ``tiles`` of outputs so many programs, or as many as K is long enough
    for."""
    splits = 1
    while tiles * splits < programs and width // (2 * splits) >= SHORTEST:
        splits *= 2
    return splits


def share_of(width: int, step: int, splits: int) -> tuple[int, int]:
    """The part of K that each of up to ``splits`` programs takes, in whole steps, and how many programs that makes:
    none has nothing to do."""
    share = cdiv(cdiv(width, step), splits) * step
    return share, cdiv(width, share)


@functools.cache
def tickets_of(device: torch.device) -> torch.Tensor:
    """The counters of a device, int32 [MAX_TILES]. Products share them: they run one after the other, on one stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def room_for_parts(tiles: int, splits: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for the parts of all tiles, fp32 [tiles, splits, size]; ``like`` itself where nothing is split."""
    assert splits == 1 or tiles <= MAX_TILES, "a counter a tile"
    return like if splits == 1 else torch.empty(tiles, splits, size, dtype=torch.float32, device=like.device)


@jit
def add_parts(acc, acc_up, part_ptr, tickets_ptr, GATED: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
              SPLITS: tl.constexpr):
    """Store the sums [N, M] of a split, of the gate and of the up half where they are gated. In the program that is
    done last, return (True, the sums of all splits): tile and split are the program's first and second number."""
    tile, split = tl.program_id(0), tl.program_id(1)
    SIZE: tl.constexpr = N * M * (2 if GATED else 1)
    inside = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    first = part_ptr + tile.to(tl.int64) * SPLITS * SIZE + inside
    tl.store(first + split * SIZE, acc)
    if GATED:
        tl.store(first + split * SIZE + N * M, acc_up)
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros([N, M], tl.float32)
        acc_up = acc
        for i in tl.static_range(SPLITS):
            acc += tl.load(first + i * SIZE)
            if GATED:
                acc_up += tl.load(first + i * SIZE + N * M)
        tl.store(tickets_ptr + tile, 0)
    return last, acc, acc_up
