"""Attention of single rows over quantised pages: codes go to the tensor core as they are, and scales are applied after.

Work is cut as in ``decode_attention``. With codes c, k = s (c - m) + b, and the query q in the cache's basis,

    q.k = s (q.c - m sum(q)) + b sum(q)       sum_n p_n v_n = sum_n (p_n s_n) (c_n - m) + sum_n p_n b_n

so no element is ever dequantised; what remains is to turn a code into a number. Pages are read as words of 16 bits, and
a pair of words becomes a pair of fp16 numbers by setting exponents: the bits 0x6400 + x are 1024 + x, for a 4-bit code
in place (1024 + c), one four bits higher (1024 + 16 c), or an 8-bit one. 8-bit floats are moved to where fp16 has its
exponent, which divides them by 256. Eight 4-bit codes take five instructions. What the exponents add is subtracted
where the products start, so that nothing large accumulates over blocks; for that, sum(q) and the sum of the weights p s
are those of the rounded numbers. (SAW-INT4, arXiv:2604.19157; the factored form and the words are ours.)

Products have the keys as their rows, so that a few query heads are padded to eight columns instead of sixteen rows.
4-bit pages hold elements i and i + D / 2 in a byte: word w of a row holds elements 2 w, 2 w + D / 2, 2 w + 1 and 2 w +
1 + D / 2; 8-bit pages 2 w and 2 w + 1. Each is a separate part of the products.

Bytes: 2 x keys x G x (D x bits / 8 + 4) a sequence and layer.

Legend: T rows, S spans, B single rows, C chunks, M query heads of a tile, H query heads, G KV heads, R = H / G, D head
dim, W words of a row, N pages or keys of a block, P slots per page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels import decode_attention
from kvasir.kernels._triton import INTERPRETED, jit, next_power_of_2, pdl, tl
from kvasir.kernels.attention_tile import load_pages
from kvasir.kernels.decode_attention import Rows, Shape
from kvasir.kernels.hardware import multiprocessors, name_of
from kvasir.kernels.key_chunks import MIN_CHUNK, SHORT_CHUNK, arrive, find_chunk, keys_of, merged_at_once
from kvasir.kernels.quantized_qkv import FORMATS, Format
from kvasir.kernels.softmax_block import cap, fold_columns, sink_logits


@jit
def _numbers(words, PART: tl.constexpr, BITS: tl.constexpr, TRICK: tl.constexpr, ASM: tl.constexpr):
    """Code ``PART`` of int16 words. Without ``TRICK`` the code itself in fp32; with it fp16: 4 bits (``BITS``) as 1024
    + c or (odd parts) 1024 + 16 c, 8 bits as 1024 + c, 8-bit floats (0) divided by 256. ``ASM``: two words at a
    time."""
    if not TRICK:
        WIDE: tl.constexpr = 8 if BITS == 0 else BITS
        codes = (words >> (PART * WIDE)) & ((1 << WIDE) - 1)
        if BITS == 0:
            numbers = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            numbers = codes.to(tl.float32)
    elif not ASM:
        wide = words.to(tl.int32)
        if BITS == 4:
            bits = ((wide >> (PART // 2 * 8)) & (0xF0 if PART % 2 else 0xF)) | 0x6400
        elif BITS == 8:
            bits = ((wide >> (PART * 8)) & 0xFF) | 0x6400
        else:
            bits = wide << (8 - PART * 8)
            bits = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        numbers = bits.to(tl.int16).to(tl.float16, bitcast=True)
    elif BITS == 4:
        if PART == 0:
            numbers = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;", "=r,r", [words], tl.float16, True, 2)
        elif PART == 1:
            numbers = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00F000F0, 0x64006400, 0xEA;", "=r,r", [words], tl.float16, True, 2)
        elif PART == 2:
            numbers = tl.inline_asm_elementwise(
                "{.reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA;}",
                "=r,r", [words], tl.float16, True, 2)
        else:
            numbers = tl.inline_asm_elementwise(
                "{.reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x00F000F0, 0x64006400, 0xEA;}",
                "=r,r", [words], tl.float16, True, 2)
    elif BITS == 8:
        if PART == 0:
            numbers = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0x64646464, 0x4240;", "=r,r", [words], tl.float16, True, 2)
        else:
            numbers = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0x64646464, 0x4341;", "=r,r", [words], tl.float16, True, 2)
    elif PART == 0:
        numbers = tl.inline_asm_elementwise(
            "{.reg .b32 t, u; shl.b32 u, $1, 8; shr.u32 t, u, 1; and.b32 t, t, 0x3F803F80; "
            "lop3.b32 $0, u, 0x80008000, t, 0xEA;}",
            "=r,r", [words], tl.float16, True, 2)
    else:
        numbers = tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 1; and.b32 t, t, 0x3F803F80; lop3.b32 $0, $1, 0x80008000, t, 0xEA;}",
            "=r,r", [words], tl.float16, True, 2)
    return numbers


@jit
def _halves(meta):
    """The two fp16 numbers in an int32, the first in the low half, both as fp32."""
    low = (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _query(q_at, mask, factor, number: tl.constexpr):
    """One part of a query [M, W], scaled: rounded, transposed, and its sums [M] in fp32."""
    q = (tl.load(q_at, mask=mask, other=0.0).to(tl.float32) * factor).to(number)
    return tl.trans(q), tl.sum(q.to(tl.float32), 1)


@jit
def load_queries(q_at, mask, factor, D: tl.constexpr, BITS: tl.constexpr, TRICK: tl.constexpr):
    """Load the parts of the queries at ``q_at`` [M, W], times ``factor``: four (two of 8-bit words) [W, M]; sum(q) [M];
    and the excess of a key's numbers over its codes, times q, to be subtracted."""
    # a number is its code times 1 (even parts) or ODD, and this
    ABOVE: tl.constexpr = 1024 if TRICK and BITS != 0 else 0
    ODD: tl.constexpr = 16 if TRICK and BITS == 4 else 1
    MIDDLE: tl.constexpr = 0 if BITS == 0 else 1 << (BITS - 1)
    number: tl.constexpr = tl.float16 if TRICK else tl.float32
    q0, even = _query(q_at, mask, factor, number)
    if BITS == 4:
        q1, odd = _query(q_at + D // 2, mask, factor / ODD, number)
        q2, more = _query(q_at + 1, mask, factor, number)
        q3, rest = _query(q_at + 1 + D // 2, mask, factor / ODD, number)
        even, odd = even + more, odd + rest
    else:
        q1, odd = _query(q_at + 1, mask, factor, number)
        q2, q3 = q0, q1
    total_q = even + ODD * odd
    above_q = -((ABOVE + MIDDLE) * even + (ABOVE + MIDDLE * ODD) * odd)
    return q0, q1, q2, q3, total_q, above_q


@jit
def fold_codes(k, v, k_grid, v_grid, seen, q0, q1, q2, q3, total_q, above_q, softcap, top, total, shift, acc0, acc1,
               acc2, acc3,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, TRICK: tl.constexpr, ASM: tl.constexpr,
               CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Fold one block of codes into the running softmax of a tile: k [N, W], v [W, N] int16 words with their grids [N],
    seen [N, M] or [N, 1] (``MASKED``). Logarithms are to base 2. ``shift``: the sum of p b; accumulators are [W, M]."""
    ABOVE: tl.constexpr = 1024 if TRICK and BITS != 0 else 0
    ODD: tl.constexpr = 16 if TRICK and BITS == 4 else 1
    MIDDLE: tl.constexpr = 0 if BITS == 0 else 1 << (BITS - 1)
    GAIN: tl.constexpr = 1 if not TRICK else 16 if BITS == 4 else 256  # of the weights, against underflow
    number: tl.constexpr = tl.float16 if TRICK else tl.float32
    s = tl.dot(_numbers(k, 0, BITS, TRICK, ASM), q0, tl.broadcast_to(above_q[None, :], [BLOCK_N, BLOCK_M]),
               input_precision="ieee")
    s = tl.dot(_numbers(k, 1, BITS, TRICK, ASM), q1, s, input_precision="ieee")
    if BITS == 4:
        s = tl.dot(_numbers(k, 2, BITS, TRICK, ASM), q2, s, input_precision="ieee")
        s = tl.dot(_numbers(k, 3, BITS, TRICK, ASM), q3, s, input_precision="ieee")
    if BITS == 0:
        s *= (k_grid.to(tl.float32, bitcast=True) * (256 if TRICK else 1))[:, None]
    else:
        ks, kb = _halves(k_grid)
        s = s * ks[:, None] + kb[:, None] * total_q[None, :]
    if CAPPED:
        s = cap(s, s / softcap, softcap) * 1.4426950408889634
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    top, p, shrink, total = fold_columns(s, top, total)
    if BITS == 0:
        weight = (p * (v_grid.to(tl.float32, bitcast=True) * GAIN)[:, None]).to(number)
        weights = shift
    else:
        vs, vb = _halves(v_grid)
        weight = (p * (vs * GAIN)[:, None]).to(number)
        weights = tl.sum(weight.to(tl.float32), 0)
        shift = shift * shrink + tl.sum(p * vb[:, None], 0)
    above = ((ABOVE + MIDDLE) * weights)[None, :]
    acc0 = tl.dot(_numbers(v, 0, BITS, TRICK, ASM), weight, acc0 * shrink[None, :] - above, input_precision="ieee")
    if BITS == 4:
        acc2 = tl.dot(_numbers(v, 2, BITS, TRICK, ASM), weight, acc2 * shrink[None, :] - above, input_precision="ieee")
        above = ((ABOVE + MIDDLE * ODD) * weights)[None, :]
        acc3 = tl.dot(_numbers(v, 3, BITS, TRICK, ASM), weight, acc3 * shrink[None, :] - above, input_precision="ieee")
    acc1 = tl.dot(_numbers(v, 1, BITS, TRICK, ASM), weight, acc1 * shrink[None, :] - above, input_precision="ieee")
    return top, total, shift, acc0, acc1, acc2, acc3


@jit
def values_of(acc0, acc1, acc2, acc3, shift, share, BITS: tl.constexpr, TRICK: tl.constexpr):
    """Values that the accumulators stand for, each column times its ``share``."""
    ODD: tl.constexpr = 16 if TRICK and BITS == 4 else 1
    GAIN: tl.constexpr = 1 if not TRICK else 16 if BITS == 4 else 256
    FINE: tl.constexpr = 256 if TRICK and BITS == 0 else 1
    shift = shift * share
    acc0 = acc0 * (share * (FINE / GAIN))[None, :] + shift[None, :]
    acc1 = acc1 * (share * (FINE / GAIN / ODD))[None, :] + shift[None, :]
    if BITS == 4:
        acc2 = acc2 * (share * (1 / GAIN))[None, :] + shift[None, :]
        acc3 = acc3 * (share * (1 / GAIN / ODD))[None, :] + shift[None, :]
    return acc0, acc1, acc2, acc3


@jit(do_not_specialize=["table_row", "count", "wave", "budget", "window"])
def _quantized_decode(
        q_ptr, k_ptr, v_ptr, k_meta, v_meta, out_ptr, lse_ptr, part_ptr, part_lse_ptr, arrived_ptr, sinks_ptr,
        table_ptr, context_ptr, row_start_ptr,
        spans_ptr, q_row, q_head, page_stride, head_stride, meta_page, meta_head, out_row, table_row, count, wave,
        budget, window, scale,
        softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
        D_PAD: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COUNT_PAD: tl.constexpr, MIN_KEYS: tl.constexpr,
        SHORT_KEYS: tl.constexpr,
        R_PAD: tl.constexpr, MERGE: tl.constexpr, BITS: tl.constexpr, TRICK: tl.constexpr, ASM: tl.constexpr,
        WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr, PDL: tl.constexpr):
    """One KV head, one chunk of keys of one sequence; see ``decode_attention``. Scores are [keys, heads], sums [words,
    heads]. A key's scale and bias are one int32 (fp8: its scale, fp32): smaller loads would not be pipelined."""
    group, item = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // R
    if PDL:  # as in ``decode_attention``: contexts and tables were there before the step's first layer
        tl.extra.cuda.gdc_launch_dependents()
    which, first, parts, chunk = find_chunk(item, context_ptr, spans_ptr, count, wave, budget, window, BLOCK_N,
                                            COUNT_PAD, MIN_KEYS, SHORT_KEYS,
                                            WINDOWED)
    if which < count:
        span, row, low, start, stop = keys_of(which, item - first, chunk, context_ptr, row_start_ptr, spans_ptr, window,
                                              BLOCK_N, WINDOWED)
        m = tl.arange(0, BLOCK_M)
        w = tl.arange(0, W_PAD)
        n = tl.arange(0, BLOCK_N)
        head = group * R + m
        live = m < R
        wide = (w < W)[None, :]
        factor = scale if CAPPED else scale * 1.4426950408889634
        q_at = q_ptr + row * q_row + head[:, None] * q_head + 2 * w[None, :]
        mine = live[:, None] & wide
        table = table_ptr + span.to(tl.int64) * table_row
        if BLOCK_N <= P:  # a block lies in one page, and one id is all that its addresses differ by
            pages = tl.load(table + start // P)
        else:
            pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        q0, q1, q2, q3, total_q, above_q = load_queries(q_at, mine, factor, D, BITS, TRICK)
        acc0 = tl.zeros([W_PAD, BLOCK_M], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0  # the last two: of 4-bit words
        shift = tl.zeros([BLOCK_M], tl.float32)  # sum of p b
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        kv_head, kv_meta = group.to(tl.int64) * head_stride, group.to(tl.int64) * meta_head
        for j0 in range(start, stop, BLOCK_N):
            j = j0 + n
            held = (j >= low) & (j < stop)
            page = pages.to(tl.int64)
            slot = j0 % P + n if BLOCK_N <= P else j % P
            at = page * page_stride + kv_head + slot * W
            inside, across = held[:, None], held[None, :]
            if W != W_PAD:
                inside, across = inside & wide, across & (w < W)[:, None]
            at_meta = page * meta_page + kv_meta + slot
            k = tl.load(k_ptr + at[:, None] + w[None, :], mask=inside, other=0)
            k_grid = tl.load(k_meta + at_meta, mask=held, other=0)
            v = tl.load(v_ptr + at[None, :] + w[:, None], mask=across, other=0)  # as columns
            v_grid = tl.load(v_meta + at_meta, mask=held, other=0)
            pages = load_pages(table, j0 + BLOCK_N, j + BLOCK_N, stop, P, BLOCK_N)
            top, total, shift, acc0, acc1, acc2, acc3 = fold_codes(
                k, v, k_grid, v_grid, held[:, None], q0, q1, q2, q3, total_q, above_q, softcap, top, total, shift, acc0,
                acc1, acc2, acc3,
                BLOCK_M, BLOCK_N, BITS, TRICK, ASM, CAPPED, True)

        lse = top + tl.log2(total)
        peak, whole = top, total
        if SINKS and parts == 1:
            peak, whole, _ = sink_logits(sinks_ptr, head, live, top, total, shift[:, None])
            lse = peak + tl.log2(whole)
        share = tl.exp2(top - peak) / whole
        acc0, acc1, acc2, acc3 = values_of(acc0, acc1, acc2, acc3, shift, share, BITS, TRICK)
        if parts == 1:
            store_parts(out_ptr + row * out_row + head[None, :] * D, acc0, acc1, acc2, acc3, w, live, D, W, BITS)
            if WANT_LSE:
                tl.store(lse_ptr + row * H + head, lse * 0.6931471805599453, mask=live)
        else:
            at_part = (item.to(tl.int64) * G + group) * R + m
            store_parts(part_ptr + at_part[None, :] * D, acc0, acc1, acc2, acc3, w, live, D, W, BITS)
            tl.store(part_lse_ptr + at_part, lse, mask=live)
            arrive(part_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, sinks_ptr, which, first, parts, row, group,
                   out_row,
                   H, R, D, D_PAD, R_PAD, MERGE, SINKS, WANT_LSE)


@jit
def store_parts(row_ptr, acc0, acc1, acc2, acc3, w, live, D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """Store the elements of word w of a row, [W, M]."""
    dtype = row_ptr.dtype.element_ty
    mask = (w < W)[:, None] & live[None, :]
    at = row_ptr + 2 * w[:, None]
    tl.store(at, acc0.to(dtype), mask=mask)
    if BITS == 4:
        tl.store(at + D // 2, acc1.to(dtype), mask=mask)
        tl.store(at + 1, acc2.to(dtype), mask=mask)
        tl.store(at + 1 + D // 2, acc3.to(dtype), mask=mask)
    else:
        tl.store(at + 1, acc1.to(dtype), mask=mask)


@functools.cache  # every layer asks
def shape_of(format: Format, dim: int, dtype: torch.dtype, rows: int, share: int) -> Shape:
    """Shape for ``rows`` single rows over codes, from the table of tuned numbers.

    ``dim``: a power of two. ``share``: query heads of a KV head. Programs of one warp need no barrier and keep their
    scores in registers: 8 of them fit on a multiprocessor, each with three blocks of 4 or 8 KiB in flight. Few rows are
    cut into few chunks, so that there is less to merge.
    """
    words = dim // 4 if format == "int4" else dim // 2
    return Shape(*tuned.look_up(tuned.QUANTIZED_DECODE.value, dtype=name_of(dtype), rows=rows, words=words,
                                share=share))


def quantized_decode_triton(q_THD: torch.Tensor, planes: Mapping[str, torch.Tensor], format: Format,
                            table_SW: torch.Tensor, context_S: torch.Tensor, row_start_S: torch.Tensor, rows: Rows,
                            scale: float, out_THD: torch.Tensor, *, window: int | None = None,
                            softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                            lse_TH: torch.Tensor | None = None, shape: Shape | None = None) -> None:
    """Compute ``paged_attention_ref`` over decoded ``planes``, for queries and values in the cache's basis; otherwise
    as ``decode_attention_triton``. ``planes``: as ``quantized_qkv`` writes them."""
    _, heads, dim = q_THD.shape
    k, v = planes["k"].view(torch.int16), planes["v"].view(torch.int16)
    k_meta, v_meta = planes["k_meta"].view(torch.int32), planes["v_meta"].view(torch.int32)
    groups, size, width = k.shape[1:]
    count = rows.spans.shape[0]
    assert heads % groups == 0 and dim % 4 == 0 and dim <= 256 and size & (size - 1) == 0, "unsupported shape"
    assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k_meta.stride() == v_meta.stride(), \
        "planes must have dense slots"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1, "rows must be dense"
    assert rows.arrived.numel() >= count * groups, "one counter a row and KV head"
    share, dim_pad, width_pad = heads // groups, max(16, next_power_of_2(dim)), max(16, next_power_of_2(width))
    shape = shape or shape_of(format, dim_pad, q_THD.dtype, count, share)
    wave = max(1, shape.at_once * multiprocessors(q_THD.device) // groups)
    budget = max(wave, shape.programs * multiprocessors(q_THD.device) // groups)
    chunks = count + budget
    part = torch.empty((chunks, heads, dim), dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty((chunks, heads), dtype=torch.float32, device=q_THD.device)
    share_pad = next_power_of_2(share)
    bits = FORMATS[format]
    absent, early = q_THD, pdl(q_THD.device)  # stands in for pointers that the compiled variant never touches
    _quantized_decode[(groups, chunks)](
        q_THD, k, v, k_meta, v_meta, out_THD, absent if lse_TH is None else lse_TH, part, part_lse, rows.arrived,
        absent if sinks_H is None else sinks_H, table_SW, context_S, row_start_S, rows.spans, q_THD.stride(0),
        q_THD.stride(1),
        k.stride(0), k.stride(1), k_meta.stride(0), k_meta.stride(1), out_THD.stride(0), table_SW.stride(0), count,
        wave, budget, window or 0,
        scale, softcap or 1.0, H=heads, R=share, P=size, D=dim, W=width, W_PAD=width_pad, D_PAD=dim_pad,
        BLOCK_M=max(8, share_pad),
        BLOCK_N=shape.block_n, COUNT_PAD=max(16, next_power_of_2(count)), MIN_KEYS=max(MIN_CHUNK, shape.block_n),
        SHORT_KEYS=SHORT_CHUNK, R_PAD=share_pad, MERGE=merged_at_once(share, dim_pad, shape.warps), BITS=bits,
        TRICK=q_THD.dtype != torch.float32, ASM=not INTERPRETED, WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None, WANT_LSE=lse_TH is not None, PDL=early, num_warps=shape.warps,
        num_stages=shape.stages, launch_pdl=early)


# --------------------------------------------------------------------------------------------------- codes made numbers


@jit(do_not_specialize=["table_row", "slots", "first_group", "window"])
def _gather_codes(k_ptr, v_ptr, k_meta, v_meta, k_out, v_out, table_ptr, context_ptr, row_start_ptr, spans_ptr,
                  page_stride, head_stride,
                  meta_page, meta_head, table_row, slots, first_group, window,
                  P: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One block of slots of one span and KV head: page -> numbers [G, slots, D], in the cache's basis. Slots past the
    span's end become zeros; blocks that its first row does not see (``window``; 0: none) are left out."""
    block, group, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(spans_ptr + place * 2)
    context = tl.load(context_ptr + span)
    end = context + tl.load(row_start_ptr + span + 1) - tl.load(row_start_ptr + span)
    low = tl.where(window > 0, context + 1 - window, 0)
    if (block * BLOCK < end) & ((block + 1) * BLOCK > low):
        j = block * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, HALF)
        held = j < end
        mask = (i < D // 2)[None, :]
        page = tl.load(table_ptr + span.to(tl.int64) * table_row + j // P, mask=held, other=0).to(tl.int64)
        head = (first_group + group).to(tl.int64)
        WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
        at = (page * page_stride + head * head_stride + (j % P) * WIDTH)[:, None] + i[None, :]
        meta = page * meta_page + head * meta_head + (j % P) * (1 if BITS == 0 else 2)
        target = ((group.to(tl.int64) * slots + tl.load(spans_ptr + place * 2 + 1) + j) * D)[:, None] + i[None, :]
        _write_numbers(k_ptr + at, k_meta + meta, k_out + target, held, mask, D, BITS)
        _write_numbers(v_ptr + at, v_meta + meta, v_out + target, held, mask, D, BITS)


@jit
def _write_numbers(codes, meta, out, held, wide, D: tl.constexpr, BITS: tl.constexpr):
    mask = held[:, None] & wide
    scale = tl.load(meta, mask=held, other=0.0).to(tl.float32)[:, None]
    bias = 0.0
    if BITS != 0:
        bias = tl.load(meta + 1, mask=held, other=0.0).to(tl.float32)[:, None] - (1 << (BITS - 1)) * scale
    if BITS == 4:
        both = tl.load(codes, mask=mask, other=0).to(tl.int32)
        low, high = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
    else:
        low = _byte(tl.load(codes, mask=mask, other=0), BITS)
        high = _byte(tl.load(codes + D // 2, mask=mask, other=0), BITS)
    tl.store(out, (low * scale + bias).to(out.dtype.element_ty), mask=wide)
    tl.store(out + D // 2, (high * scale + bias).to(out.dtype.element_ty), mask=wide)


@jit
def _byte(codes, BITS: tl.constexpr):
    """Codes of one byte as numbers, fp32."""
    if BITS == 0:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32)


def gather_codes_triton(planes: Mapping[str, torch.Tensor], format: Format, k_GLD: torch.Tensor, v_GLD: torch.Tensor,
                        table_SW: torch.Tensor, context_S: torch.Tensor, row_start_S: torch.Tensor, spans: torch.Tensor,
                        blocks: int, block: int, first_group: int, window: int | None = None) -> None:
    """Decode ``spans`` [m, 2] int32 (span, its first slot in the result) in the cache's basis: dense [G, slots, D], for
    as many KV heads from ``first_group`` on as ``k`` and ``v`` have.

    ``blocks`` of ``block`` slots: the longest span; a span's place has room for whole blocks. ``window``: slots outside
    the window of every row are not written.
    """
    k, v, k_meta, dim = planes["k"].view(torch.uint8), planes["v"].view(torch.uint8), planes["k_meta"], k_GLD.shape[2]
    _gather_codes[(blocks, k_GLD.shape[0], spans.shape[0])](
        k, v, k_meta, planes["v_meta"], k_GLD, v_GLD, table_SW, context_S, row_start_S, spans, k.stride(0), k.stride(1),
        k_meta.stride(0), k_meta.stride(1), table_SW.stride(0), k_GLD.shape[1], first_group, window or 0, P=k.shape[2],
        D=dim,
        HALF=next_power_of_2(dim // 2), BITS=FORMATS[format], BLOCK=block, num_warps=8)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case(decode_attention.Case):
    """One point of the test grid."""

    format: Format = "int4"
    page_slots: int = 32


def grid() -> Iterator[Case]:
    mixed = (700, 0, 15, 300, 127, 128)
    for format in FORMATS:
        for programs in (None, 3):
            yield Case(contexts=mixed, format=format, programs=programs, heads=4, kv_heads=2)
        yield Case(contexts=(150,), format=format, sinks=True, softcap=4.0)
    yield Case(contexts=(1500,), sinks=True, softcap=4.0)
    for dim in (64, 80, 96, 128, 256):
        yield Case(contexts=(333, 5), dim=dim)
    for heads, kv_heads in ((1, 1), (3, 3), (7, 1), (12, 2), (16, 1)):
        yield Case(contexts=(290, 30), heads=heads, kv_heads=kv_heads)
    for page_slots in (16, 64):
        yield Case(contexts=(300, 64), page_slots=page_slots)
    for window in (1, 21, 200):
        yield Case(contexts=mixed, window=window, programs=3)
    yield Case(contexts=mixed, sinks=True)
