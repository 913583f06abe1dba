"""y = x W^T for few rows of x and weights as codes of four bits with scales by group: ``u4`` with a group a block,
``mxfp4`` and ``nvfp4`` (``kernels.weight_codes``). The time is that of streaming the codes once.

As in ``kernels.f8_gemv``, codes are read as *words*, here of four. Integer operations put the first, second, third and
fourth codes of two words each in the places of two bf16 numbers, seven operations for eight codes of ``u4``. Inputs 4 j
+ i are multiplied with the codes i: a sum over K has no order to keep. Bias, gate and residual are fused in, K is split
where tiles are few (``kernels.parts``), and the next kernel starts when the weights have been read.

Numbers are exact in bf16, and so are E2M1 numbers times their scale but for 2^32 (``kernels.code_tiles``). A group's
scale of ``u4`` multiplies the block's sums in fp32, and its zero point the sum of the inputs.

Bytes: those of the planes. Legend: T rows, K inputs, N rows of W (F of gate, then F of up, where they are gated), O
outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvasir import tuned
from kvasir.kernels._triton import INTERPRETED, cdiv, jit, next_power_of_2, tl
from kvasir.kernels.code_tiles import factor_of, load_bytes, load_scales, scales_of, spread
from kvasir.kernels.codes_gemv import LAYOUTS, Case, Coded
from kvasir.kernels.gemv import Config, ending, finish_rows, result_of
from kvasir.kernels.parts import add_parts, room_for_parts, share_of, splits_for, tickets_of

LEAST_ROWS, MAX_ROWS = 8, 32  # that a tensor core takes, and that one launch takes


@jit
def _whole_numbers(words, dtype: tl.constexpr, FAST: tl.constexpr):
    """The four codes of words less 8. FAST: in bf16, where 128 + code has the code in its last places."""
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 next, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            lop3.b32 next, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, next, one, less;
            shr.b32 next, $4, 4;
            lop3.b32 next, next, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, next, one, less;
            shr.b32 next, $4, 8;
            lop3.b32 next, next, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, next, one, less;
            shr.b32 next, $4, 12;
            lop3.b32 next, next, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, next, one, less;
            }""", "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
    else:
        wide = words.to(tl.int32)
        a, b = ((wide & 15) - 8).to(dtype), ((wide >> 4 & 15) - 8).to(dtype)
        c, d = ((wide >> 8 & 15) - 8).to(dtype), ((wide >> 12 & 15) - 8).to(dtype)
    return a, b, c, d


@jit
def _e2m1(wide, shift: tl.constexpr):
    """The number fp32, but for 2^126, of the code in the bits from ``shift`` on."""
    code = wide >> shift
    return ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True)


@jit
def _small_numbers(words, factor, dtype: tl.constexpr, FAST: tl.constexpr):
    """The E2M1 numbers of the four codes of words times ``factor`` but for 2^126: the bits stand in the places of the
    result with an exponent 126 too low."""
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, signs;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x01C001C0;
            shl.b32 signs, $4, 12;
            lop3.b32 $0, signs, 0x80008000, bits, 0xEA;
            shl.b32 bits, $4, 2;
            and.b32 bits, bits, 0x01C001C0;
            shl.b32 signs, $4, 8;
            lop3.b32 $1, signs, 0x80008000, bits, 0xEA;
            shr.b32 bits, $4, 2;
            and.b32 bits, bits, 0x01C001C0;
            shl.b32 signs, $4, 4;
            lop3.b32 $2, signs, 0x80008000, bits, 0xEA;
            shr.b32 bits, $4, 6;
            and.b32 bits, bits, 0x01C001C0;
            lop3.b32 $3, $4, 0x80008000, bits, 0xEA;
            }""", "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
        factor = factor.to(tl.bfloat16)
    else:
        wide = words.to(tl.int32)
        a, b, c, d = _e2m1(wide, 0), _e2m1(wide, 4), _e2m1(wide, 8), _e2m1(wide, 12)
    return (a * factor).to(dtype), (b * factor).to(dtype), (c * factor).to(dtype), (d * factor).to(dtype)


@jit
def _inputs(x_ptr, x_row, j, live_m, columns, ROWS: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr):
    """The first, second, third and fourth inputs of the words j, each [words, ROWS]."""
    row = tl.arange(0, ROWS)[None, :]
    if WHOLE:
        mask = live_m[None, :]
    else:
        mask = live_m[None, :] & (j < columns)[:, None]
    if FAST:
        four = tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + row * (x_row // 4) + j[:, None], mask=mask, other=0)
        a = four.to(tl.int16).to(tl.bfloat16, bitcast=True)
        b = (four >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        c = (four >> 32).to(tl.int16).to(tl.bfloat16, bitcast=True)
        d = (four >> 48).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        at = x_ptr + row * x_row + 4 * j[:, None]
        a, b = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
        c, d = tl.load(at + 2, mask=mask, other=0.0), tl.load(at + 3, mask=mask, other=0.0)
    return a, b, c, d


@jit
def _dots(acc, a, b, c, d, xa, xb, xc, xd):
    """Add the products [N, ROWS] of numbers and inputs, each in four parts."""
    acc = tl.dot(a, xa, acc, input_precision="ieee")
    acc = tl.dot(b, xb, acc, input_precision="ieee")
    acc = tl.dot(c, xc, acc, input_precision="ieee")
    return tl.dot(d, xd, acc, input_precision="ieee")


@jit
def _sums(xa, xb, xc, xd, N: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """The sum of each row's inputs, N times [N, ROWS]: by tensor cores, which have it where the products are."""
    ones = (tl.zeros([N, WORDS], tl.float32) + 1.0).to(xa.dtype)
    return _dots(tl.zeros([N, ROWS], tl.float32), ones, ones, ones, ones, xa, xb, xc, xd)


@jit
def _add(acc, words, s, z, xa, xb, xc, xd, sums, LAYOUT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
         WORDS: tl.constexpr, ZEROS: tl.constexpr, FAST: tl.constexpr):
    """Add the products [N, ROWS] of a block of words and their inputs, but for ``factor_of``. A zero point joins the
    sums: the compiler would move numbers through shared memory if they depended on it."""
    s, z = scales_of(s, z, LAYOUT)
    if LAYOUT == 1:
        a, b, c, d = _whole_numbers(words, xa.dtype, FAST)
        part = _dots(tl.zeros_like(acc), a, b, c, d, xa, xb, xc, xd)
        if ZEROS:
            part += (8.0 - z) * sums
        acc += part * s
    else:
        factor = spread(s * 1.9807040628566084e28, N, GROUPS, WORDS)  # 2^(126 - 32)
        a, b, c, d = _small_numbers(words, factor, xa.dtype, FAST)
        acc = _dots(acc, a, b, c, d, xa, xb, xc, xd)
    return acc


@jit(do_not_specialize=["rows"])
def _few_rows_nibbles(x_ptr, w_ptr, w_scale_ptr, more_ptr, y_ptr, part_ptr, tickets_ptr, bias_ptr, residual_ptr, rows,
                      x_row, y_row, residual_row, share, OUT, K, G, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                      WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr,
                      ZEROS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr,
                      FAST: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
                      PDL: tl.constexpr):
    """``BLOCK_N`` outputs of every row, over ``share`` words of a row of W."""
    GATED: tl.constexpr = KIND >= 0
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    live, live_m = n < OUT, m < rows
    columns = K // 4
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, columns)
    words = w_ptr.to(tl.pointer_type(tl.int16))
    at = words + n.to(tl.int64)[:, None] * columns
    up_at = words + (n.to(tl.int64) + OUT)[:, None] * columns
    group = start // WORDS * GROUPS
    s, z = load_scales(w_scale_ptr, more_ptr, n, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
    s_up, z_up = s, z
    if GATED:
        s_up, z_up = load_scales(w_scale_ptr, more_ptr, n + OUT, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = acc
    j = tl.arange(0, WORDS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for j0 in tl.range(start, stop, WORDS, num_stages=STAGES):
        w = load_bytes(at, live, j0 + j, columns, WHOLE)
        a, b, c, d = _inputs(x_ptr, x_row, j0 + j, live_m, columns, ROWS, WHOLE, FAST)
        group = (j0 // WORDS + 1) * GROUPS
        ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
        sums = acc
        if ZEROS:
            sums = _sums(a, b, c, d, BLOCK_N, ROWS, WORDS)
        acc = _add(acc, w, s, z, a, b, c, d, sums, LAYOUT, BLOCK_N, GROUPS, WORDS, ZEROS, FAST)
        s, z = ahead, z_ahead
        if GATED:
            w = load_bytes(up_at, live, j0 + j, columns, WHOLE)
            ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n + OUT, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
            acc_up = _add(acc_up, w, s_up, z_up, a, b, c, d, sums, LAYOUT, BLOCK_N, GROUPS, WORDS, ZEROS, FAST)
            s_up, z_up = ahead, z_ahead
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    last = True
    if SPLITS > 1:
        last, acc, acc_up = add_parts(acc, acc_up, part_ptr, tickets_ptr, GATED, BLOCK_N, ROWS, SPLITS)
    if last:
        acc *= factor_of(w_scale_ptr, more_ptr, n, live, LAYOUT, GROUP)[:, None]
        if GATED:
            acc_up *= factor_of(w_scale_ptr, more_ptr, n + OUT, live, LAYOUT, GROUP)[:, None]
        finish_rows(acc, acc_up, m, n, m, y_ptr, part_ptr, part_ptr, bias_ptr, residual_ptr, 0.0, rows, y_row,
                    residual_row, OUT, K, False, False, BIAS, KIND, RESIDUAL)


def takes(w: Coded, block_k: int) -> bool:
    """Whether ``nibble_gemv`` multiplies these codes ``block_k`` inputs at a time: a tensor core takes 16 words."""
    groups = w.group == block_k if w.layout == "u4" else w.layout in ("mxfp4", "nvfp4") and not block_k % w.group
    return groups and block_k >= 64 and not w.num_inputs % 4


def nibble_gemv(x_TK: torch.Tensor, w: Coded, config: Config, *, bias_N: torch.Tensor | None = None,
                activation: str | None = None, residual_TO: torch.Tensor | None = None,
                out_TO: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``codes_gemv_reference`` in one launch. ``residual_TO`` is overwritten with the result, and returned.
    ``out_TO``: memory for the result, of any dtype. ``config.block_k`` counts inputs."""
    (rows, width), num_rows = x_TK.shape, w.codes.shape[0]
    assert rows <= MAX_ROWS and w.num_inputs == width and x_TK.stride(1) == 1, "a few dense rows"
    assert takes(w, config.block_k), "codes of four bits whose groups a block holds"
    outputs, gated = num_rows if activation is None else num_rows // 2, activation is not None
    y_TO = result_of(x_TK, outputs, residual_TO, out_TO)
    if rows == 0:
        return y_TO
    fast = not INTERPRETED and x_TK.dtype == torch.bfloat16
    assert not fast or x_TK.stride(0) % 4 == 0 and x_TK.data_ptr() % 8 == 0, "four inputs are one load"
    codes, _, scales, more = w.pointers()
    words, columns = config.block_k // 4, width // 4
    share, splits = share_of(columns, words, config.splits)
    tiles, tile_rows = cdiv(outputs, config.block_n), max(LEAST_ROWS, next_power_of_2(rows))
    _few_rows_nibbles[(tiles, splits)](
        x_TK, codes, scales, more, y_TO,
        room_for_parts(tiles, splits, config.block_n * tile_rows * (1 + gated), y_TO), tickets_of(x_TK.device),
        more if bias_N is None else bias_N, y_TO, rows, x_TK.stride(0), y_TO.stride(0), y_TO.stride(0), share, outputs,
        width, w.num_groups, ROWS=tile_rows, BLOCK_N=config.block_n, WORDS=words, GROUPS=config.block_k // w.group,
        GROUP=w.group, LAYOUT=LAYOUTS[w.layout], ZEROS=w.layout == "u4" and w.more is not None, STAGES=config.stages,
        SPLITS=splits, WHOLE=columns % words == 0 and outputs % config.block_n == 0, FAST=fast,
        num_warps=config.warps, **ending(x_TK.device, bias_N, activation, residual_TO))
    return y_TO


def choose(rows: int, num_rows: int, w: Coded, gated: bool = False) -> Config | None:
    """Config for ``num_rows`` rows of codes and ``rows`` rows of x; None: ``codes_gemv`` multiplies them."""
    few, few_with_zeros = tuned.NIBBLE_ROWS.value
    if rows > (few_with_zeros if w.layout == "u4" and w.more is not None else few):
        return None
    block_n, block_k, warps, stages, programs = tuned.look_up(
        tuned.NIBBLE_GEMV.value, rows=rows, gated=gated, layout=w.layout)
    block_k = w.group if w.layout == "u4" else block_k
    if not takes(w, block_k):
        return None
    tiles = cdiv(num_rows // 2 if gated else num_rows, block_n)
    return Config(block_n, block_k, warps, stages, splits_for(tiles, w.num_inputs, programs))


def grid() -> Iterator[Case]:
    few = Config(16, 128, 1, 2)
    for layout, group, zeros in (("u4", 128, False), ("u4", 128, True), ("mxfp4", 32, False), ("nvfp4", 16, False)):
        wide = 384 if layout == "u4" else 320  # not whole blocks
        yield Case(layout, group, 1, 33, wide, few, zeros, bias=True, residual=True)
        yield Case(layout, group, 3, 48, 256, few, zeros, activation="silu")
        yield Case(layout, group, 31, 72, wide, Config(64, 128, 4, 3), zeros, residual=True)
        yield Case(layout, group, 17, 48, 512, Config(32, 128, 2, 3, splits=3), zeros, activation="gelu_tanh",
                   bias=True)
        yield Case(layout, group, 8, 128, 512, Config(64, 128, 4, 3, splits=2), zeros)
    yield Case("u4", 64, 5, 40, 192, Config(16, 64, 1, 2), zeros=True)
    yield Case("mxfp4", 32, 32, 136, 512, Config(64, 256, 4, 2), activation="silu")
    yield Case("nvfp4", 16, 0, 16, 256, few)
