"""Attention of long spans over latents, expanded: keys and values of heads are made of the cached rows first.

One pass gathers the rows of every long span into dense scratch (decoding them where they are codes), one product each
makes keys and values of some heads, and a causal FlashAttention-2 loop (arXiv:2307.08691) reads them through tensor
descriptors. Keys are wider than values by the rotary part, which all heads share. Scratch is bounded: heads that do not
fit take turns.

For a span of few rows the absorbed form of ``latent_decode`` does less: see ``crossing``. FLOPs: 2 x rows x keys x H x
(D + Q + V) / 2 for the causal half, and 2 x keys x R x H x (D + V).

Legend: T rows, S spans, M rows of a tile, H heads, R rank, Q rotary elements, D other elements of a head's key, V of
its value, N pages, W pages of a table, P slots per page, L slots of the scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import jit, next_power_of_2, tl
from kvasir.kernels.attention_tile import planned_span
from kvasir.kernels.dense_attention import BLOCK_N, SCRATCH_BYTES, LongSpans, plan_long
from kvasir.kernels.dense_attention import Shape as DenseShape
from kvasir.kernels.latent_decode import Planes, _load_latents, padded, wide_of

CROSSING = tuned.LATENT_CROSSING.value
GATHERED = 32  # slots that a program gathers


class Shape(DenseShape):
    """Build parameters of the kernel, from a table of its own."""

    @staticmethod
    def of(dim: int) -> DenseShape:
        """Shape for keys of ``dim`` padded elements."""
        return DenseShape(*tuned.look_up(tuned.LATENT_PROMPT.value, dim=dim))


def crossing(rank: int, nope: int, value: int) -> int | None:
    """Rows from which on a span is expanded; None: the absorbed form never does more.

    A row and a key cost 2 R + Q products a head absorbed and D + Q + V expanded, which in addition takes R (D + V) for
    every key once.
    """
    saved = 2 * rank - nope - value
    return None if saved <= 0 else max(2, round(CROSSING * rank * (nope + value) / saved))


def can_serve(dtype: torch.dtype, rope: int) -> bool:
    """Whether the kernel takes these rows."""
    return dtype in (torch.bfloat16, torch.float16) and (rope == 0 or rope in (16, 32, 64, 128))


def plan_prompts(starts: list[int], lengths: list[int], spans: list[int], nope: int, rope: int,
                 device: torch.device | str, shape: DenseShape | None = None) -> LongSpans:
    """Cut ``spans`` of a step into tiles of one head, on the host."""
    return plan_long(starts, lengths, spans, 1, device, shape or Shape.of(_pad(nope) + _pad(rope)))


def _pad(width: int) -> int:
    return max(16, next_power_of_2(width))


@jit(do_not_specialize=["table_row"])
def _gather_latents(latent_ptr, rope_ptr, meta_ptr, out_ptr, rope_out_ptr, table_ptr, context_ptr, row_start_ptr,
                    spans_ptr, latent_stride, rope_stride, meta_stride, table_row, P: tl.constexpr, R: tl.constexpr,
                    R_PAD: tl.constexpr, Q: tl.constexpr, Q_PAD: tl.constexpr, LATENT_ROW: tl.constexpr,
                    ROPE_ROW: tl.constexpr, META_ROW: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
                    WIDE: tl.constexpr):
    """One block of slots of one span: page -> latents [L, R] and rotary keys [L, Q_PAD]. Slots past the span's end
    become zeros."""
    block, place = tl.program_id(0), tl.program_id(1)
    span = tl.load(spans_ptr + place * 2)
    end = tl.load(context_ptr + span) + tl.load(row_start_ptr + span + 1) - tl.load(row_start_ptr + span)
    padded_end = tl.cdiv(end, 128) * 128
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if block * BLOCK_N < padded_end:
        held = j < end
        page = tl.load(table_ptr + span.to(tl.int64) * table_row + j // P, mask=held, other=0).to(tl.int64)
        slot = j % P
        c = _load_latents(latent_ptr, meta_ptr, page, slot, held, latent_stride, meta_stride, R, R_PAD, LATENT_ROW,
                          META_ROW, BLOCK_N, FORMAT, WIDE, out_ptr.dtype.element_ty)
        c = tl.where(held[:, None], c, 0.0)
        i, r = tl.arange(0, R_PAD), tl.arange(0, Q_PAD)
        target = (tl.load(spans_ptr + place * 2 + 1) + j).to(tl.int64)
        tl.store(out_ptr + target[:, None] * R + i[None, :], c, mask=(i < R)[None, :])
        at = page * rope_stride + slot * ROPE_ROW
        rope = tl.load(rope_ptr + at[:, None] + r[None, :], mask=held[:, None] & (r < Q)[None, :], other=0.0)
        tl.store(rope_out_ptr + target[:, None] * Q_PAD + r[None, :], rope)


@jit(do_not_specialize=["slots", "first_head"])
def _latent_prompt(q_ptr, k_desc, rope_desc, v_desc, out_ptr, context_ptr, row_start_ptr, items_ptr, q_row, q_head,
                   out_row, out_head, first_head, scale, D: tl.constexpr, D_PAD: tl.constexpr, Q: tl.constexpr,
                   Q_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """One tile and head over keys [L, heads x D] and values [L, heads x V]. A head that is no power of two wide is
    loaded with the next head's elements, which zeros of the query, or the store, leave out."""
    tile, turn = tl.program_id(0), tl.program_id(1)
    span = tl.load(items_ptr + tile * 3)
    first_row = tl.load(items_ptr + tile * 3 + 1)
    base = tl.load(items_ptr + tile * 3 + 2)
    context, span_row, length = planned_span(span, context_ptr, row_start_ptr)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, r, i = tl.arange(0, D_PAD), tl.arange(0, Q_PAD), tl.arange(0, V_PAD)
    local = first_row + m
    live = local < length
    row = (span_row + local).to(tl.int64)
    q_at = q_ptr + row[:, None] * q_row + (first_head + turn) * q_head
    q = tl.load(q_at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    if Q > 0:
        q_rope = tl.load(q_at + D + r[None, :], mask=live[:, None] & (r < Q)[None, :], other=0.0)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    factor = scale * 1.4426950408889634
    whole = (context + first_row + 1) // BLOCK_N * BLOCK_N  # blocks below it are seen by every row, and need no mask
    end = context + tl.minimum(first_row + BLOCK_M, length)
    for j0 in range(0, end, BLOCK_N):
        k = k_desc.load([base + j0, turn * D])
        v = v_desc.load([base + j0, turn * V])
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if Q > 0:
            s = tl.dot(q_rope, tl.trans(rope_desc.load([base + j0, 0])), s, input_precision="ieee")
        if j0 >= whole:
            s = tl.where((j0 + n)[None, :] <= (context + local)[:, None], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * factor)  # every row sees the first key
        p = tl.exp2(s * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = new_top
    out = out_ptr + row[:, None] * out_row + (first_head + turn) * out_head + i[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (i < V)[None, :])


def latent_prompt_triton(q_THD: torch.Tensor, planes: Planes, key_HDR: torch.Tensor, value_HVR: torch.Tensor,
                         table_SW: torch.Tensor, context_S: torch.Tensor, row_start_S: torch.Tensor, long: LongSpans,
                         scale: float, out_THV: torch.Tensor, *, scratch_bytes: int = SCRATCH_BYTES) -> None:
    """Compute attention of the long spans' rows into their rows of ``out`` [T, H, V].

    ``q_THD``: queries of heads [T, H, D + Q]. ``key_HDR``, ``value_HVR``: the heads' products with the latent.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (heads, nope, rank), value, device = key_HDR.shape, value_HVR.shape[1], q_THD.device
    rope = planes.rope.shape[3]
    assert can_serve(q_THD.dtype, rope) and q_THD.shape[1:] == (heads, nope + rope) and q_THD.stride(-1) == 1, \
        "unsupported shape"
    assert rank % 8 == 0 and nope % 8 == 0 and value % 8 == 0, "rows of keys and values must be whole 16 bytes"
    absent, meta, shape, wide = q_THD, planes.meta, long.shape, _pad(rope)
    latent_LR = torch.empty(long.slots, rank, dtype=q_THD.dtype, device=device)
    rope_LQ = torch.empty(long.slots, wide, dtype=q_THD.dtype, device=device)
    blocks = long.blocks * BLOCK_N // GATHERED
    _gather_latents[(blocks, long.spans.shape[0])](
        planes.latent, planes.rope, absent if meta is None else meta, latent_LR, rope_LQ, table_SW, context_S,
        row_start_S, long.spans, planes.latent.stride(0), planes.rope.stride(0), 0 if meta is None else meta.stride(0),
        table_SW.stride(0), P=planes.latent.shape[2], R=rank, R_PAD=padded(rank), Q=rope, Q_PAD=wide,
        LATENT_ROW=planes.latent.stride(2), ROPE_ROW=planes.rope.stride(2),
        META_ROW=0 if meta is None else meta.stride(2), BLOCK_N=GATHERED, FORMAT=planes.format, WIDE=wide_of(rank),
        num_warps=4)
    at_once = heads_at_once(heads, long.slots * (nope + value) * q_THD.element_size(), scratch_bytes)
    rope_desc = TensorDescriptor.from_tensor(rope_LQ, [shape.block_n, wide])
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        k_LD, v_LV = (torch.mm(latent_LR, weight[some].flatten(0, 1).t()) for weight in (key_HDR, value_HVR))
        k_desc = TensorDescriptor.from_tensor(k_LD, [shape.block_n, _pad(nope)])
        v_desc = TensorDescriptor.from_tensor(v_LV, [shape.block_n, _pad(value)])
        _latent_prompt[(long.items.shape[0], k_LD.shape[1] // nope)](
            q_THD, k_desc, rope_desc, v_desc, out_THV, context_S, row_start_S, long.items, q_THD.stride(0),
            q_THD.stride(1), out_THV.stride(0), out_THV.stride(1), first, scale, D=nope, D_PAD=_pad(nope), Q=rope,
            Q_PAD=wide, V=value, V_PAD=_pad(value), BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
            num_warps=shape.warps, num_stages=shape.stages)


def heads_at_once(heads: int, head_bytes: int, scratch_bytes: int) -> int:
    """Heads whose keys and values fit into the scratch together, at least one."""
    return max(1, min(heads, scratch_bytes // max(1, head_bytes)))


# ------------------------------------------------------------------------------------------------------------ test grid


SHORTEST = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: ``spans`` as (start, length); those of at least ``SHORTEST`` rows are computed
    here."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 2
    rank: int = 32
    rope: int = 16
    nope: int = 24
    value: int = 16
    page_slots: int = 16
    scratch_bytes: int = SCRATCH_BYTES
    format: str = "plain"


def grid() -> Iterator[Case]:
    yield Case(spans=((0, 150),))
    yield Case(spans=((40, 1), (200, 60), (0, 5), (17, 34)), heads=3, scratch_bytes=0)  # one head at a time
    yield Case(spans=((60, 40),), rank=512, rope=64, nope=128, value=128, page_slots=64)
    yield Case(spans=((33, 21), (0, 130)), rank=256, rope=64, nope=64, value=128)
    yield Case(spans=((130, 30),), rank=96, rope=0, nope=32, value=40)
    yield Case(spans=((70, 25),), rank=320, rope=32, nope=96, value=128, format="int8", page_slots=32)
