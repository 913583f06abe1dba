"""Batch-invariant matrix product: a row's bits depend on that row, the weight and the bias, not on the number of rows.

There is one tile shape and one order of summation. The K inputs are cut into ``splits`` runs, a number that the
weight's shape alone decides; each run is summed from zero, and the runs are added in their order. The division of work
may differ, since it changes no bit. For few rows every run is a program of its own, so that the weight streams over the
whole GPU, and a second kernel adds the partial sums. For many rows one program does all runs of its tile and keeps the
sums in registers.

Bytes: N x K x itemsize for few rows. FLOPs: 2 x T x N x K.

Legend: T rows, K inputs, N outputs, S runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl

PROGRAMS = 128  # enough to keep any of today's GPUs streaming; a constant, so that another machine gives the same bits
# blocks of K in a run: shorter ones would only fill and drain the pipeline (and one block's sum may be fused with the
# next)
MIN_STEPS = 4
GROUP_M = 8  # tiles of rows that share a weight's tile while it is in the L2 cache


def matmul_reference(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T + bias: [T, N] in x's dtype, rounded once."""
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    out_TN = x_TK.to(wide) @ weight_NK.to(wide).t()
    return (out_TN if bias_N is None else out_TN + bias_N.to(wide)).to(x_TK.dtype)


@jit
def _run(x_ptr, w_ptr, live, m, n, run, x_row, w_row, w_col, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr,
         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sum of one run of STEPS blocks of inputs, fp32 [BLOCK_M, BLOCK_N]. Blocks past K add nothing but zeros."""
    k = run * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    x = x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w = w_ptr + n.to(tl.int64)[None, :] * w_row + k.to(tl.int64)[:, None] * w_col
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        if K % (STEPS * BLOCK_K) == 0 and N % BLOCK_N == 0:
            a = tl.load(x, mask=live[:, None], other=0.0)
            b = tl.load(w)
        else:
            inside = k < K - step * BLOCK_K
            a = tl.load(x, mask=live[:, None] & inside[None, :], other=0.0)
            b = tl.load(w, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K * w_col
    return acc


@jit(do_not_specialize=["num_rows"])
def _matmul(x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, x_row, w_row, w_col, N: tl.constexpr, K: tl.constexpr,
            STEPS: tl.constexpr,
            SPLITS: tl.constexpr, APART: tl.constexpr, BIAS: tl.constexpr, GROUP_M: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One tile. APART: one run of it, into fp32 out [S, T, N]; else all runs in order, the bias, and out [T, N]."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum((num_rows + BLOCK_M - 1) // BLOCK_M - first, GROUP_M)
    inner = tile % (GROUP_M * tiles_n)
    m = (first + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < num_rows
    keep = live[:, None] & (n < N)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    if APART:
        acc = _run(x_ptr, w_ptr, live, m, n, split, x_row, w_row, w_col, N, K, STEPS, BLOCK_M, BLOCK_N, BLOCK_K)
        tl.store(out_ptr + split.to(tl.int64) * num_rows * N + at, acc, mask=keep)
    else:
        total = _run(x_ptr, w_ptr, live, m, n, 0, x_row, w_row, w_col, N, K, STEPS, BLOCK_M, BLOCK_N, BLOCK_K)
        for run in range(1, SPLITS):
            total += _run(x_ptr, w_ptr, live, m, n, run, x_row, w_row, w_col, N, K, STEPS, BLOCK_M, BLOCK_N, BLOCK_K)
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=keep)


@jit(do_not_specialize=["num_rows"])
def _add_runs(part_ptr, bias_ptr, out_ptr, num_rows, N: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
              BLOCK_N: tl.constexpr):
    """One row, BLOCK_N outputs: the runs [S, T, N] in their order, then the bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.load(part_ptr + row * N + n, mask=n < N, other=0.0)
    for run in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + (run * num_rows + row) * N + n, mask=n < N, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


class Tile(NamedTuple):
    """Rows, outputs and inputs of a tile, its warps and its pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_for(dtype: torch.dtype) -> Tile:
    """The tile of a dtype. fp32 products are not for the tensor core: they live in registers, which hold small tiles
    only."""
    return Tile(32, 32, 32, 4, 2) if dtype == torch.float32 else Tile(128, 128, 64, 8, 4)


def split_runs(num_outputs: int, num_inputs: int, tile: Tile) -> tuple[int, int]:
    """Number of runs that the inputs are cut into, and the blocks of each. Both follow from the weight's shape
    alone."""
    steps = max(1, cdiv(num_inputs, tile.k))
    wanted = max(1, min(PROGRAMS // cdiv(num_outputs, tile.n), steps // MIN_STEPS))
    per_run = cdiv(steps, wanted)
    return cdiv(steps, per_run), per_run


def matmul_invariant(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None,
                     apart: bool | None = None) -> torch.Tensor:
    """x @ weight^T + bias, [T, N] in x's dtype, summed in fp32: a row has the same bits in any batch.

    ``apart``: every run is a program of its own (None: while the tiles alone would not fill the GPU). The bits are the
    same.
    """
    (rows, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    assert weight_NK.shape[1] == inputs and x_TK.dtype == weight_NK.dtype, "the weight does not fit the rows"
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out_TN = torch.empty((rows, outputs), dtype=x_TK.dtype, device=x_TK.device)
    if rows == 0:
        return out_TN
    tile = tile_for(x_TK.dtype)
    splits, steps = split_runs(outputs, inputs, tile)
    tiles = cdiv(rows, tile.m) * cdiv(outputs, tile.n)
    apart = splits > 1 and (tiles < PROGRAMS if apart is None else apart)
    target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x_TK.device) if apart else out_TN
    bias, has_bias = (x_TK, False) if bias_N is None else (bias_N, True)
    _matmul[(tiles, splits if apart else 1)](
        x_TK, weight_NK, bias, target, rows, x_TK.stride(0), *weight_NK.stride(), N=outputs, K=inputs, STEPS=steps,
        SPLITS=splits, APART=apart,
        BIAS=has_bias, GROUP_M=GROUP_M, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps,
        num_stages=tile.stages)
    if apart:
        block_n = min(1024, next_power_of_2(outputs))
        _add_runs[(rows, cdiv(outputs, block_n))](target, bias, out_TN, rows, N=outputs, SPLITS=splits, BIAS=has_bias,
                                                  BLOCK_N=block_n, num_warps=4)
    return out_TN


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    inputs: int
    outputs: int
    bias: bool = False


def grid() -> Iterator[Case]:
    for rows in (0, 1, 2, 31, 33, 130):
        yield Case(rows, 64, 48)
    for inputs, outputs in ((1, 1), (16, 8), (40, 130), (257, 33), (1024, 40), (300, 300), (2048, 16)):
        for rows in (1, 5):
            yield Case(rows, inputs, outputs, bias=rows == 5)
