"""y = x W^T for few rows of x. The time is that of streaming W once, so everything before and after is fused in.

Before: RMS norm of x. Its scale 1 / rms(x) is one factor a row, so it multiplies the result, and the sum of squares is
taken along the way: no program waits for it. After: bias, what adapters add (``kernels.lora``), the gated activation of
a feed-forward block, the residual add.

Rows without an adapter have the same bits whether others have one. Where tensor cores sum, what adapters add is what
the sums begin with, and theirs begin with zeros. Elsewhere it is selected, not added, and joins a row after the
residual, so that the arithmetic before it is the same code.

There are two kernels. For one row, every program multiplies ``block_n`` rows of W with x in fp32 and sums. For up to 64
rows it uses tensor cores, with W as the left operand and the rows of x, padded to 16, 32 or 64, as the right one. Where
N / block_n programs would leave most of the GPU idle, K is split as well, and ``_join`` adds the parts in order: no
atomics, so the same bits every time.

On Hopper a program fetches its first block of W before it waits for the kernel before it (programmatic dependent
launch), which hides launch and start-up.

Bytes: N x K x itemsize. Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O
outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvasir import tuned
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.activation import ACTIVATIONS, KINDS, activate, gated_reference
from kvasir.kernels.lora import RANKS, Pairs, Shrunk, fuses, lora_block, lora_part, lora_row, lora_sums
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.parts import share_of

MAX_ROWS = 64
UNGATED = -1
JOIN = 256  # outputs of a program that adds the parts


@dataclass(frozen=True, slots=True)
class Config:
    """Block shape of a launch. A block of fewer than 16 rows of W is for one row of x and keeps two blocks in
    registers. Others go through shared memory, ``stages`` deep, and may split K in ``splits``."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    splits: int = 1


def gemv_reference(x_TK: torch.Tensor, w_NK: torch.Tensor, *, norm: tuple[torch.Tensor, float] | None = None,
                   bias_N: torch.Tensor | None = None, activation: str | None = None,
                   residual_TO: torch.Tensor | None = None) -> torch.Tensor:
    """[T, O] in x's dtype. ``norm``: weight [K] and eps of an RMS norm of x; ``activation``: gate and up are halves of
    W's rows."""
    x_TK = x_TK if norm is None else rms_norm_reference(x_TK, *norm)
    y = x_TK @ w_NK.t() if bias_N is None else torch.addmm(bias_N, x_TK, w_NK.t())
    y = y if activation is None else gated_reference(y, ACTIVATIONS[activation])
    return y if residual_TO is None else y + residual_TO


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _block(at, live, k, K, WHOLE: tl.constexpr):
    """A block of W. It is read once, and should not evict anything from the L2 cache."""
    if WHOLE:
        w = tl.load(at + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(at + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@jit
def _row(x_ptr, scale_ptr, k, squares, K, WHOLE_K: tl.constexpr, NORM: tl.constexpr):
    """A block of x in fp32, times the norm's weight, and the running squares."""
    if WHOLE_K:
        x = tl.load(x_ptr + k).to(tl.float32)
    else:
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        squares += x * x
        if WHOLE_K:
            x *= tl.load(scale_ptr + k).to(tl.float32)
        else:
            x *= tl.load(scale_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    return x, squares


@jit
def _one_row(x_ptr, w_ptr, y_ptr, scale_ptr, bias_ptr, residual_ptr, b_ptr, s_ptr, slots_ptr, ranks_ptr, present_ptr,
             eps, OUT, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             WHOLE_K: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
             RESIDUAL: tl.constexpr,
             PDL: tl.constexpr, VARIED: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, N: tl.constexpr,
             S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr, RUNS_2: tl.constexpr):
    """``BLOCK_N`` outputs of one row: [BLOCK_N, BLOCK_K] running products, summed at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = n < OUT
    at = w_ptr + n.to(tl.int64)[:, None] * K
    up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = _block(at, live, k, K, WHOLE)
    if KIND >= 0:
        w_up = _block(up_at, live, k, K, WHOLE)
    if VARIED:  # B is on its way, too; and s before the products are summed
        slot = tl.load(slots_ptr) - 1
        held = tl.maximum(slot, 0)
        r = tl.arange(0, R)
        used = (slot >= 0) & (r < tl.load(ranks_ptr + held))
        b_at = b_ptr + (held.to(tl.int64) * N + n)[:, None] * R + r[None, :]
        b = tl.load(b_at, mask=live[:, None] & used[None, :], other=0.0)
        if KIND >= 0:
            b_up = tl.load(b_at + OUT * R, mask=live[:, None] & used[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if VARIED:
        part = lora_part(tl.program_id(0) * BLOCK_N, W0, W1)
        sums = lora_sums(s_ptr, 1, 0, part * R + r, used, C, RUNS, RUNS_2)
        if KIND >= 0:
            sums_up = lora_sums(s_ptr, 1, 0, R + r, used, C, RUNS, RUNS_2)
    last = (K - 1) // BLOCK_K * BLOCK_K
    squares = tl.zeros([BLOCK_K], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    for k0 in range(0, last, BLOCK_K):
        ahead = _block(at, live, k0 + BLOCK_K + k, K, WHOLE)  # is on its way while this block is multiplied
        if KIND >= 0:
            ahead_up = _block(up_at, live, k0 + BLOCK_K + k, K, WHOLE)
        x, squares = _row(x_ptr, scale_ptr, k0 + k, squares, K, WHOLE_K, NORM)
        acc += w.to(tl.float32) * x[None, :]
        w = ahead
        if KIND >= 0:
            acc_up += w_up.to(tl.float32) * x[None, :]
            w_up = ahead_up
    x, squares = _row(x_ptr, scale_ptr, last + k, squares, K, WHOLE_K, NORM)
    acc += w.to(tl.float32) * x[None, :]
    if KIND >= 0:
        acc_up += w_up.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
    if KIND >= 0:
        up = tl.sum(acc_up, 1) * factor
        if BIAS:
            up += tl.load(bias_ptr + OUT + n, mask=live, other=0.0).to(tl.float32)
        if VARIED:
            y = tl.where(slot >= 0, y + tl.sum(b.to(tl.float32) * sums[None, :], 1) * factor, y)
            up = tl.where(slot >= 0, up + tl.sum(b_up.to(tl.float32) * sums_up[None, :], 1) * factor, up)
        y = activate(y, up, KIND)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    if VARIED and KIND < 0:
        y = tl.where(slot >= 0, y + tl.sum(b.to(tl.float32) * sums[None, :], 1) * factor, y)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=live)


@jit
def _rows(x_ptr, scale_ptr, x_row, k, live_m, squares, K, ROWS: tl.constexpr, WHOLE_K: tl.constexpr,
          NORM: tl.constexpr):
    """A block of x^T [BLOCK_K, ROWS] in its dtype, times the norm's weight, and the running sums of squares of its
    rows."""
    at = x_ptr + tl.arange(0, ROWS)[None, :] * x_row + k[:, None]
    if WHOLE_K:
        x = tl.load(at, mask=live_m[None, :], other=0.0)
    else:
        x = tl.load(at, mask=live_m[None, :] & (k < K)[:, None], other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 0)
        if WHOLE_K:
            scale = tl.load(scale_ptr + k).to(tl.float32)
        else:
            scale = tl.load(scale_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = (wide * scale[:, None]).to(x_ptr.dtype.element_ty)
    return x, squares


@jit(do_not_specialize=["rows"])
def _few_rows(x_ptr, w_ptr, y_ptr, part_ptr, squares_ptr, scale_ptr, bias_ptr, residual_ptr, b_ptr, s_ptr, slots_ptr,
              ranks_ptr, present_ptr, eps, rows, x_row, y_row, residual_row, share,
              OUT, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
              SPLIT: tl.constexpr,
              WHOLE_K: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
              RESIDUAL: tl.constexpr, PDL: tl.constexpr, VARIED: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
              N: tl.constexpr, S: tl.constexpr, C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr,
              RUNS_2: tl.constexpr, RANK: tl.constexpr):
    """``BLOCK_N`` outputs of every row: y; or, over ``share`` of K, ``part`` [splits, T, N] fp32 and ``squares``
    [splits, T]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * share
    stop = tl.minimum(start + share, K)
    m = tl.arange(0, ROWS)
    k = start + tl.arange(0, BLOCK_K)
    live, live_m = n < OUT, m < rows
    at = w_ptr + n.to(tl.int64)[:, None] * K
    up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = _block(at, live, k, K, WHOLE)
    if KIND >= 0:
        w_up = _block(up_at, live, k, K, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x, squares = _rows(x_ptr, scale_ptr, x_row, k, live_m, tl.zeros([ROWS], tl.float32), K, ROWS, WHOLE_K, NORM)
    if VARIED and not SPLIT:  # the sums begin with what adapters add; zeros for rows without one
        own = lora_part(tl.program_id(0) * BLOCK_N, W0, W1)
        acc = lora_block(b_ptr, s_ptr, slots_ptr, ranks_ptr, present_ptr, rows, n, live, own, S, N, C, R, RUNS, ROWS,
                         BLOCK_N, RANK)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if KIND >= 0:
            acc_up = lora_block(b_ptr, s_ptr, slots_ptr, ranks_ptr, present_ptr, rows, OUT + n, live, 1, S, N, C, R,
                                RUNS, ROWS, BLOCK_N, RANK)
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")
    else:
        acc = tl.dot(w, x, input_precision="ieee")
        if KIND >= 0:
            acc_up = tl.dot(w_up, x, input_precision="ieee")
    for k0 in tl.range(BLOCK_K, stop - start, BLOCK_K, num_stages=STAGES):
        w = _block(at, live, k0 + k, K, WHOLE)
        x, squares = _rows(x_ptr, scale_ptr, x_row, k0 + k, live_m, squares, K, ROWS, WHOLE_K, NORM)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if KIND >= 0:
            w_up = _block(up_at, live, k0 + k, K, WHOLE)
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")
    finish_rows(acc, acc_up if KIND >= 0 else acc, squares, n, m, y_ptr, part_ptr, squares_ptr, bias_ptr, residual_ptr,
                eps, rows, y_row, residual_row, OUT, K, SPLIT, NORM, BIAS, KIND, RESIDUAL)


@jit
def finish_row(y, up, n, y_ptr, bias_ptr, residual_ptr, OUT, BIAS: tl.constexpr, KIND: tl.constexpr,
               RESIDUAL: tl.constexpr):
    """Finish and store the sums [N] of the outputs n of one row, as ``_one_row`` does."""
    live = n < OUT
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if KIND >= 0:
            up += tl.load(bias_ptr + OUT + n, mask=live, other=0.0).to(tl.float32)
    if KIND >= 0:
        y = activate(y, up, KIND)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=live)


@jit
def finish_rows(acc, acc_up, squares, n, m, y_ptr, part_ptr, squares_ptr, bias_ptr, residual_ptr, eps, rows, y_row,
                residual_row, OUT, K, SPLIT: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
                RESIDUAL: tl.constexpr):
    """Store the sums [N, M] of the outputs n and the rows m as parts of a split, or finish and store them: norm, bias,
    activation, residual."""
    split = tl.program_id(1)
    live, live_m = n < OUT, m < rows
    held = live[:, None] & live_m[None, :]
    if SPLIT:
        N = OUT
        if KIND >= 0:
            N = 2 * OUT
        to = part_ptr + (split * rows + m)[None, :] * N + n[:, None]
        tl.store(to, acc, mask=held)
        if KIND >= 0:
            tl.store(to + OUT, acc_up, mask=held)
        if NORM:
            tl.store(squares_ptr + split * rows + m, squares, mask=live_m & (tl.program_id(0) == 0))
    else:
        if NORM:
            factor = tl.rsqrt(squares / K + eps)[None, :]
            acc *= factor
            if KIND >= 0:
                acc_up *= factor
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)[:, None]
            if KIND >= 0:
                acc_up += tl.load(bias_ptr + OUT + n, mask=live, other=0.0).to(tl.float32)[:, None]
        if KIND >= 0:
            acc = activate(acc, acc_up, KIND)
        if RESIDUAL:
            acc += tl.load(residual_ptr + m[None, :] * residual_row + n[:, None], mask=held, other=0.0).to(tl.float32)
        tl.store(y_ptr + m[None, :] * y_row + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=held)


@jit(do_not_specialize=["rows"])
def _join(part_ptr, squares_ptr, y_ptr, bias_ptr, residual_ptr, b_ptr, s_ptr, slots_ptr, ranks_ptr, eps, rows, y_row,
          residual_row, OUT, K, SPLITS: tl.constexpr,
          BLOCK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
          PDL: tl.constexpr, VARIED: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, N: tl.constexpr,
          C: tl.constexpr, R: tl.constexpr, RUNS: tl.constexpr, RUNS_2: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add the parts of one row, in order, and finish as ``finish_rows`` does."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < OUT
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    squares, factor = 0.0, 1.0
    for split in tl.static_range(SPLITS):
        at = part_ptr + (split * rows + row) * N + n
        y += tl.load(at, mask=live, other=0.0)
        if KIND >= 0:
            up += tl.load(at + OUT, mask=live, other=0.0)
        if NORM:
            squares += tl.load(squares_ptr + split * rows + row)
    if NORM:
        factor = tl.rsqrt(squares / K + eps)
        y *= factor
        up *= factor
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if KIND >= 0:
            up += tl.load(bias_ptr + OUT + n, mask=live, other=0.0).to(tl.float32)
    if VARIED:
        slot = tl.load(slots_ptr + row) - 1
        own = lora_part(tl.program_id(1) * BLOCK, W0, W1)
        added = lora_row(b_ptr, s_ptr, ranks_ptr, slot, rows, row, n, live, own, N, C, R, RUNS, RUNS_2, BLOCK,
                         BLOCK_R) * factor
    if KIND >= 0:
        if VARIED:
            y = tl.where(slot >= 0, y + added, y)
            added = lora_row(b_ptr, s_ptr, ranks_ptr, slot, rows, row, OUT + n, live, 1, N, C, R, RUNS, RUNS_2, BLOCK,
                             BLOCK_R) * factor
            up = tl.where(slot >= 0, up + added, up)
        y = activate(y, up, KIND)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * residual_row + n, mask=live, other=0.0).to(tl.float32)
    if VARIED and KIND < 0:
        y = tl.where(slot >= 0, y + added, y)
    tl.store(y_ptr + row * y_row + n, y.to(y_ptr.dtype.element_ty), mask=live)


def result_of(x_TK: torch.Tensor, outputs: int, residual_TO: torch.Tensor | None, out_TO: torch.Tensor | None,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for a product of so many outputs: that of the residual, which it overwrites, or ``out_TO``, or new memory
    of ``dtype`` (None: x's)."""
    rows = x_TK.shape[0]
    if residual_TO is not None:
        assert residual_TO.shape == (rows, outputs) and residual_TO.stride(1) == 1, "the residual is as the result"
        return residual_TO
    return torch.empty(rows, outputs, dtype=dtype or x_TK.dtype, device=x_TK.device) if out_TO is None else out_TO


def room_for_splits(splits: int, num_rows: int, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for what ``_join`` adds: sums [splits, T, N] and sums of squares [splits, T], both fp32; ``x_TK`` itself
    where nothing is split."""
    if splits == 1:
        return x_TK, x_TK
    new = functools.partial(torch.empty, dtype=torch.float32, device=x_TK.device)
    return new(splits, len(x_TK), num_rows), new(splits, len(x_TK))


def ending(device: torch.device, bias_N: torch.Tensor | None, activation: str | None,
           residual_TO: torch.Tensor | None) -> dict[str, Any]:
    """The constants and options of a launch that say how a product of few rows ends."""
    early = pdl(device)
    return {"BIAS": bias_N is not None, "KIND": UNGATED if activation is None else KINDS[ACTIVATIONS[activation]],
            "RESIDUAL": residual_TO is not None, "PDL": early, "launch_pdl": early}


def gemv(x_TK: torch.Tensor, w_NK: torch.Tensor, config: Config, *, norm: tuple[torch.Tensor, float] | None = None,
         bias_N: torch.Tensor | None = None, activation: str | None = None,
         residual_TO: torch.Tensor | None = None, out_TO: torch.Tensor | None = None,
         shrunk: Shrunk | None = None) -> torch.Tensor:
    """Compute ``gemv_reference`` in one launch (two where K is split). ``residual_TO`` is overwritten with the result,
    and returned. ``out_TO``: memory for the result, of any dtype. ``shrunk``: of x, or with ``norm`` of x times its
    weight: what adapters add before activation, where ``adapters_fit`` says so.

    One row takes the kernel without tensor cores when ``config.block_n`` is below 16, the least that they need.
    """
    (rows, width), num_rows = x_TK.shape, w_NK.shape[0]
    assert rows <= MAX_ROWS and w_NK.shape[1] == width and w_NK.is_contiguous() and x_TK.stride(1) == 1, \
        "a few dense rows"
    outputs = num_rows if activation is None else num_rows // 2
    y_TO = result_of(x_TK, outputs, residual_TO, out_TO)
    if rows == 0:
        return y_TO
    scale, eps = (x_TK, 0.0) if norm is None else norm
    bias = x_TK if bias_N is None else bias_N
    fused = {"NORM": norm is not None, **ending(x_TK.device, bias_N, activation, residual_TO)}
    pairs = None if shrunk is None else shrunk.pairs
    runs = 1 if shrunk is None else len(shrunk.sums_UTC)
    low = {"VARIED": shrunk is not None, "N": num_rows, "C": 1 if pairs is None else pairs.numbers,
           "R": 1 if pairs is None else pairs.rank, "RUNS": runs, "RUNS_2": next_power_of_2(runs),
           "W0": num_rows if pairs is None else pairs.widths[0],
           "W1": 0 if pairs is None else sum(pairs.widths[1:2])}
    added = (x_TK,) * 4 if shrunk is None else (pairs.b_SNR, shrunk.sums_UTC, shrunk.slots_T, pairs.ranks_S)
    assert pairs is None or adapters_fit(pairs, config), "adapters that a kernel of their own adds"
    slots = 1 if pairs is None else len(pairs.ranks_S)
    present = added[3] if shrunk is None or shrunk.by_slot is None else shrunk.by_slot.present_S
    whole = width % config.block_k == 0
    shape = {"OUT": outputs, "K": width, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "WHOLE_K": whole,
             "WHOLE": whole and outputs % config.block_n == 0, "num_warps": config.warps}
    programs = cdiv(outputs, config.block_n)
    assert config.block_n < 16 or shrunk is None or shrunk.by_slot is not None, "tensor cores go by slots"
    if config.block_n < 16:
        assert rows == 1 and config.splits == 1, "blocks below 16 are for one row, unsplit"
        _one_row[(programs,)](x_TK, w_NK, y_TO, scale, bias, y_TO, *added, present, eps, S=slots, **shape, **low,
                              **fused)
        return y_TO
    share, splits = share_of(width, config.block_k, config.splits)
    part, squares = room_for_splits(splits, num_rows, x_TK)
    _few_rows[(programs, splits)](
        x_TK, w_NK, y_TO, part, squares, scale, bias, y_TO, *added, present, eps, rows, x_TK.stride(0), y_TO.stride(0),
        y_TO.stride(0), share, **shape, S=slots, RANK=max(16, low["R"]),
        ROWS=max(16, next_power_of_2(rows)), STAGES=config.stages, SPLIT=splits > 1, **low, **fused)
    if splits > 1:
        join(part, squares, y_TO, bias, eps, width, fused, added, low)
    return y_TO


def join(part_UTN: torch.Tensor, squares: torch.Tensor, y_TO: torch.Tensor, bias: torch.Tensor, eps: float,
         width: int, fused: dict, added: tuple[torch.Tensor, ...] | None = None, low: dict | None = None) -> None:
    """Add the parts of a product whose K was split, in one launch, and finish it as ``fused`` says. ``added`` and
    ``low``: what adapters add; None: nothing."""
    (splits, rows, num_rows), outputs = part_UTN.shape, y_TO.shape[1]
    none = {"VARIED": False, "N": num_rows, "W0": 0, "W1": 0, "C": 1, "R": 1, "RUNS": 1, "RUNS_2": 1}
    low = none if low is None else low
    _join[(rows, cdiv(outputs, JOIN))](
        part_UTN, squares, y_TO, bias, y_TO, *(added or (y_TO,) * 4), eps, rows, y_TO.stride(0), y_TO.stride(0),
        OUT=outputs, K=width, SPLITS=splits, BLOCK=JOIN, BLOCK_R=min(RANKS, low["R"]),
        **low, **fused)


def adapters_fit(pairs: Pairs, config: Config) -> bool:
    """Whether ``gemv`` may add what adapters do: each of its programs has outputs of one part. Where
    tensor cores sum, ``Shrunk.by_slot`` lists the slots of the rows."""
    return fuses(pairs, JOIN if config.splits > 1 else config.block_n)


# -------------------------------------------------------------------------------------------------------------- chooser

# (rows up to, N, K) -> the fastest config; None: the BLAS is faster.
MEASURED = {key: None if shape is None else Config(*shape) for key, shape in tuned.GEMV.value.items()}
STEPS = (1, 2, 4, 8, 16, 32, 64)


def choose(rows: int, num_rows: int, width: int) -> Config | None:
    """Config for a matrix [N, K] and ``rows`` rows of x; None: the BLAS computes the product."""
    if not 0 < rows <= MAX_ROWS or width % 8:
        return None
    step = next(s for s in STEPS if rows <= s)
    return MEASURED[step, num_rows, width] if (step, num_rows, width) in MEASURED else _unmeasured(step, width)


def _unmeasured(rows: int, width: int) -> Config | None:
    """Config for a shape that nobody measured: for one row as many bytes in flight as registers hold, for more the
    BLAS."""
    if rows > 1:
        return None
    return Config(*tuned.look_up(tuned.GEMV_ONE_ROW.value, width=width))


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``outputs`` is O."""

    rows: int
    outputs: int
    width: int
    config: Config
    norm: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False


def grid() -> Iterator[Case]:
    one, few = Config(4, 128, 4), Config(16, 64, 1, 2)
    for norm in (False, True):
        for bias, activation, residual in ((False, None, False), (True, None, True), (False, "silu", False),
                                           (True, "gelu_tanh", True)):
            yield Case(1, 40, 320, one, norm, bias, activation, residual)
            for rows, config in ((3, few), (16, Config(32, 64, 4, 3, splits=3))):
                yield Case(rows, 96, 320, config, norm, bias, activation, residual)
    for config in (one, few, Config(64, 128, 4, 4, splits=2)):  # nothing is a multiple of a block
        yield Case(1, 33, 200, config, norm=True, activation="gelu")
    for rows in (17, 33, 64):
        yield Case(rows, 96, 320, Config(32, 64, 4, 3, splits=2), norm=True, activation="silu", residual=True)
        yield Case(rows, 80, 200, Config(64, 64, 4, 3), bias=True)
    yield Case(1, 16, 64, Config(1, 64, 1))
    yield Case(0, 16, 64, one)
    yield Case(5, 48, 40, Config(16, 64, 2), norm=True)  # K below one block
    yield Case(2, 64, 512, Config(64, 64, 4, 3, splits=16), norm=True, residual=True)
