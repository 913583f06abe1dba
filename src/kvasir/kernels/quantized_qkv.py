"""From the fused projection to a quantised cache in one kernel: QK norm, RoPE, rotation, grid, packing, scatter.

What ``fused_qkv`` does, and then: keys (and values, when asked) are multiplied by an orthonormal matrix diag(signs) H, with
H block-diagonal Sylvester-Hadamard, put on a grid of their own and stored as codes and fp16 (scale, bias), fp8 with an fp32 scale. Queries are
rotated like the keys, so that attention works on codes without undoing anything (SAW-INT4, arXiv:2604.19157).

The rotation runs on the tensor cores: a product with entries of +-1 is exact, only its fp32 sums round. H of order D over
a row (a, b) of two halves is (aH + bH, aH - bH) with H of order D / 2, so that a program holds two halves throughout, and
the codes of element i and i + D / 2, which share a byte, meet in one thread.

Bytes: (H + 2 G) x D x itemsize read, H x D x itemsize and 2 x G x (D x bits / 8 + 4) written a row.

Legend: T rows, X = H + 2 G heads of the projection (queries, keys, values), H query heads, G KV heads, D head dim, N pages,
P slots a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.hardware import multiprocessors
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.quantize import FP16_MAX, FP16_TINY
from kvasir.kernels.rope import rotate

Format = Literal["int4", "int8", "fp8"]
FORMATS = {"int4": 4, "int8": 8, "fp8": 0}  # bits of an integer code
HEADS = 16  # of a program: the least that the tensor core takes
PROGRAMS = 12  # of one warp on a multiprocessor


@dataclass(frozen=True, slots=True)
class Basis:
    """The rotation of a cache: R = diag(signs) H x ``factor``, H of +-1 and 0, in the rows' dtype.

    ``parts``: ``same``: H is one block [D/2, D/2] (``matrix``) for each half of a head; ``cross``: its order is D, so that the
    halves' products are added and subtracted; ``whole``: ``matrix`` is H itself [D, D], whose blocks do not end at D / 2.
    ``values``: they are rotated, too."""

    matrix: torch.Tensor
    signs_D: torch.Tensor
    parts: Literal["same", "cross", "whole"]
    factor: float
    values: bool = False


def quantized_qkv_reference(heads_TXD: torch.Tensor, ops: HeadOps, basis: Basis | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values [T, heads, D] in the cache's basis and the rows' dtype, before the grid."""
    groups = (heads_TXD.shape[1] - ops.num_heads) // 2
    qk, v = heads_TXD.split_with_sizes((ops.num_heads + groups, groups), 1)
    if ops.norm is not None:
        qk = rms_norm_reference(qk, *ops.norm)
    cos, sin = ops.table.index_select(0, ops.positions_T).view(len(qk), 1, 2, heads_TXD.shape[2] // 2).split(1, 2)
    q, k = rotate(qk, cos, torch.cat((-sin, sin), 2)).split_with_sizes((ops.num_heads, groups), 1)
    if basis is None:
        return q, k, v
    return turn(q, basis), turn(k, basis), turn(v, basis) if basis.values else v


def turn(x: torch.Tensor, basis: Basis) -> torch.Tensor:
    """x R, in x's dtype (products in fp32 at least)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * basis.signs_D.to(wide)
    if basis.parts == "whole":
        y = y @ basis.matrix.to(wide)
    else:
        a, b = (half @ basis.matrix.to(wide) for half in y.chunk(2, -1))
        y = torch.cat((a + b, a - b) if basis.parts == "cross" else (a, b), -1)
    return (y * basis.factor).to(x.dtype)


@jit(do_not_specialize=["num_slots", "rows", "num_rows"])
def _quantized_qkv(heads_ptr, q_ptr, k_pages, v_pages, k_meta, v_meta, slots_ptr, table_ptr, positions_ptr, weight_ptr, matrix_ptr, signs_ptr,
                   eps, factor, row_stride, head_stride, page_stride, group_stride, meta_page, meta_group, num_slots,
                   rows, num_rows,
                   H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
                   NORM: tl.constexpr, BITS: tl.constexpr, TURN: tl.constexpr, TURN_VALUES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """``HEADS`` heads of ``rows`` rows, one after the other, as two halves [HEADS, HALF >= D / 2]. ``BITS`` 0: fp8."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    real = (head < H + 2 * G)[:, None] & (i < D // 2)[None, :]
    keyed = (head < H + G)[:, None]
    angled = real & keyed
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        scale_at = weight_ptr + head[:, None] * D + i[None, :]
        low_scale = tl.load(scale_at, mask=angled, other=0.0).to(tl.float32)
        high_scale = tl.load(scale_at + D // 2, mask=angled, other=0.0).to(tl.float32)
    if TURN:
        j = tl.arange(0, HALF)
        square = (i < D // 2)[:, None] & (j < D // 2)[None, :]
        WIDE: tl.constexpr = D if PARTS == "whole" else D // 2
        matrix_at = matrix_ptr + i[:, None] * WIDE + j[None, :]
        matrix = tl.load(matrix_at, mask=square, other=0.0)
        low_sign = tl.load(signs_ptr + i, mask=i < D // 2, other=0.0)[:, None]
        high_sign = tl.load(signs_ptr + D // 2 + i, mask=i < D // 2, other=0.0)[:, None]
        if PARTS == "whole":
            low_high = tl.load(matrix_at + D // 2, mask=square, other=0.0) * low_sign
            high_low = tl.load(matrix_at + (D // 2) * D, mask=square, other=0.0) * high_sign
            high_high = tl.load(matrix_at + (D // 2) * (D + 1), mask=square, other=0.0) * high_sign
        else:
            high_high = matrix * high_sign
        matrix *= low_sign
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * rows
    for number in range(0, tl.minimum(rows, num_rows - tl.program_id(0) * rows)):
        row = first + number
        source = heads_ptr + row * row_stride + head[:, None] * head_stride + i[None, :]
        raw_low = tl.load(source, mask=real, other=0.0)
        raw_high = tl.load(source + D // 2, mask=real, other=0.0)
        a, b = raw_low.to(tl.float32), raw_high.to(tl.float32)
        if NORM:
            shrink = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
            a, b = a * shrink * low_scale, b * shrink * high_scale
        angle = table_ptr + tl.load(positions_ptr + row) * D + i
        cos = tl.load(angle, mask=i < D // 2, other=1.0)[None, :]
        sin = tl.load(angle + D // 2, mask=i < D // 2, other=0.0)[None, :]
        dtype = q_ptr.dtype.element_ty
        low = tl.where(keyed, a * cos - b * sin, raw_low.to(tl.float32)).to(dtype)
        high = tl.where(keyed, b * cos + a * sin, raw_high.to(tl.float32)).to(dtype)
        if TURN:
            x = tl.dot(low, matrix, input_precision="ieee")
            if PARTS == "whole":
                x = tl.dot(high, high_low, x, input_precision="ieee")
                y = tl.dot(high, high_high, tl.dot(low, low_high, input_precision="ieee"), input_precision="ieee")
            else:
                y = tl.dot(high, high_high, input_precision="ieee")
                if PARTS == "cross":
                    z = x + y
                    y = x - y
                    x = z
            turned = keyed
            if TURN_VALUES:
                turned = keyed | True
            low = tl.where(turned, x * factor, low.to(tl.float32)).to(dtype)
            high = tl.where(turned, y * factor, high.to(tl.float32)).to(dtype)
        query = real & (head < H)[:, None]
        q = q_ptr + (row * H + head[:, None]) * D + i[None, :]
        tl.store(q, low, mask=query)
        tl.store(q + D // 2, high, mask=query)

        slot = tl.load(slots_ptr + row)
        held = (slot >= 0) & (slot < num_slots)
        is_key = (head >= H) & (head < H + G) & held
        is_value = (head >= H + G) & (head < H + 2 * G) & held
        key, value = is_key[:, None] & (i < D // 2)[None, :], is_value[:, None] & (i < D // 2)[None, :]
        WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
        place = (slot // P) * page_stride + (slot % P) * WIDTH + i[None, :]
        k_at = k_pages + place + (head - H)[:, None] * group_stride
        v_at = v_pages + place + (head - H - G)[:, None] * group_stride
        meta = (slot // P) * meta_page
        a, b = low.to(tl.float32), high.to(tl.float32)
        if BITS == 0:
            top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)
            scale = tl.minimum(tl.maximum(top / 448.0, 0.00006103515625), 65504.0)
            inverse = tl.div_rn(1.0, scale)[:, None]
            c = tl.minimum(tl.maximum(a * inverse, -448.0), 448.0).to(k_pages.dtype.element_ty)
            d = tl.minimum(tl.maximum(b * inverse, -448.0), 448.0).to(k_pages.dtype.element_ty)
            tl.store(k_at, c, mask=key)
            tl.store(k_at + D // 2, d, mask=key)
            tl.store(v_at, c, mask=value)
            tl.store(v_at + D // 2, d, mask=value)
            meta += slot % P
            tl.store(k_meta + meta + (head - H) * meta_group, scale, mask=is_key)
            tl.store(v_meta + meta + (head - H - G) * meta_group, scale, mask=is_value)
        else:
            MIDDLE: tl.constexpr = 1 << (BITS - 1)
            inside = (i < D // 2)[None, :]
            least = tl.min(tl.where(inside, tl.minimum(a, b), float("inf")), 1)
            most = tl.max(tl.where(inside, tl.maximum(a, b), -float("inf")), 1)
            scale = tl.minimum(tl.maximum(tl.div_rn(most - least, (2 * MIDDLE - 1) * 1.0), 0.00006103515625), 65504.0).to(tl.float16)
            step = scale.to(tl.float32)
            bias = tl.minimum(tl.maximum(least + MIDDLE * step, -65504.0), 65504.0).to(tl.float16)
            shift = bias.to(tl.float32)[:, None]
            inverse = tl.div_rn(1.0, step)[:, None]  # a division an element would be half of the kernel's time
            # Adding 2^23 rounds to the nearest integer and leaves it in the low bits: conversions have a quarter of the rate.
            c = tl.minimum(tl.maximum((a - shift) * inverse + MIDDLE, 0.0), 2 * MIDDLE - 1.0) + 8388608.0
            d = tl.minimum(tl.maximum((b - shift) * inverse + MIDDLE, 0.0), 2 * MIDDLE - 1.0) + 8388608.0
            c, d = c.to(tl.int32, bitcast=True) & 255, d.to(tl.int32, bitcast=True) & 255
            if BITS == 4:
                packed = (c | (d << 4)).to(tl.uint8)
                tl.store(k_at, packed, mask=key)
                tl.store(v_at, packed, mask=value)
            else:
                tl.store(k_at, c.to(tl.uint8), mask=key)
                tl.store(k_at + D // 2, d.to(tl.uint8), mask=key)
                tl.store(v_at, c.to(tl.uint8), mask=value)
                tl.store(v_at + D // 2, d.to(tl.uint8), mask=value)
            meta += (slot % P) * 2
            tl.store(k_meta + meta + (head - H) * meta_group, scale, mask=is_key)
            tl.store(k_meta + meta + (head - H) * meta_group + 1, bias, mask=is_key)
            tl.store(v_meta + meta + (head - H - G) * meta_group, scale, mask=is_value)
            tl.store(v_meta + meta + (head - H - G) * meta_group + 1, bias, mask=is_value)


def quantized_qkv(heads_TXD: torch.Tensor, ops: HeadOps, planes: Mapping[str, torch.Tensor], slots_T: torch.Tensor, format: Format,
                  basis: Basis | None = None) -> torch.Tensor:
    """Queries [T, H, D] in the cache's basis; keys and values go to their slots (int64, -1: nowhere) of ``planes`` ``k``, ``v``
    [N, G, P, bytes] and ``k_meta``, ``v_meta`` [N, G, P, 2] fp16 (fp8: [N, G, P, 1] fp32), as ``kernels.quantize`` encodes them."""
    rows, total, dim = heads_TXD.shape
    heads, k, k_meta = ops.num_heads, planes["k"], planes["k_meta"]
    groups, size = k.shape[1], k.shape[2]
    assert total == heads + 2 * groups and heads_TXD.stride(2) == 1 and dim % 2 == 0 and ops.table.shape[1] == dim, "heads do not fit"
    assert k.stride() == planes["v"].stride() and k_meta.stride() == planes["v_meta"].stride(), "keys and values must be laid out alike"
    assert k.stride(2) == k.shape[3] and k_meta.stride(2) == k_meta.shape[3] and slots_T.shape == (rows,), "planes must have dense slots"
    q_THD = torch.empty(rows, heads, dim, dtype=heads_TXD.dtype, device=heads_TXD.device)
    if rows == 0:
        return q_THD
    weight, eps = (heads_TXD, 0.0) if ops.norm is None else ops.norm
    early = pdl(heads_TXD.device)
    at_once = max(1, PROGRAMS * multiprocessors(heads_TXD.device) // cdiv(total, HEADS))
    each = cdiv(rows, at_once)  # rows of a program, so that the matrix is fetched once for them
    _quantized_qkv[(cdiv(rows, each), cdiv(total, HEADS))](
        heads_TXD, q_THD, k, planes["v"], k_meta, planes["v_meta"], slots_T, ops.table, ops.positions_T, weight,
        heads_TXD if basis is None else basis.matrix, heads_TXD if basis is None else basis.signs_D, eps, 1.0 if basis is None else basis.factor,
        heads_TXD.stride(0), heads_TXD.stride(1), k.stride(0), k.stride(1), k_meta.stride(0), k_meta.stride(1), k.shape[0] * size,
        each, rows, H=heads, G=groups, P=size, D=dim, HEADS=HEADS, HALF=max(16, next_power_of_2(dim // 2)), NORM=ops.norm is not None,
        BITS=FORMATS[format], TURN=basis is not None, TURN_VALUES=basis is not None and basis.values, PARTS="" if basis is None else basis.parts,
        PDL=early, num_warps=4 if each == 1 else 1, launch_pdl=early)
    return q_THD


# ----------------------------------------------------------------------------------------------------------- test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``order``: of the rotation, 0: none. ``skip``: every ``skip``-th row has slot -1."""

    rows: int
    heads: int
    groups: int
    dim: int
    format: Format = "int4"
    order: int = 0
    values: bool = False
    norm: bool = False
    page_slots: int = 32
    skip: int = 0


def grid() -> Iterator[Case]:
    for rows in (0, 1, 5, 19):
        yield Case(rows, 4, 2, 64, order=64, norm=True, skip=3 if rows > 1 else 0)
    yield Case(120, 3, 1, 64, order=64, norm=True)  # several rows a program
    for format in FORMATS:
        yield Case(4, 7, 1, 128, format, norm=True)
        yield Case(4, 12, 3, 96, format, order=32)
    for dim, order in ((64, 16), (80, 16), (96, 32), (128, 128), (128, 64), (256, 256)):
        yield Case(3, 16, 1, dim, order=order)
    yield Case(3, 32, 8, 128, order=128, values=True, norm=True)
    yield Case(3, 3, 3, 64, "int8", order=64, page_slots=16)


assert FP16_TINY == 0.00006103515625 and FP16_MAX == 65504.0, "the kernel has them as literals"
