"""One kernel from the fused projection to a quantised cache: QK norm, RoPE, rotation, grid, packing, scatter.

The kernel does what ``fused_qkv`` does. Then keys (and values, when asked) are multiplied by an orthonormal matrix
diag(signs) H, with H block-diagonal Sylvester-Hadamard, and put on each row's own grid: codes with an fp16 (scale,
bias), fp8 with an fp32 scale. Queries are rotated like the keys, so that attention works on codes without undoing
anything (SAW-INT4, arXiv:2604.19157).

The rotation of order 2^n is one of order 16 on the tensor cores, whose entries of +-1 make products exact, followed by
n - 4 stages of sums and differences of blocks of 16. Programs have one warp, with eight heads below each other and
their blocks below those: what a stage adds lies in the registers of one thread, and nothing waits for another warp. Few
rows take four heads a program: a row is done sooner, at the cost of sums across lanes. The last stage is that of the
two halves of a row. So a program holds two halves throughout, and the codes of elements i and i + D / 2, which share a
byte, meet in one thread.

Bytes: (H + 2 G) x D x itemsize read, H x D x itemsize and 2 x G x (D x bits / 8 + 4) written a row.

Legend: T rows, X = H + 2 G heads of the projection (queries, keys, values), H query heads, G KV heads, D head dim, N
pages, P slots a page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvasir import tuned
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.quantize import FP16_MAX, FP16_TINY
from kvasir.kernels.rope import rotate

Format = Literal["int4", "int8", "fp8"]
FORMATS = {"int4": 4, "int8": 8, "fp8": 0}  # bits of an integer code
BLOCK = 16  # elements: the least that the tensor core takes, of rows, too
FEW = tuned.QUANTIZED_WRITE_ROWS.value  # rows of a step up to which small programs are faster


@dataclass(frozen=True, slots=True)
class Basis:
    """The rotation of a cache: R = diag(signs) H / sqrt(``order``), H of +-1 and 0, in the rows' dtype.

    ``parts``: ``same``: H is one block [D/2, D/2] (``matrix``) for each half of a head; ``cross``: its order is D, so
    that the halves' products are added and subtracted; ``whole``: ``matrix`` is H itself [D, D], whose blocks do not
    end at D / 2. ``values``: values are rotated, too.
    """

    matrix: torch.Tensor
    signs_D: torch.Tensor
    parts: Literal["same", "cross", "whole"]
    order: int
    values: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel: a program's heads, each half of them as ``blocks`` of ``width`` elements (powers
    of two), and the ``stages`` of sums over blocks."""

    heads: int
    blocks: int
    width: int
    stages: int
    warps: int

    @staticmethod
    def of(rows: int, dim: int, basis: Basis | None) -> Shape:
        """Shape for ``rows`` rows of heads of ``dim``: heads and warps from the table of tuned numbers, the rest
        follows from the rotation."""
        half = dim // 2
        rotation = "none" if basis is None else "whole" if basis.parts == "whole" or half % BLOCK else "blocks"
        heads, warps = _heads_and_warps(rotation, rows <= FEW)
        if rotation != "blocks":
            return Shape(heads, 1, max(BLOCK if rotation == "whole" else 1, next_power_of_2(half)), 0, warps)
        order, blocks = basis.order // 2 if basis.parts == "cross" else basis.order, next_power_of_2(half // BLOCK)
        return Shape(max(heads, BLOCK // blocks), blocks, BLOCK, max(0, (order // BLOCK).bit_length() - 1), warps)


@functools.cache  # every layer asks
def _heads_and_warps(rotation: str, few: bool) -> tuple:
    return tuned.look_up(tuned.QUANTIZED_WRITE.value, rotation=rotation, few=few)


def quantized_qkv_reference(heads_TXD: torch.Tensor, ops: HeadOps,
                            basis: Basis | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    return (y * basis.order**-0.5).to(x.dtype)


@jit
def _times(x, matrix, BLOCKS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Every row of x [BLOCKS, HEADS, WIDTH] times a matrix [WIDTH, WIDTH], in fp32."""
    product = tl.dot(tl.reshape(x, [BLOCKS * HEADS, WIDTH]), matrix, input_precision="ieee")
    return tl.reshape(product, [BLOCKS, HEADS, WIDTH])


@jit
def _sums(x, BLOCKS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr):
    """Sums and differences of the blocks ``APART`` from each other, in their places."""
    a, b = tl.split(tl.permute(tl.reshape(x, [BLOCKS // (2 * APART), 2, APART * HEADS, WIDTH]), (0, 2, 3, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), [BLOCKS, HEADS, WIDTH])


@jit
def _turned(x, matrix, BLOCKS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """x [BLOCKS, HEADS, WIDTH] times H of order WIDTH x 2^STAGES, whose first rows and columns are ``matrix``."""
    x = _times(x, matrix, BLOCKS, HEADS, WIDTH)
    for stage in tl.static_range(STAGES):
        x = _sums(x, BLOCKS, HEADS, WIDTH, 2**stage)
    return x


@jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _quantized_qkv(heads_ptr, q_ptr, k_pages, v_pages, k_meta, v_meta, slots_ptr, table_ptr, positions_ptr, weight_ptr,
                   matrix_ptr, signs_ptr,
                   eps, factor, row_stride, head_stride, page_stride, group_stride, meta_page, meta_group, num_slots,
                   H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
                   BLOCKS: tl.constexpr,
                   WIDTH: tl.constexpr, NORM: tl.constexpr, BITS: tl.constexpr, TURN: tl.constexpr,
                   TURN_VALUES: tl.constexpr,
                   PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):
    """``HEADS`` heads of one row, as two halves [BLOCKS, HEADS, WIDTH]. ``BITS`` 0: fp8."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    i = tl.arange(0, BLOCKS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]  # of a half
    inside = i < D // 2
    real = (head < H + 2 * G) & inside
    keyed = head < H + G
    if PDL:  # positions and slots were there before the step's first layer; heads are the last kernel's
        tl.extra.cuda.gdc_launch_dependents()
    angle = table_ptr + tl.load(positions_ptr + row) * D + i
    slot = tl.load(slots_ptr + row)
    # a copy for every head is where it is needed, and nothing has to be handed on
    cos = tl.load(angle, mask=real, other=1.0)
    sin = tl.load(angle + D // 2, mask=real, other=0.0)
    if NORM:
        scale_at = weight_ptr + head * D + i
        low_scale = tl.load(scale_at, mask=real & keyed, other=0.0).to(tl.float32)
        high_scale = tl.load(scale_at + D // 2, mask=real & keyed, other=0.0).to(tl.float32)
    if TURN:
        low_sign = tl.load(signs_ptr + i, mask=real, other=0.0)
        high_sign = tl.load(signs_ptr + D // 2 + i, mask=real, other=0.0)
        w = tl.arange(0, WIDTH)
        known = (w < D // 2)[:, None] & (w < D // 2)[None, :]
        matrix_at = matrix_ptr + w[:, None] * (D if PARTS == "whole" else D // 2) + w[None, :]
        matrix = tl.load(matrix_at, mask=known, other=0.0)
        if PARTS == "whole":
            low_high = tl.load(matrix_at + D // 2, mask=known, other=0.0)
            high_low = tl.load(matrix_at + (D // 2) * D, mask=known, other=0.0)
            high_high = tl.load(matrix_at + (D // 2) * (D + 1), mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = heads_ptr + row * row_stride + head * head_stride + i
    raw_low = tl.load(source, mask=real, other=0.0).to(tl.float32)
    raw_high = tl.load(source + D // 2, mask=real, other=0.0).to(tl.float32)
    a, b = raw_low, raw_high
    if NORM:
        shrink = tl.rsqrt(_of_head_sum(a * a + b * b) / D + eps)
        a, b = a * shrink * low_scale, b * shrink * high_scale
    dtype = q_ptr.dtype.element_ty
    low = tl.where(keyed, a * cos - b * sin, raw_low).to(dtype)
    high = tl.where(keyed, b * cos + a * sin, raw_high).to(dtype)
    if TURN:
        MIXED: tl.constexpr = not TURN_VALUES and (H + G) % HEADS != 0  # programs with keys and values
        if TURN_VALUES or MIXED or tl.program_id(1) * HEADS < H + G:
            x, y = low * low_sign, high * high_sign
            if PARTS == "whole":
                z = _times(x, low_high, BLOCKS, HEADS, WIDTH) + _times(y, high_high, BLOCKS, HEADS, WIDTH)
                x = _times(x, matrix, BLOCKS, HEADS, WIDTH) + _times(y, high_low, BLOCKS, HEADS, WIDTH)
                y = z
            else:
                x = _turned(x, matrix, BLOCKS, HEADS, WIDTH, STAGES)
                y = _turned(y, matrix, BLOCKS, HEADS, WIDTH, STAGES)
                if PARTS == "cross":
                    z = x + y
                    y = x - y
                    x = z
            x, y = x * factor, y * factor
            if MIXED:
                x, y = tl.where(keyed, x, low.to(tl.float32)), tl.where(keyed, y, high.to(tl.float32))
            low, high = x.to(dtype), y.to(dtype)
    query = real & (head < H)
    q = q_ptr + (row * H + head) * D + i
    tl.store(q, low, mask=query)
    tl.store(q + D // 2, high, mask=query)

    if (tl.program_id(1) + 1) * HEADS > H:  # not queries alone
        held = (slot >= 0) & (slot < num_slots)
        is_key = (head >= H) & keyed & held
        is_value = (head >= H + G) & (head < H + 2 * G) & held
        key, value = is_key & inside, is_value & inside
        place = (slot // P) * page_stride + (slot % P) * (D // 2 if BITS == 4 else D) + i
        k_at = k_pages + place + (head - H) * group_stride
        v_at = v_pages + place + (head - H - G) * group_stride
        meta = (slot // P) * meta_page + (slot % P) * (1 if BITS == 0 else 2)
        k_grid = k_meta + meta + (head - H) * meta_group  # [1, HEADS, 1]
        v_grid = v_meta + meta + (head - H - G) * meta_group
        a, b = low.to(tl.float32), high.to(tl.float32)
        if BITS == 0:
            top = _of_head_max(tl.maximum(tl.abs(a), tl.abs(b)))
            scale = tl.minimum(tl.maximum(top / 448.0, 0.00006103515625), 65504.0)
            inverse = tl.div_rn(1.0, scale)
            c = tl.minimum(tl.maximum(a * inverse, -448.0), 448.0).to(k_pages.dtype.element_ty)
            d = tl.minimum(tl.maximum(b * inverse, -448.0), 448.0).to(k_pages.dtype.element_ty)
        else:
            MIDDLE: tl.constexpr = 1 << (BITS - 1)
            least = -_of_head_max(tl.where(inside, -tl.minimum(a, b), -float("inf")))
            most = _of_head_max(tl.where(inside, tl.maximum(a, b), -float("inf")))
            scale = tl.minimum(tl.maximum(tl.div_rn(most - least, (2 * MIDDLE - 1) * 1.0), 0.00006103515625),
                               65504.0).to(tl.float16)
            step = scale.to(tl.float32)
            bias = tl.minimum(tl.maximum(least + MIDDLE * step, -65504.0), 65504.0).to(tl.float16)
            shift = bias.to(tl.float32)
            inverse = tl.div_rn(1.0, step)  # a division an element would be half of the kernel's time
            # Adding 2^23 rounds to the nearest integer and leaves it in the low bits: conversions have a quarter of the
            # rate.
            c = tl.minimum(tl.maximum((a - shift) * inverse + MIDDLE, 0.0), 2 * MIDDLE - 1.0) + 8388608.0
            d = tl.minimum(tl.maximum((b - shift) * inverse + MIDDLE, 0.0), 2 * MIDDLE - 1.0) + 8388608.0
            c, d = c.to(tl.int32, bitcast=True) & 255, d.to(tl.int32, bitcast=True) & 255
            if BITS == 4:
                c = c | (d << 4)
            c, d = c.to(tl.uint8), d.to(tl.uint8)
            tl.store(k_grid + 1, bias, mask=is_key)
            tl.store(v_grid + 1, bias, mask=is_value)
        tl.store(k_grid, scale, mask=is_key)
        tl.store(v_grid, scale, mask=is_value)
        tl.store(k_at, c, mask=key)
        tl.store(v_at, c, mask=value)
        if BITS != 4:
            tl.store(k_at + D // 2, d, mask=key)
            tl.store(v_at + D // 2, d, mask=value)


@jit
def _of_head_max(x):
    """The largest element of every head, [1, HEADS, 1], of x [BLOCKS, HEADS, WIDTH]."""
    return tl.max(tl.max(x, 0, keep_dims=True), 2, keep_dims=True)


@jit
def _of_head_sum(x):
    """The sum of every head's elements, [1, HEADS, 1], of x [BLOCKS, HEADS, WIDTH]."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 2, keep_dims=True)


def quantized_qkv(heads_TXD: torch.Tensor, ops: HeadOps, planes: Mapping[str, torch.Tensor], slots_T: torch.Tensor,
                  format: Format, basis: Basis | None = None) -> torch.Tensor:
    """Queries [T, H, D] in the cache's basis. Keys and values go to their slots (int64, -1: nowhere) of ``planes``
    ``k``, ``v`` [N, G, P, bytes] and ``k_meta``, ``v_meta`` [N, G, P, 2] fp16 (fp8: [N, G, P, 1] fp32), encoded as
    ``kernels.quantize`` does."""
    rows, total, dim = heads_TXD.shape
    heads, k, k_meta = ops.num_heads, planes["k"], planes["k_meta"]
    groups, size = k.shape[1], k.shape[2]
    assert total == heads + 2 * groups and heads_TXD.stride(2) == 1 and dim % 2 == 0 and ops.table.shape[1] == dim, \
        "heads do not fit"
    assert k.stride() == planes["v"].stride() and k_meta.stride() == planes["v_meta"].stride(), \
        "keys and values must be laid out alike"
    assert k.stride(2) == k.shape[3] and k_meta.stride(2) == k_meta.shape[3] and slots_T.shape == (rows, ), \
        "planes must have dense slots"
    q_THD = torch.empty(rows, heads, dim, dtype=heads_TXD.dtype, device=heads_TXD.device)
    if rows == 0:
        return q_THD
    weight, eps = (heads_TXD, 0.0) if ops.norm is None else ops.norm
    early = pdl(heads_TXD.device)
    # a shape has an order of its own in which a head's squares are summed
    shape = Shape.of(FEW + 1 if ops.exact else rows, dim, basis)
    _quantized_qkv[(rows, cdiv(total, shape.heads))](
        heads_TXD, q_THD, k, planes["v"], k_meta, planes["v_meta"], slots_T, ops.table, ops.positions_T, weight,
        heads_TXD if basis is None else basis.matrix, heads_TXD if basis is None else basis.signs_D, eps,
        1.0 if basis is None else basis.order**-0.5,
        heads_TXD.stride(0), heads_TXD.stride(1), k.stride(0), k.stride(1), k_meta.stride(0), k_meta.stride(1),
        k.shape[0] * size,
        H=heads, G=groups, P=size, D=dim, HEADS=shape.heads, BLOCKS=shape.blocks, WIDTH=shape.width,
        NORM=ops.norm is not None,
        BITS=FORMATS[format], TURN=basis is not None, TURN_VALUES=basis is not None and basis.values,
        PARTS="" if basis is None else basis.parts,
        STAGES=shape.stages, PDL=early, num_warps=shape.warps, launch_pdl=early)
    return q_THD


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``order``: that of the rotation, 0: none. ``skip``: every ``skip``-th row has slot
    -1."""

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
    for rows in (0, 1, 5, 19):  # up to FEW, and more
        yield Case(rows, 4, 2, 64, order=64, norm=True, skip=3 if rows > 1 else 0)
    yield Case(40, 3, 1, 64, order=64, norm=True)
    for format in FORMATS:
        yield Case(4, 7, 1, 128, format, norm=True)
        yield Case(17, 12, 3, 96, format, order=32)
    for rows, dim, order in ((17, 64, 16), (3, 80, 16), (3, 96, 32), (17, 128, 128), (3, 128, 64), (17, 128, 16),
                             (3, 256, 256), (17, 256, 256)):
        yield Case(rows, 16, 1, dim, order=order)
    yield Case(3, 32, 8, 128, order=128, values=True, norm=True)
    yield Case(17, 32, 8, 128, order=128)  # programs of queries, of keys and of values
    yield Case(3, 3, 3, 64, "int8", order=64, page_slots=16)


assert FP16_TINY == 0.00006103515625 and FP16_MAX == 65504.0, "the kernel has them as literals"
