"""Norm, RoPE and write of latent rows in one kernel, with the RoPE of the heads' queries.

A program takes one row: it norms the latent, turns the rotary key, stores both in the row's page (the latent perhaps as
codes, with a scale for every block of it), and turns the rotary part of every query in place. As torch calls these are
a dozen launches. A row's bits do not depend on its batch. Bytes: (2 R + 2 Q + 2 H Q) x itemsize a row.

Legend: T rows, H heads, R rank, Q rotary elements, D other elements of a query, N pages, P slots per page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import jit, next_power_of_2, tl, use_triton
from kvasir.kernels.latent_decode import Planes, padded, wide_of
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.store_kv import store_kv_ref


def latent_rows_reference(q_THD: torch.Tensor, row_TR: torch.Tensor, pages_NGPR: torch.Tensor, slots_T: torch.Tensor,
                          rank: int, norm: tuple[torch.Tensor, float] | None,
                          turning: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """``latent_rows`` in plain torch, for tensors in fp32 or wider."""
    latent, rope = row_TR[:, :rank], row_TR[:, rank:].clone()
    latent = latent if norm is None else rms_norm_reference(latent, *norm)
    if turning is not None:
        table, positions_T = turning
        cos, sin = table[positions_T].chunk(2, -1)
        for x, c, s in ((q_THD[..., -rope.shape[1]:], cos[:, None], sin[:, None]), (rope, cos, sin)):
            real, imag = x.chunk(2, -1)
            x.copy_(torch.cat((real * c - imag * s, imag * c + real * s), -1))
    both = torch.cat((latent, rope), -1)[:, None]
    store_kv_ref(both, both, pages_NGPR, pages_NGPR, slots_T)


@jit
def _store_codes(target, meta, x, i, stored, R: tl.constexpr, R_PAD: tl.constexpr, WIDE: tl.constexpr,
                 FORMAT: tl.constexpr):
    """Encode a latent x [R_PAD] fp32 in blocks of WIDE elements, as ``kvasir.kv.quantized`` does."""
    BLOCKS: tl.constexpr = R_PAD // WIDE
    blocks = tl.reshape(x, [BLOCKS, WIDE])
    b, inside = tl.arange(0, BLOCKS), tl.reshape(i, [BLOCKS, WIDE]) < R
    live = (b * WIDE < R) & stored
    if FORMAT == "int8":
        low = tl.min(tl.where(inside, blocks, float("inf")), 1)
        high = tl.max(tl.where(inside, blocks, -float("inf")), 1)
        scale = tl.minimum(tl.maximum((high - low) / 255.0, 6.103515625e-05), 65504.0).to(tl.float16)
        bias = tl.minimum(tl.maximum(low + 128.0 * scale.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
        codes = tl.floor((blocks - bias.to(tl.float32)[:, None]) / scale.to(tl.float32)[:, None] + 0.5)
        codes = (tl.minimum(tl.maximum(codes, -128.0), 127.0) + 128.0).to(tl.uint8)
        tl.store(meta + 2 * b, scale, mask=live)
        tl.store(meta + 2 * b + 1, bias, mask=live)
    else:
        most = tl.max(tl.where(inside, tl.abs(blocks), 0.0), 1)
        scale = tl.minimum(tl.maximum(most / 448.0, 6.103515625e-05), 65504.0)
        codes = tl.minimum(tl.maximum(blocks / scale[:, None], -448.0), 448.0)
        codes = codes.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(meta + b, scale, mask=live)
    tl.store(target + i, tl.reshape(codes, [R_PAD]), mask=(i < R) & stored)


@jit(do_not_specialize=["num_slots"])
def _latent_rows(q_ptr, row_ptr, latent_ptr, rope_ptr, meta_ptr, slots_ptr, weight_ptr, table_ptr, positions_ptr, q_row,
                 q_head, row_row, latent_stride, rope_stride, meta_stride, num_slots, eps, H: tl.constexpr,
                 H_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, Q: tl.constexpr, HALF_PAD: tl.constexpr,
                 D: tl.constexpr, P: tl.constexpr, LATENT_ROW: tl.constexpr, ROPE_ROW: tl.constexpr,
                 META_ROW: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, FORMAT: tl.constexpr,
                 WIDE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    stored = (slot >= 0) & (slot < num_slots)
    page, place = slot // P, slot % P
    target = latent_ptr + page * latent_stride + place * LATENT_ROW
    i = tl.arange(0, R_PAD)
    latent = tl.load(row_ptr + t * row_row + i, mask=i < R, other=0.0)
    if NORM:
        x = latent.to(tl.float32)
        weight = tl.load(weight_ptr + i, mask=i < R, other=0.0).to(tl.float32)
        latent = x * tl.rsqrt(tl.sum(x * x, 0) / R + eps) * weight
    latent = latent.to(row_ptr.dtype.element_ty)
    if FORMAT == "plain":
        tl.store(target + i, latent, mask=(i < R) & stored)
    else:
        meta = meta_ptr + page * meta_stride + place * META_ROW
        _store_codes(target, meta, latent.to(tl.float32), i, stored, R, R_PAD, WIDE, FORMAT)
    if Q > 0:
        half: tl.constexpr = Q // 2
        j = tl.arange(0, HALF_PAD)
        inside = j < half
        real = tl.load(row_ptr + t * row_row + R + j, mask=inside, other=0.0).to(tl.float32)
        imag = tl.load(row_ptr + t * row_row + R + half + j, mask=inside, other=0.0).to(tl.float32)
        if TURN:
            position = tl.load(positions_ptr + t)
            cos = tl.load(table_ptr + position * Q + j, mask=inside, other=0.0)
            sin = tl.load(table_ptr + position * Q + half + j, mask=inside, other=0.0)
            real, imag = real * cos - imag * sin, imag * cos + real * sin
            h = tl.arange(0, H_PAD)
            at = q_ptr + t * q_row + h[:, None] * q_head + D + j[None, :]
            live = (h < H)[:, None] & inside[None, :]
            q_real = tl.load(at, mask=live, other=0.0).to(tl.float32)
            q_imag = tl.load(at + half, mask=live, other=0.0).to(tl.float32)
            tl.store(at, (q_real * cos[None, :] - q_imag * sin[None, :]).to(q_ptr.dtype.element_ty), mask=live)
            tl.store(at + half, (q_imag * cos[None, :] + q_real * sin[None, :]).to(q_ptr.dtype.element_ty), mask=live)
        rope = rope_ptr + page * rope_stride + place * ROPE_ROW + j
        tl.store(rope, real.to(rope_ptr.dtype.element_ty), mask=inside & stored)
        tl.store(rope + half, imag.to(rope_ptr.dtype.element_ty), mask=inside & stored)


def fits(q_THD: torch.Tensor, row_TR: torch.Tensor) -> bool:
    """Whether the kernel takes these rows."""
    return use_triton(q_THD) and q_THD.dtype == row_TR.dtype and q_THD.stride(-1) == 1 and row_TR.stride(-1) == 1


def latent_rows(q_THD: torch.Tensor, row_TR: torch.Tensor, planes: Planes, slots_T: torch.Tensor,
                norm: tuple[torch.Tensor, float] | None, turning: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Norm the latents, turn rotary keys and queries (these in place), and store the rows.

    ``q_THD``: [T, H, D + Q]. ``row_TR``: [T, R + Q], as projected. ``slots_T`` int64 (-1: nowhere). ``norm``: weight
    [R] and eps; None: none. ``turning``: table [positions, Q] fp32 and positions [T] int64; None: nothing turns.
    """
    rows, heads, width = q_THD.shape
    rank, rope, size, meta = planes.latent.shape[3], planes.rope.shape[3], planes.latent.shape[2], planes.meta
    assert row_TR.shape[1] == rank + rope and rope % 2 == 0 and planes.latent.stride(3) == 1, "unsupported shape"
    if not rows:
        return
    absent = row_TR  # stands in for pointers that the compiled variant never touches
    weight, eps = (absent, 0.0) if norm is None else norm
    table, positions_T = (absent, absent) if turning is None else turning
    _latent_rows[(rows,)](
        q_THD, row_TR, planes.latent, planes.rope, absent if meta is None else meta, slots_T, weight, table,
        positions_T, q_THD.stride(0), q_THD.stride(1), row_TR.stride(0), planes.latent.stride(0),
        planes.rope.stride(0), 0 if meta is None else meta.stride(0), planes.latent.shape[0] * size, eps, H=heads,
        H_PAD=next_power_of_2(heads), R=rank, R_PAD=padded(rank), Q=rope,
        HALF_PAD=next_power_of_2(max(1, rope // 2)), D=width - rope, P=size, LATENT_ROW=planes.latent.stride(2),
        ROPE_ROW=planes.rope.stride(2), META_ROW=0 if meta is None else meta.stride(2), NORM=norm is not None,
        TURN=turning is not None and rope > 0, FORMAT=planes.format, WIDE=wide_of(rank), num_warps=4)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid. ``skip``: every ``skip``-th row has slot -1 (0: none)."""

    rows: int = 5
    heads: int = 4
    rank: int = 512
    rope: int = 64
    nope: int = 128
    page_slots: int = 16
    norm: bool = True
    turn: bool = True
    skip: int = 0


def grid() -> Iterator[Case]:
    for rows in (0, 1, 7):
        yield Case(rows=rows, skip=rows // 3)
    for heads, rank, rope, nope in ((20, 512, 64, 192), (32, 256, 64, 64), (3, 320, 32, 96), (1, 96, 16, 8)):
        yield Case(heads=heads, rank=rank, rope=rope, nope=nope, page_slots=64)
    yield Case(rank=32, rope=0, turn=False)
    yield Case(rank=96, norm=False)
    yield Case(rank=96, turn=False)
