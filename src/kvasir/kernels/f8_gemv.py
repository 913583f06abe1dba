"""y = x W^T for up to 128 rows of x and weights in FP8. The time is that of streaming the codes once.

Bias, gate and residual are fused in, and for one row the norm before. One row has a kernel without tensor cores: many
small programs, which the next kernel may overlap; a block's scale multiplies x there, once a program and in fp32.

For more rows K is split where the tiles of outputs would leave most of the GPU idle (``kernels.parts``). The next
kernel may start when a program has read all its weights, and not before: one that starts early takes places of this
one's programs, which are then spread unevenly over the multiprocessors (on an H200 that cost 7 of 30 microseconds).

Codes are read as *words* of two. In bf16 integer operations put the bits of an even and an odd code in a number's
places, with an exponent 120 too low: x is multiplied by 2^60, which is exact, and so are the sums afterwards. That is a
third of the instructions of a conversion by way of fp16 and fp32. Even and odd inputs are multiplied apart, since a sum
over K has no order to keep. So numbers are made in the registers from which tensor cores read them.

Where the *rows* are codes as well, the tensor cores multiply codes with codes, and the sums get both scales; those of a
block are added in fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3).

Bytes: N x K. Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O outputs, B
outputs and inputs of a scale's block, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, tl
from kvasir.kernels.code_tiles import inputs_of, multiply_add
from kvasir.kernels.f8 import F8, dequantise_reference, from_e4m3
from kvasir.kernels.gemv import MAX_ROWS, Config, ending, finish_row, finish_rows, gemv_reference, result_of
from kvasir.kernels.parts import add_parts, room_for_parts, share_of, splits_for, tickets_of

LAUNCH_ROWS = 2 * MAX_ROWS  # rows of x that one launch takes
LEAST_ROWS = 8  # that a tensor core takes


def f8_gemv_reference(x_TK: torch.Tensor, w: F8, **options: object) -> torch.Tensor:
    """[T, O] in x's dtype: ``gemv_reference`` with the dequantised matrix."""
    return gemv_reference(x_TK, dequantise_reference(w, x_TK.dtype), **options)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _codes(at, live, k, K, WHOLE: tl.constexpr):
    """A block of codes or of words. It is read once, and should not evict anything from the L2 cache."""
    if WHOLE:
        w = tl.load(at + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(at + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
    return w


@jit
def _numbers(words, dtype: tl.constexpr, FAST: tl.constexpr):
    """The numbers of the even and of the odd codes of words; FAST: in bf16, times 2^-120."""
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, signs;
            shl.b32 bits, $2, 4;
            and.b32 bits, bits, 0x07F007F0;
            shl.b32 signs, $2, 8;
            lop3.b32 $0, signs, 0x80008000, bits, 0xEA;
            shr.b32 bits, $2, 4;
            and.b32 bits, bits, 0x07F007F0;
            lop3.b32 $1, $2, 0x80008000, bits, 0xEA;
            }""", "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        even = from_e4m3((words & 255).to(tl.uint8), dtype)
        odd = from_e4m3((words >> 8).to(tl.uint8), dtype)
    return even, odd


@jit
def _inputs(x_ptr, x_row, j, live_m, columns, ROWS: tl.constexpr, WHOLE_K: tl.constexpr, FAST: tl.constexpr):
    """The even and the odd inputs of the words j, each [words, ROWS]; FAST: times 2^60."""
    row = tl.arange(0, ROWS)[None, :]
    if WHOLE_K:
        mask = live_m[None, :]
    else:
        mask = live_m[None, :] & (j < columns)[:, None]
    if FAST:
        pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * (x_row // 2) + j[:, None], mask=mask, other=0)
        factor, none = tl.full([1, 1], 0x5D805D80, tl.int32), tl.full([1, 1], -2147450880, tl.int32)  # 2^60, -0
        pairs = multiply_add(pairs, factor, none, True)
        even = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        at = x_ptr + row * x_row + 2 * j[:, None]
        even, odd = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
    return even, odd


@jit
def _add_words(acc, words, even, odd, s_at, j0, B: tl.constexpr, FAST: tl.constexpr):
    """Add the products [N, ROWS] of a block of words and their inputs, times their scale from ``s_at`` on."""
    w_even, w_odd = _numbers(words, even.dtype, FAST)
    if B:
        part = tl.dot(w_even, even, input_precision="ieee")
        acc += tl.dot(w_odd, odd, part, input_precision="ieee") * tl.load(s_at + 2 * j0 // B)
    else:
        acc = tl.dot(w_even, even, acc, input_precision="ieee")
        acc = tl.dot(w_odd, odd, acc, input_precision="ieee")
    return acc


@jit
def _add_codes(acc, w, x, x_scale, s_at, k0, B: tl.constexpr, NATIVE: tl.constexpr):
    """Add the products [N, ROWS] of a block of codes and codes of x, times both scales where these go by blocks.
    NATIVE: the tensor cores take the codes themselves."""
    if NATIVE:
        part = tl.dot(w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True))
    else:
        part = tl.dot(from_e4m3(w, tl.float32), from_e4m3(x, tl.float32), input_precision="ieee")
    if B:
        part *= (x_scale * tl.load(s_at + k0 // B))[None, :]
    return acc + part


@jit
def _finish(acc, acc_up, n, m, x_scale_ptr, w_scale_ptr, y_ptr, part_ptr, tickets_ptr, bias_ptr, residual_ptr, rows,
            y_row, residual_row, OUT, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
            B: tl.constexpr, CODES: tl.constexpr, FAST: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
            RESIDUAL: tl.constexpr):
    """Add the parts of a tile, multiply by what the loop left out, and finish as ``gemv.finish_rows`` does."""
    last = True
    if SPLITS > 1:
        last, acc, acc_up = add_parts(acc, acc_up, part_ptr, tickets_ptr, KIND >= 0, BLOCK_N, ROWS, SPLITS)
    if last:
        live = n < OUT
        if FAST:
            acc *= 1.152921504606847e18  # 2^60
            acc_up *= 1.152921504606847e18
        if not B:
            acc *= tl.load(w_scale_ptr + n, mask=live, other=0.0)[:, None]
            if KIND >= 0:
                acc_up *= tl.load(w_scale_ptr + OUT + n, mask=live, other=0.0)[:, None]
            if CODES:
                x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[None, :]
                acc *= x_scale
                acc_up *= x_scale
        finish_rows(acc, acc_up, m, n, m, y_ptr, part_ptr, part_ptr, bias_ptr, residual_ptr, 0.0, rows, y_row,
                    residual_row, OUT, K, False, False, BIAS, KIND, RESIDUAL)


@jit
def _wide_numbers(words, ASM: tl.constexpr):
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
    w_even, w_odd = _wide_numbers(w, ASM)
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
def _few_rows_f8(x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, y_ptr, part_ptr, tickets_ptr, bias_ptr, residual_ptr, rows,
                 x_row, y_row, residual_row, share, OUT, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, WHOLE_K: tl.constexpr,
                 WHOLE: tl.constexpr, B: tl.constexpr, CODES: tl.constexpr, FAST: tl.constexpr, BIAS: tl.constexpr,
                 KIND: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr):
    """``BLOCK_N`` outputs of every row, over ``share`` of K. B 0: a scale for each output; else ``BLOCK_N`` and
    ``BLOCK_K`` divide B. CODES: x is codes, with ``x_scale`` [T] or [T, G]; FAST: see ``_numbers``, and with CODES the
    tensor cores take them."""
    first = tl.program_id(0) * BLOCK_N
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    live, live_m = n < OUT, m < rows
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, K)
    s_at, s_up_at, groups = w_scale_ptr, w_scale_ptr, 1
    if B:
        groups = (K + B - 1) // B
        s_at += first // B * groups
        s_up_at += (first + OUT) // B * groups
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    if CODES:
        at = w_ptr + n.to(tl.int64)[:, None] * K
        up_at = w_ptr + (n.to(tl.int64) + OUT)[:, None] * K
        k = tl.arange(0, BLOCK_K)
        for k0 in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
            w = _codes(at, live, k0 + k, K, WHOLE)
            mask = live_m[None, :]
            if not WHOLE_K:
                mask = mask & (k0 + k < K)[:, None]
            x = tl.load(x_ptr + m[None, :] * x_row + (k0 + k)[:, None], mask=mask, other=0)
            x_scale = 1.0
            if B:
                x_scale = tl.load(x_scale_ptr + m * groups + k0 // B, mask=live_m, other=0.0)
            acc = _add_codes(acc, w, x, x_scale, s_at, k0, B, FAST)
            if KIND >= 0:
                acc_up = _add_codes(acc_up, _codes(up_at, live, k0 + k, K, WHOLE), x, x_scale, s_up_at, k0, B, FAST)
    else:
        columns = K // 2
        words = w_ptr.to(tl.pointer_type(tl.int16))
        at = words + n.to(tl.int64)[:, None] * columns
        up_at = words + (n.to(tl.int64) + OUT)[:, None] * columns
        j = tl.arange(0, BLOCK_K // 2)
        for j0 in tl.range(start // 2, stop // 2, BLOCK_K // 2, num_stages=STAGES):
            w = _codes(at, live, j0 + j, columns, WHOLE)
            even, odd = _inputs(x_ptr, x_row, j0 + j, live_m, columns, ROWS, WHOLE_K, FAST)
            acc = _add_words(acc, w, even, odd, s_at, j0, B, FAST)
            if KIND >= 0:
                acc_up = _add_words(acc_up, _codes(up_at, live, j0 + j, columns, WHOLE), even, odd, s_up_at, j0, B,
                                    FAST)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _finish(acc, acc_up, n, m, x_scale_ptr, w_scale_ptr, y_ptr, part_ptr, tickets_ptr, bias_ptr, residual_ptr, rows,
            y_row, residual_row, OUT, K, ROWS, BLOCK_N, SPLITS, B, CODES, FAST and not CODES, BIAS, KIND, RESIDUAL)


def f8_gemv(x_TK: torch.Tensor, w: F8, config: Config, *, norm: tuple[torch.Tensor, float] | None = None,
            x_scale: torch.Tensor | None = None, bias_N: torch.Tensor | None = None, activation: str | None = None,
            residual_TO: torch.Tensor | None = None, out_TO: torch.Tensor | None = None,
            dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute ``f8_gemv_reference`` in one launch. ``residual_TO`` is overwritten with the result, and returned. One
    row takes the kernel without tensor cores when ``config.block_n`` is below 16; only then may there be a ``norm``.
    ``x_scale``: x is codes of ``f8.quantise_rows``, and these are their scales [T, G], with G 1 where the weights have
    a scale an output; ``dtype`` is the result's then. ``out_TO``: memory for the result, of any dtype."""
    (rows, width), num_rows = x_TK.shape, w.codes.shape[0]
    assert rows <= LAUNCH_ROWS and w.codes.shape[1] == width and w.codes.is_contiguous() and x_TK.stride(1) == 1, \
        "a few dense rows"
    outputs = num_rows if activation is None else num_rows // 2
    few = config.block_n >= 16
    assert not w.block or w.block % config.block_n == 0 and (not few or w.block % config.block_k == 0), \
        "a step of a program has one scale"
    assert not w.block or activation is None or outputs % w.block == 0, "gate and up begin with a block"
    y_TO = result_of(x_TK, outputs, residual_TO, out_TO, dtype)
    if rows == 0:
        return y_TO
    coded, gated = x_scale is not None, activation is not None
    whole, tiles = width % config.block_k == 0, cdiv(outputs, config.block_n)
    shape = {"OUT": outputs, "K": width, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "WHOLE_K": whole,
             "WHOLE": whole and outputs % config.block_n == 0, "B": w.block, "num_warps": config.warps,
             **ending(x_TK.device, bias_N, activation, residual_TO)}
    bias = w.scale if bias_N is None else bias_N
    if not few:
        assert rows == 1 and config.splits == 1 and not coded, "blocks below 16 are for one row, unsplit"
        assert width % 2 == 0 and x_TK.data_ptr() % 4 == 0, "two inputs are one word"
        scale, eps = (x_TK, 0.0) if norm is None else norm
        _one_row_f8[(tiles,)](x_TK, w.bytes, w.scale, y_TO, scale, bias, y_TO, eps, ASM=not INTERPRETED,
                              NORM=norm is not None, **shape)
        return y_TO
    assert norm is None, "a norm is for one row"
    fast = not INTERPRETED and (coded or x_TK.dtype == torch.bfloat16)
    assert coded or width % 2 == 0 and (not fast or x_TK.stride(0) % 2 == 0 and x_TK.data_ptr() % 4 == 0), \
        "two inputs are one word"
    x = x_TK.view(torch.uint8) if coded else x_TK
    share, splits = share_of(width, config.block_k, config.splits)
    tile_rows = max(LEAST_ROWS, next_power_of_2(rows))
    part = room_for_parts(tiles, splits, config.block_n * tile_rows * (1 + gated), w.scale)
    _few_rows_f8[(tiles, splits)](
        x, x_scale if coded else w.scale, w.bytes, w.scale, y_TO, part, tickets_of(x_TK.device), bias, y_TO, rows,
        x.stride(0), y_TO.stride(0), y_TO.stride(0), share, ROWS=tile_rows, STAGES=config.stages, SPLITS=splits,
        CODES=coded, FAST=fast, **shape)
    return y_TO


# -------------------------------------------------------------------------------------------------------------- chooser


def choose(rows: int, num_rows: int, width: int, block: int, gated: bool = False, coded: bool = False) -> Config:
    """Config for codes [N, K] and ``rows`` rows of x, 1 to 128. ``coded``: x is codes as well."""
    block_n, block_k, warps, stages, programs = tuned.look_up(
        tuned.F8_GEMV.value, rows=max(rows, 1 + width % 2), gated=gated, coded=coded)
    if block_n < 16:
        return Config(block_n, min(block_k, next_power_of_2(width)), warps)
    if block:
        block_n, block_k = min(block_n, block), min(block_k, block)
    tiles = cdiv(num_rows // 2 if gated else num_rows, block_n)
    return Config(block_n, block_k, warps, stages, splits_for(tiles, width, programs))


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``outputs`` is O; ``block``: of the scales; ``coded``: x is codes."""

    rows: int
    outputs: int
    width: int
    config: Config
    block: int = 0
    norm: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    coded: bool = False


def grid() -> Iterator[Case]:
    one, few = Config(4, 128, 4), Config(16, 32, 1, 2)
    for block in (0, 32):
        yield Case(1, 64, 320, one, block)
        yield Case(1, 64, 320, one, block, norm=True, bias=True, residual=True)
        yield Case(1, 64, 200, one, block, norm=True, activation="silu")
    yield Case(1, 33, 200, one, norm=True, activation="gelu")  # nothing is a multiple of a block
    yield Case(1, 70, 100, one, 32)
    yield Case(0, 16, 64, one)
    for coded in (False, True):
        for block in (0, 32):
            yield Case(1, 64, 320, few, block, coded=coded)
            yield Case(1, 64, 320, Config(32, 32, 2, 3, splits=2), block, bias=True, residual=True, coded=coded)
            yield Case(3, 64, 208, few, block, bias=True, residual=True, coded=coded)
            yield Case(16, 96, 320, Config(32, 32, 4, 3, splits=3), block, activation="gelu_tanh", bias=True,
                       coded=coded)
            yield Case(33, 48, 96, few, block, residual=True, coded=coded)
        yield Case(1, 33, 208, few, activation="gelu", coded=coded)  # nothing is a multiple of a block
        yield Case(5, 70, 112, few, 32, coded=coded)
        yield Case(40, 128, 256, Config(32, 128, 4, 3, splits=2), 128, activation="silu", residual=True, coded=coded)
        yield Case(70, 48, 96, few, 32, coded=coded)
        for block in (0, 128):  # whole warp groups
            yield Case(20, 128, 384, Config(64, 128, 4, 3, splits=2), block, bias=True, coded=coded)
            yield Case(8, 256, 512, Config(128, 128, 8, 3, splits=4), block, residual=True, coded=coded)
        yield Case(0, 16, 64, few, coded=coded)
    yield Case(2, 70, 100, few, 32)
    yield Case(128, 64, 256, Config(64, 128, 4, 3), activation="silu")
