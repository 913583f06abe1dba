"""Attention of single rows over quantised pages: codes go to the tensor core as they are, scales come after.

Work is cut up as in ``decode_attention``. With codes c, k = s (c - m) + b, and the query q in the cache's basis,

    q.k = s (q.c) + (b - m s) sum(q)          sum_n p_n v_n = sum_n (p_n s_n) c_n + sum_n p_n (b_n - m s_n)

so that no element is ever dequantised: what is left of the unpacking is to make a number of a code, and 4-bit codes become
bf16 numbers by setting an exponent: the bits 0x4300 + c are 128 + c (fp16: 0x6400 + c is 1024 + c), four codes of a 16-bit
word in four operations for two words at a time. sum(q) and the weights p s of the second sum are taken after rounding, so
that the offset cancels (SAW-INT4, arXiv:2604.19157; the factored form is ours). 4-bit pages hold element i and i + D / 2 in
a byte: word w of a row holds elements 2 w, 2 w + D / 2, 2 w + 1 and 2 w + 1 + D / 2, each its own part of the products.

Bytes: 2 x keys x G x (D x bits / 8 + 4) a sequence and layer.

Legend: T rows, S spans, B single rows, C chunks, M query heads of a tile, H query heads, G KV heads, R = H / G, D head dim,
N pages or keys of a block, P slots per page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import INTERPRETED, jit, next_power_of_2, tl
from kvasir.kernels.decode_attention import Rows, Shape
from kvasir.kernels.hardware import multiprocessors
from kvasir.kernels.key_chunks import MIN_CHUNK, SHORT_CHUNK, arrive, find_chunk, keys_of, merged_at_once
from kvasir.kernels.quantized_qkv import FORMATS, Format
from kvasir.kernels.softmax_block import sink_logits


@jit
def _unpack(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr, BITTRICK: tl.constexpr):
    """Nibble ``SHIFT`` / 4 of int16 words, as a number: plus 128 (bf16) or 1024 (fp16) with ``BITTRICK``."""
    if not BITTRICK:
        numbers = ((words >> SHIFT) & 15).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        if SHIFT == 0:
            numbers = tl.inline_asm_elementwise("lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;", "=r,r", [words], tl.bfloat16, True, 2)
        elif SHIFT == 4:
            numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;}",
                                                "=r,r", [words], tl.bfloat16, True, 2)
        elif SHIFT == 8:
            numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;}",
                                                "=r,r", [words], tl.bfloat16, True, 2)
        else:
            numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;}",
                                                "=r,r", [words], tl.bfloat16, True, 2)
    elif SHIFT == 0:
        numbers = tl.inline_asm_elementwise("lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;", "=r,r", [words], tl.float16, True, 2)
    elif SHIFT == 4:
        numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA;}",
                                            "=r,r", [words], tl.float16, True, 2)
    elif SHIFT == 8:
        numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA;}",
                                            "=r,r", [words], tl.float16, True, 2)
    else:
        numbers = tl.inline_asm_elementwise("{.reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA;}",
                                            "=r,r", [words], tl.float16, True, 2)
    return numbers


@jit
def _number(bytes, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of one byte as numbers."""
    if BITS == 0:
        return bytes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return bytes.to(DTYPE)


@jit(do_not_specialize=["table_row", "count", "wave", "budget", "window"])
def _quantized_decode(
        q_ptr, k_ptr, v_ptr, k_meta, v_meta, out_ptr, lse_ptr, part_ptr, part_lse_ptr, arrived_ptr, sinks_ptr, table_ptr, context_ptr, row_start_ptr,
        spans_ptr, q_row, q_head, page_stride, head_stride, meta_page, meta_head, out_row, table_row, count, wave, budget, window, scale,
        softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, D_PAD: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COUNT_PAD: tl.constexpr, MIN_KEYS: tl.constexpr, SHORT_KEYS: tl.constexpr,
        R_PAD: tl.constexpr, MERGE: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, BITTRICK: tl.constexpr,
        WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr):
    """One KV head, one chunk of keys of one sequence; see ``decode_attention``. ``W``: words of a row (int16, or one a code)."""
    group, item = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // R
    which, first, parts, chunk = find_chunk(item, context_ptr, spans_ptr, count, wave, budget, window, BLOCK_N, COUNT_PAD, MIN_KEYS, SHORT_KEYS,
                                            WINDOWED)
    if which < count:
        span, row, low, start, stop = keys_of(which, item - first, chunk, context_ptr, row_start_ptr, spans_ptr, window, BLOCK_N, WINDOWED)
        m = tl.arange(0, BLOCK_M)
        w = tl.arange(0, W_PAD)
        n = tl.arange(0, BLOCK_N)
        head = group * R + m
        live = m < R
        wide = (w < W)[None, :]
        q_at = q_ptr + row * q_row + head[:, None] * q_head
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        mine = live[:, None] & wide
        if BITS == 4:
            e = 2 * w[None, :]
            q0 = tl.load(q_at + e, mask=mine, other=0.0)
            q1 = tl.load(q_at + e + D // 2, mask=mine, other=0.0)
            q2 = tl.load(q_at + e + 1, mask=mine, other=0.0)
            q3 = tl.load(q_at + e + 1 + D // 2, mask=mine, other=0.0)
            total_q = tl.sum(q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32), 1)
        else:
            q0 = tl.load(q_at + w[None, :], mask=mine, other=0.0)
            total_q = tl.sum(q0.to(tl.float32), 1)
        acc0 = tl.zeros([BLOCK_M, W_PAD], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0  # of 4-bit words
        shift = tl.zeros([BLOCK_M], tl.float32)  # sum of p (b - m s)
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        factor = scale * 1.4426950408889634
        table = table_ptr + span.to(tl.int64) * table_row
        kv_head, kv_meta = group.to(tl.int64) * head_stride, group.to(tl.int64) * meta_head
        pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
        for j0 in range(start, stop, BLOCK_N):
            j = j0 + n
            held = (j >= low) & (j < stop)
            page = pages.to(tl.int64)
            at = page * page_stride + kv_head + (j % P) * W
            inside = held[:, None]
            if W != W_PAD:
                inside = inside & wide
            k = tl.load(k_ptr + at[:, None] + w[None, :], mask=inside, other=0)
            v = tl.load(v_ptr + at[:, None] + w[None, :], mask=inside, other=0)
            if BITS == 0:
                at_meta = page * meta_page + kv_meta + j % P
                ks = tl.load(k_meta + at_meta, mask=held, other=0.0).to(tl.float32)
                vs = tl.load(v_meta + at_meta, mask=held, other=0.0).to(tl.float32)
            else:
                at_meta = page * meta_page + kv_meta + (j % P) * 2
                ks = tl.load(k_meta + at_meta, mask=held, other=0.0).to(tl.float32)
                kb = tl.load(k_meta + at_meta + 1, mask=held, other=0.0).to(tl.float32)
                vs = tl.load(v_meta + at_meta, mask=held, other=0.0).to(tl.float32)
                vb = tl.load(v_meta + at_meta + 1, mask=held, other=0.0).to(tl.float32)
            pages = tl.load(table + (j + BLOCK_N) // P, mask=j + BLOCK_N < stop, other=0)
            if BITS == 4:
                s = tl.dot(q0, tl.trans(_unpack(k, 0, dtype, BITTRICK)), input_precision="ieee")
                s = tl.dot(q1, tl.trans(_unpack(k, 4, dtype, BITTRICK)), s, input_precision="ieee")
                s = tl.dot(q2, tl.trans(_unpack(k, 8, dtype, BITTRICK)), s, input_precision="ieee")
                s = tl.dot(q3, tl.trans(_unpack(k, 12, dtype, BITTRICK)), s, input_precision="ieee")
            else:
                s = tl.dot(q0, tl.trans(_number(k, BITS, dtype)), input_precision="ieee")
            s *= ks[None, :]
            if BITS != 0:
                s += total_q[:, None] * (kb - OFFSET * ks)[None, :]
            if CAPPED:
                decay = tl.exp2(tl.abs(s * (scale / softcap)) * -2.8853900817779268)
                s = tl.where(s < 0, -softcap, softcap) * (1 - decay) / (1 + decay) * 1.4426950408889634
            else:
                s *= factor
            s = tl.where(held[None, :], s, -float("inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            weight = (p * vs[None, :]).to(dtype)
            if BITS == 4:
                acc0 = tl.dot(weight, _unpack(v, 0, dtype, BITTRICK), acc0 * shrink[:, None], input_precision="ieee")
                acc1 = tl.dot(weight, _unpack(v, 4, dtype, BITTRICK), acc1 * shrink[:, None], input_precision="ieee")
                acc2 = tl.dot(weight, _unpack(v, 8, dtype, BITTRICK), acc2 * shrink[:, None], input_precision="ieee")
                acc3 = tl.dot(weight, _unpack(v, 12, dtype, BITTRICK), acc3 * shrink[:, None], input_precision="ieee")
            else:
                acc0 = tl.dot(weight, _number(v, BITS, dtype), acc0 * shrink[:, None], input_precision="ieee")
            if BITS != 0:
                shift = shift * shrink + tl.sum(p * vb[None, :], 1) - OFFSET * tl.sum(weight.to(tl.float32), 1)
            top = new_top

        if SINKS and parts == 1:
            bare = top
            top, total, acc0 = sink_logits(sinks_ptr, head, live, top, total, acc0)
            fade = tl.exp2(bare - top)
            shift *= fade
            if BITS == 4:
                acc1, acc2, acc3 = acc1 * fade[:, None], acc2 * fade[:, None], acc3 * fade[:, None]
        acc0 = (acc0 + shift[:, None]) / total[:, None]
        if BITS == 4:
            acc1 = (acc1 + shift[:, None]) / total[:, None]
            acc2 = (acc2 + shift[:, None]) / total[:, None]
            acc3 = (acc3 + shift[:, None]) / total[:, None]
        if parts == 1:
            _store_parts(out_ptr + row * out_row + head[:, None] * D, acc0, acc1, acc2, acc3, w, mine, D, BITS)
            if WANT_LSE:
                tl.store(lse_ptr + row * H + head, (top + tl.log2(total)) * 0.6931471805599453, mask=live)
        else:
            at_part = (item.to(tl.int64) * G + group) * R + m
            _store_parts(part_ptr + at_part[:, None] * D, acc0, acc1, acc2, acc3, w, mine, D, BITS)
            tl.store(part_lse_ptr + at_part, top + tl.log2(total), mask=live)
            arrive(part_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, sinks_ptr, which, first, parts, row, group, out_row,
                   H, R, D, D_PAD, R_PAD, MERGE, SINKS, WANT_LSE)


@jit
def _store_parts(row_ptr, acc0, acc1, acc2, acc3, w, mask, D: tl.constexpr, BITS: tl.constexpr):
    """The elements of a row that word w held; 4-bit words hold four, others one (``acc0``)."""
    dtype = row_ptr.dtype.element_ty
    if BITS == 4:
        at = row_ptr + 2 * w[None, :]
        tl.store(at, acc0.to(dtype), mask=mask)
        tl.store(at + D // 2, acc1.to(dtype), mask=mask)
        tl.store(at + 1, acc2.to(dtype), mask=mask)
        tl.store(at + 1 + D // 2, acc3.to(dtype), mask=mask)
    else:
        tl.store(row_ptr + w[None, :], acc0.to(dtype), mask=mask)


def shape_of(format: Format, dim: int, dtype: torch.dtype, rows: int) -> Shape:
    """As ``decode_attention.Shape.of``: blocks of about the same bytes."""
    programs = min(16, 2 * rows)
    if dtype == torch.float32:
        return Shape(32, 8, 2, programs)
    return Shape(128 if format == "int4" and dim <= 128 else 64, 4, 3, programs)


def words(codes: torch.Tensor, format: Format) -> torch.Tensor:
    """A plane of codes [N, G, P, bytes] as the kernel reads it: 4-bit codes as int16, others as bytes."""
    return codes.view(torch.int16 if format == "int4" else torch.uint8)


def quantized_decode_triton(q_THD: torch.Tensor, planes: Mapping[str, torch.Tensor], format: Format, table_SW: torch.Tensor,
                            context_S: torch.Tensor, row_start_S: torch.Tensor, rows: Rows, scale: float, out_THD: torch.Tensor, *,
                            window: int | None = None, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                            lse_TH: torch.Tensor | None = None, shape: Shape | None = None) -> None:
    """``paged_attention_ref`` over what ``planes`` stand for, for queries and values in the cache's basis; otherwise as
    ``decode_attention_triton``. ``planes``: as ``quantized_qkv`` writes them."""
    _, heads, dim = q_THD.shape
    k, v = words(planes["k"], format), words(planes["v"], format)
    k_meta, v_meta = planes["k_meta"], planes["v_meta"]
    groups, size, width = k.shape[1:]
    count = rows.spans.shape[0]
    assert heads % groups == 0 and dim % 4 == 0 and dim <= 256 and size & (size - 1) == 0, "unsupported shape"
    assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k_meta.stride() == v_meta.stride(), "planes must have dense slots"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1, "rows must be dense"
    assert rows.arrived.numel() >= count * groups, "one counter a row and KV head"
    share, dim_pad, width_pad = heads // groups, max(16, next_power_of_2(dim)), max(16, next_power_of_2(width))
    shape = shape or shape_of(format, dim_pad, q_THD.dtype, count)
    wave = max(1, shape.at_once * multiprocessors(q_THD.device) // groups)
    budget = max(wave, shape.programs * multiprocessors(q_THD.device) // groups)
    chunks = count + budget
    part = torch.empty((chunks, heads, dim), dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty((chunks, heads), dtype=torch.float32, device=q_THD.device)
    share_pad = next_power_of_2(share)
    bits = FORMATS[format]
    trick = bits == 4 and q_THD.dtype in (torch.bfloat16, torch.float16) and not INTERPRETED
    offset = (0 if bits == 0 else 1 << (bits - 1)) + (0 if not trick else 128 if q_THD.dtype == torch.bfloat16 else 1024)
    absent = q_THD  # stands in for pointers that the compiled variant never touches
    _quantized_decode[(groups, chunks)](
        q_THD, k, v, k_meta, v_meta, out_THD, absent if lse_TH is None else lse_TH, part, part_lse, rows.arrived,
        absent if sinks_H is None else sinks_H, table_SW, context_S, row_start_S, rows.spans, q_THD.stride(0), q_THD.stride(1),
        k.stride(0), k.stride(1), k_meta.stride(0), k_meta.stride(1), out_THD.stride(0), table_SW.stride(0), count, wave, budget, window or 0,
        scale, softcap or 1.0, H=heads, R=share, P=size, D=dim, W=width, W_PAD=width_pad, D_PAD=dim_pad, BLOCK_M=max(16, share_pad),
        BLOCK_N=shape.block_n, COUNT_PAD=max(16, next_power_of_2(count)), MIN_KEYS=max(MIN_CHUNK, shape.block_n),
        SHORT_KEYS=SHORT_CHUNK, R_PAD=share_pad, MERGE=merged_at_once(share, dim_pad), BITS=bits, OFFSET=offset, BITTRICK=trick,
        WINDOWED=window is not None, CAPPED=softcap is not None, SINKS=sinks_H is not None, WANT_LSE=lse_TH is not None,
        num_warps=shape.warps, num_stages=shape.stages)


# -------------------------------------------------------------------------------------------------- codes made numbers


@jit(do_not_specialize=["table_row", "slots", "first_group"])
def _gather_codes(k_ptr, v_ptr, k_meta, v_meta, k_out, v_out, table_ptr, context_ptr, row_start_ptr, spans_ptr, page_stride, head_stride,
                  meta_page, meta_head, table_row, slots, first_group,
                  P: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One block of slots of one span and KV head: page -> numbers [G, slots, D], in the cache's basis."""
    block, group, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(spans_ptr + place * 2)
    end = tl.load(context_ptr + span) + tl.load(row_start_ptr + span + 1) - tl.load(row_start_ptr + span)
    if block * BLOCK < end:
        j = block * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, HALF)
        held = j < end
        mask = held[:, None] & (i < D // 2)[None, :]
        page = tl.load(table_ptr + span.to(tl.int64) * table_row + j // P, mask=held, other=0).to(tl.int64)
        head = (first_group + group).to(tl.int64)
        WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
        at = (page * page_stride + head * head_stride + (j % P) * WIDTH)[:, None] + i[None, :]
        meta = page * meta_page + head * meta_head + (j % P) * (1 if BITS == 0 else 2)
        target = ((group.to(tl.int64) * slots + tl.load(spans_ptr + place * 2 + 1) + j) * D)[:, None] + i[None, :]
        _write_numbers(k_ptr + at, k_meta + meta, k_out + target, held, mask, D, BITS)
        _write_numbers(v_ptr + at, v_meta + meta, v_out + target, held, mask, D, BITS)


@jit
def _write_numbers(codes, meta, out, held, mask, D: tl.constexpr, BITS: tl.constexpr):
    scale = tl.load(meta, mask=held, other=0.0).to(tl.float32)[:, None]
    bias = 0.0
    if BITS != 0:
        bias = tl.load(meta + 1, mask=held, other=0.0).to(tl.float32)[:, None] - (1 << (BITS - 1)) * scale
    if BITS == 4:
        both = tl.load(codes, mask=mask, other=0).to(tl.int32)
        low, high = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
    else:
        low = _number(tl.load(codes, mask=mask, other=0), BITS, tl.float32)
        high = _number(tl.load(codes + D // 2, mask=mask, other=0), BITS, tl.float32)
    tl.store(out, (low * scale + bias).to(out.dtype.element_ty), mask=mask)
    tl.store(out + D // 2, (high * scale + bias).to(out.dtype.element_ty), mask=mask)


def gather_codes_triton(planes: Mapping[str, torch.Tensor], format: Format, k_GLD: torch.Tensor, v_GLD: torch.Tensor, table_SW: torch.Tensor,
                        context_S: torch.Tensor, row_start_S: torch.Tensor, spans: torch.Tensor, blocks: int, block: int, first_group: int) -> None:
    """What the codes of ``spans`` [m, 2] int32 (span, its first slot in the result) stand for, in the cache's basis: dense
    [G, slots, D], for as many KV heads from ``first_group`` on as ``k`` and ``v`` have. ``blocks`` of ``block`` slots: the
    longest span."""
    k, v, k_meta, dim = planes["k"].view(torch.uint8), planes["v"].view(torch.uint8), planes["k_meta"], k_GLD.shape[2]
    _gather_codes[(blocks, k_GLD.shape[0], spans.shape[0])](
        k, v, k_meta, planes["v_meta"], k_GLD, v_GLD, table_SW, context_S, row_start_S, spans, k.stride(0), k.stride(1),
        k_meta.stride(0), k_meta.stride(1), table_SW.stride(0), k_GLD.shape[1], first_group, P=k.shape[2], D=dim,
        HALF=next_power_of_2(dim // 2), BITS=FORMATS[format], BLOCK=block, num_warps=8)


# ----------------------------------------------------------------------------------------------------------- test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid, as in ``decode_attention``."""

    contexts: tuple[int, ...]
    format: Format = "int4"
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page_slots: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    programs: int | None = None


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
