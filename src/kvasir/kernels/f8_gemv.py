"""y = x W^T for up to 128 rows of x and weights in FP8. The time is that of streaming the codes once.

These are the two kernels of ``kernels.gemv`` with the same work fused in: norm before, bias, gate and residual after,
and the early start. Codes are exact in bf16 and fp32, so the products are those of the weights themselves.

One row: a block's scale depends only on its inputs within one program, so it multiplies x, once a program and in fp32.
Several rows go through tensor cores, where scaling x would round it: there the scale multiplies each block's sums.

Bytes: N x K. Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O outputs, B
outputs and inputs of a scale's block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.activation import ACTIVATIONS, KINDS
from kvasir.kernels.code_tiles import inputs_of
from kvasir.kernels.f8 import F8, dequantise_reference, from_e4m3
from kvasir.kernels.gemv import MAX_ROWS, UNGATED, Config, _rows, finish_row, finish_rows, gemv_reference, join

LAUNCH_ROWS = 2 * MAX_ROWS  # rows of x that one launch takes
SHORTEST = 512  # inputs of a split at least


def f8_gemv_reference(x_TK: torch.Tensor, w: F8, **options: object) -> torch.Tensor:
    """[T, O] in x's dtype: ``gemv_reference`` with the dequantised matrix."""
    return gemv_reference(x_TK, dequantise_reference(w, x_TK.dtype), **options)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _codes(at, live, k, K, WHOLE: tl.constexpr):
    """A block of codes. It is read once, and should not evict anything from the L2 cache."""
    if WHOLE:
        w = tl.load(at + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(at + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
    return w


@jit
def _numbers(words, ASM: tl.constexpr):
    """The numbers fp32 of two codes each: of the even and of the odd inputs."""
    if ASM:
        halves = tl.inline_asm_elementwise("cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [words], dtype=tl.int32, is_pure=True,
                                           pack=1)
        even = (halves & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        odd = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        even = from_e4m3((words & 255).to(tl.uint8), tl.float32)
        odd = from_e4m3((words >> 8).to(tl.uint8), tl.float32)
    return even.to(tl.float32), odd.to(tl.float32)


@jit
def _add_row(acc, w, even, odd, s_at, j, columns, B: tl.constexpr, ASM: tl.constexpr):
    """Add the products of a block of words and the inputs of one row, times the scales of these from ``s_at`` on."""
    if B:
        s = tl.load(s_at + 2 * j // B, mask=j < columns, other=0.0)
        even *= s
        odd *= s
    w_even, w_odd = _numbers(w, ASM)
    acc += w_even * even[None, :]
    acc += w_odd * odd[None, :]
    return acc


@jit
def _row_inputs(x_ptr, scale_ptr, j, columns, squares, WHOLE_K: tl.constexpr, NORM: tl.constexpr):
    """The even and the odd inputs of words j of one row in fp32, times the norm's weight, and the running squares."""
    even, odd = inputs_of(x_ptr, j, columns, 2, WHOLE_K)
    if NORM:
        squares += even * even + odd * odd
        scale, scale_odd = inputs_of(scale_ptr, j, columns, 2, WHOLE_K)
        even *= scale
        odd *= scale_odd
    return even, odd, squares


@jit
def _one_row_f8(x_ptr, w_ptr, w_scale_ptr, y_ptr, scale_ptr, bias_ptr, residual_ptr, eps, OUT, K,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, WHOLE: tl.constexpr,
                B: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
                PDL: tl.constexpr, ASM: tl.constexpr):
    """``BLOCK_N`` outputs of one row: running products of words of two codes, summed at the end. B 0: a scale for each
    output; else ``BLOCK_N`` divides B."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    WORDS: tl.constexpr = BLOCK_K // 2
    j = tl.arange(0, WORDS)
    columns = K // 2
    live = n < OUT
    words = w_ptr.to(tl.pointer_type(tl.int16))
    at = words + n.to(tl.int64)[:, None] * columns
    up_at = words + (n.to(tl.int64) + OUT)[:, None] * columns
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = _codes(at, live, j, columns, WHOLE)
    if KIND >= 0:
        w_up = _codes(up_at, live, j, columns, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    s_at, s_up_at = w_scale_ptr, w_scale_ptr
    if B:
        s_at += first // B * ((K + B - 1) // B)
        s_up_at += (first + OUT) // B * ((K + B - 1) // B)
    last = (columns - 1) // WORDS * WORDS
    squares = tl.zeros([WORDS], tl.float32)
    acc = tl.zeros([BLOCK_N, WORDS], tl.float32)
    acc_up = acc
    for j0 in range(0, last, WORDS):
        ahead = _codes(at, live, j0 + WORDS + j, columns, WHOLE)  # is on its way while this block is multiplied
        if KIND >= 0:
            ahead_up = _codes(up_at, live, j0 + WORDS + j, columns, WHOLE)
        even, odd, squares = _row_inputs(x_ptr, scale_ptr, j0 + j, columns, squares, WHOLE_K, NORM)
        acc = _add_row(acc, w, even, odd, s_at, j0 + j, columns, B, ASM)
        w = ahead
        if KIND >= 0:
            acc_up = _add_row(acc_up, w_up, even, odd, s_up_at, j0 + j, columns, B, ASM)
            w_up = ahead_up
    even, odd, squares = _row_inputs(x_ptr, scale_ptr, last + j, columns, squares, WHOLE_K, NORM)
    acc = _add_row(acc, w, even, odd, s_at, last + j, columns, B, ASM)
    if KIND >= 0:
        acc_up = _add_row(acc_up, w_up, even, odd, s_up_at, last + j, columns, B, ASM)
    y = tl.sum(acc, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y *= factor
    if not B:
        y *= tl.load(w_scale_ptr + n, mask=live, other=0.0)
    up = y
    if KIND >= 0:
        up = tl.sum(acc_up, 1) * factor
        if not B:
            up *= tl.load(w_scale_ptr + OUT + n, mask=live, other=0.0)
    finish_row(y, up, n, y_ptr, bias_ptr, residual_ptr, OUT, BIAS, KIND, RESIDUAL)


@jit(do_not_specialize=["rows"])
def _few_rows_f8(x_ptr, w_ptr, w_scale_ptr, y_ptr, part_ptr, squares_ptr, scale_ptr, bias_ptr, residual_ptr, eps, rows,
                 x_row, y_row, residual_row, share, OUT, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, WHOLE_K: tl.constexpr,
                 WHOLE: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
                 RESIDUAL: tl.constexpr, PDL: tl.constexpr):
    """``BLOCK_N`` outputs of every row: y; or, over ``share`` of K, ``part`` [splits, T, N] fp32 and ``squares``
    [splits, T]. B 0: a scale for each output; else ``BLOCK_N`` and ``BLOCK_K`` divide B."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    start = split * share
    stop = tl.minimum(start + share, K)
    m = tl.arange(0, ROWS)
    k = start + tl.arange(0, BLOCK_K)
    live, live_m = n < OUT, m < rows
    at = w_ptr + n.to(tl.int64)[:, None] * K
    up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * K
    s_at, s_up_at = w_scale_ptr, w_scale_ptr
    if B:
        s_at += first // B * ((K + B - 1) // B)
        s_up_at += (first + OUT) // B * ((K + B - 1) // B)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = _codes(at, live, k, K, WHOLE)
    if KIND >= 0:
        w_up = _codes(up_at, live, k, K, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    dtype = x_ptr.dtype.element_ty
    x, squares = _rows(x_ptr, scale_ptr, x_row, k, live_m, tl.zeros([ROWS], tl.float32), K, ROWS, WHOLE_K, NORM)
    acc = tl.dot(from_e4m3(w, dtype), x, input_precision="ieee")
    if B:
        acc *= tl.load(s_at + start // B)
    if KIND >= 0:
        acc_up = tl.dot(from_e4m3(w_up, dtype), x, input_precision="ieee")
        if B:
            acc_up *= tl.load(s_up_at + start // B)
    for k0 in tl.range(BLOCK_K, stop - start, BLOCK_K, num_stages=STAGES):
        w = _codes(at, live, k0 + k, K, WHOLE)
        x, squares = _rows(x_ptr, scale_ptr, x_row, k0 + k, live_m, squares, K, ROWS, WHOLE_K, NORM)
        if B:
            acc += tl.dot(from_e4m3(w, dtype), x, input_precision="ieee") * tl.load(s_at + (start + k0) // B)
        else:
            acc = tl.dot(from_e4m3(w, dtype), x, acc, input_precision="ieee")
        if KIND >= 0:
            w_up = _codes(up_at, live, k0 + k, K, WHOLE)
            if B:
                up = tl.dot(from_e4m3(w_up, dtype), x, input_precision="ieee")
                acc_up += up * tl.load(s_up_at + (start + k0) // B)
            else:
                acc_up = tl.dot(from_e4m3(w_up, dtype), x, acc_up, input_precision="ieee")
    if not B:
        acc *= tl.load(w_scale_ptr + n, mask=live, other=0.0)[:, None]
        if KIND >= 0:
            acc_up *= tl.load(w_scale_ptr + OUT + n, mask=live, other=0.0)[:, None]
    finish_rows(acc, acc_up if KIND >= 0 else acc, squares, n, m, y_ptr, part_ptr, squares_ptr, bias_ptr, residual_ptr,
                eps, rows, y_row, residual_row, OUT, K, SPLIT, NORM, BIAS, KIND, RESIDUAL)


def f8_gemv(x_TK: torch.Tensor, w: F8, config: Config, *, norm: tuple[torch.Tensor, float] | None = None,
            bias_N: torch.Tensor | None = None, activation: str | None = None,
            residual_TO: torch.Tensor | None = None, out_TO: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``f8_gemv_reference`` in one launch (two where K is split), as ``kernels.gemv.gemv`` does."""
    (rows, width), num_rows = x_TK.shape, w.codes.shape[0]
    assert rows <= LAUNCH_ROWS and w.codes.shape[1] == width and w.codes.is_contiguous() and x_TK.stride(1) == 1, \
        "a few dense rows"
    outputs = num_rows if activation is None else num_rows // 2
    assert residual_TO is None or (residual_TO.shape == (rows, outputs) and residual_TO.stride(1) == 1), \
        "the residual is as the result"
    few = config.block_n >= 16
    assert not w.block or w.block % config.block_n == 0 and (not few or w.block % config.block_k == 0), \
        "a program's weights have one row of scales, and a step of several rows one scale"
    assert not w.block or activation is None or outputs % w.block == 0, "gate and up begin with a block"
    y_TO = residual_TO if residual_TO is not None else out_TO
    if y_TO is None:
        y_TO = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    if rows == 0:
        return y_TO
    scale, eps = (x_TK, 0.0) if norm is None else norm
    bias = x_TK if bias_N is None else bias_N
    early = pdl(x_TK.device)
    fused = {"NORM": norm is not None, "BIAS": bias_N is not None,
             "KIND": UNGATED if activation is None else KINDS[ACTIVATIONS[activation]],
             "RESIDUAL": residual_TO is not None, "PDL": early, "launch_pdl": early}
    whole = width % config.block_k == 0
    shape = {"OUT": outputs, "K": width, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "WHOLE_K": whole,
             "WHOLE": whole and outputs % config.block_n == 0, "B": w.block, "num_warps": config.warps}
    programs = cdiv(outputs, config.block_n)
    if not few:
        assert rows == 1 and config.splits == 1, "blocks below 16 are for one row, unsplit"
        assert width % 2 == 0 and x_TK.data_ptr() % 4 == 0, "two inputs are one word"
        _one_row_f8[(programs,)](x_TK, w.bytes, w.scale, y_TO, scale, bias, y_TO, eps, ASM=not INTERPRETED, **shape,
                                 **fused)
        return y_TO
    share = cdiv(cdiv(width, config.block_k), config.splits) * config.block_k
    splits = cdiv(width, share)  # none of them empty
    part = squares = x_TK
    if splits > 1:
        part = torch.empty(splits, rows, num_rows, dtype=torch.float32, device=x_TK.device)
        squares = torch.empty(splits, rows, dtype=torch.float32, device=x_TK.device)
    _few_rows_f8[(programs, splits)](
        x_TK, w.bytes, w.scale, y_TO, part, squares, scale, bias, y_TO, eps, rows, x_TK.stride(0), y_TO.stride(0),
        y_TO.stride(0), share, **shape,
        ROWS=max(16, next_power_of_2(rows)), STAGES=config.stages, SPLIT=splits > 1, **fused)
    if splits > 1:
        join(part, squares, y_TO, bias, eps, width, fused)
    return y_TO


# -------------------------------------------------------------------------------------------------------------- chooser


def choose(rows: int, num_rows: int, width: int, block: int, gated: bool = False) -> Config:
    """Config for codes [N, K] and ``rows`` rows of x, 1 to 128."""
    least = max(rows, 1 + width % 2)  # the kernel of one row takes pairs of inputs
    block_n, block_k, warps, stages, programs = tuned.look_up(tuned.F8_GEMV.value, rows=least, gated=gated)
    if block_n < 16:
        return Config(block_n, min(block_k, next_power_of_2(width)), warps)
    if block:
        block_n, block_k = min(block_n, block), min(block_k, block)
    outputs, splits = num_rows // 2 if gated else num_rows, 1
    while cdiv(outputs, block_n) * splits < programs and width // (2 * splits) >= SHORTEST:
        splits *= 2
    return Config(block_n, block_k, warps, stages, splits)


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``outputs`` is O; ``block``: of the scales."""

    rows: int
    outputs: int
    width: int
    config: Config
    block: int = 0
    norm: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False


def grid() -> Iterator[Case]:
    one, few = Config(4, 128, 4), Config(16, 32, 1, 2)
    for block in (0, 32):
        yield Case(1, 64, 320, one, block)
        yield Case(1, 64, 320, one, block, norm=True, bias=True, residual=True)
        yield Case(1, 64, 200, one, block, norm=True, activation="silu")
        yield Case(3, 64, 320, few, block)
        yield Case(3, 64, 200, few, block, norm=True, bias=True, residual=True)
        yield Case(16, 96, 320, Config(32, 32, 4, 3, splits=3), block, norm=True, activation="gelu_tanh", bias=True)
        yield Case(33, 48, 96, few, block, residual=True)
    yield Case(1, 33, 200, one, norm=True, activation="gelu")  # nothing is a multiple of a block
    yield Case(1, 70, 100, one, 32)
    yield Case(5, 70, 100, few, 32)
    yield Case(40, 128, 256, Config(32, 128, 4, 3, splits=2), 128, norm=True, activation="silu", residual=True)
    yield Case(70, 48, 96, few, 32, norm=True)
    for block in (0, 128):  # whole warp groups
        yield Case(20, 128, 384, Config(64, 128, 4, 3, splits=2), block, norm=True, bias=True)
    yield Case(0, 16, 64, one)
