"""One kernel from the fused projection to attention: QK norm, RoPE, and K/V into their pages.

Separately these are a norm, a gather of angles, a rotation in three calls and a scatter, each over all the heads.
Angles are read from the RoPE table by the row's position. Everything between load and store is fp32, so a value is
rounded once.

Bytes: (H + 2 G) x D x itemsize read and as many written a row.

Legend: T rows, X = H + 2 G heads of the projection (queries, keys, values), H query heads, G KV heads, D head dim, N
pages, P slots a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.norm import rms_norm_reference
from kvasir.kernels.rope import rotate
from kvasir.kernels.store_kv import store_kv_ref

BLOCK = 1024  # elements of a program


@dataclass(frozen=True, slots=True)
class HeadOps:
    """The operations on the heads of a projection before attention.

    ``table`` [positions, R <= D] fp32: cosines, then sines, of ``layers.rope`` for the first R dimensions of a head,
    the others are kept; ``positions_T`` int64 rows of it; ``norm``:
    weight [H + G, D] (any float dtype) and eps of the norm of every query and key head; ``exact``: a row's bits must
    not depend on the number of rows.
    """

    num_heads: int
    table: torch.Tensor
    positions_T: torch.Tensor
    norm: tuple[torch.Tensor, float] | None = None
    exact: bool = False


def fused_qkv_reference(heads_TXD: torch.Tensor, ops: HeadOps, k_NGPD: torch.Tensor | None = None,
                        v_NGPD: torch.Tensor | None = None, slots_T: torch.Tensor | None = None) -> torch.Tensor:
    """Rotated queries [T, H, D]; rotated keys and values go to their slots (int64, -1: nowhere). Without pages: X =
    H."""
    groups = 0 if k_NGPD is None else k_NGPD.shape[1]
    qk, v = heads_TXD.split_with_sizes((ops.num_heads + groups, groups), 1)
    if ops.norm is not None:
        qk = rms_norm_reference(qk, *ops.norm)
    cos, sin = ops.table.index_select(0, ops.positions_T).view(len(qk), 1, 2, ops.table.shape[1] // 2).split(1, 2)
    q, k = rotate(qk, cos, torch.cat((-sin, sin), 2)).split_with_sizes((ops.num_heads, groups), 1)
    if groups:
        store_kv_ref(k, v, k_NGPD, v_NGPD, slots_T)
    return q


# Positions and slots are slices of a step's one buffer, so their alignment changes with the number of rows.
@jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _fused_qkv(heads_ptr, q_ptr, k_pages, v_pages, slots_ptr, table_ptr, positions_ptr, weight_ptr, eps, row_stride,
               head_stride,
               page_stride, group_stride, num_slots, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
               R: tl.constexpr,
               HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    """``HEADS`` heads of one row, as two halves [HEADS, HALF >= D / 2]: the two dimensions of each pair that is turned,
    and after the R / 2 pairs the halves of the dimensions that are kept."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)
    # the dimension in the low half, and its distance to that in the high half
    i = j if R == D else tl.where(j < R // 2, j, j + R // 2)
    apart = D // 2 if R == D else tl.where(j < R // 2, R // 2, (D - R) // 2)[None, :]
    inside = (head < H + 2 * G)[:, None] & (j < D // 2)[None, :]
    turned = inside & (head < H + G)[:, None]
    if PDL:  # positions and slots were there before the step's first layer; heads are the last kernel's
        tl.extra.cuda.gdc_launch_dependents()
    angle = table_ptr + tl.load(positions_ptr + row) * R + j[None, :]
    real = inside if R == D else inside & (j < R // 2)[None, :]
    slot = tl.load(slots_ptr + row)
    # a copy for every head is where it is needed, and nothing has to be handed on
    cos = tl.load(angle, mask=real, other=1.0)
    sin = tl.load(angle + R // 2, mask=real, other=0.0)
    if NORM:
        scale = weight_ptr + head[:, None] * D + i[None, :]
        low_scale = tl.load(scale, mask=turned, other=0.0).to(tl.float32)
        high_scale = tl.load(scale + apart, mask=turned, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = heads_ptr + row * row_stride + head[:, None] * head_stride + i[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + apart, mask=inside, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a, b = a * factor * low_scale, b * factor * high_scale
    new_low = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    new_high = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    query = inside & (head < H)[:, None]
    q = q_ptr + (row * H + head[:, None]) * D + i[None, :]
    tl.store(q, new_low, mask=query)
    tl.store(q + apart, new_high, mask=query)
    if G > 0:
        held = (slot >= 0) & (slot < num_slots)
        page = (slot // P) * page_stride + (slot % P) * D
        key = turned & (head >= H)[:, None] & held
        k = k_pages + page + (head - H)[:, None] * group_stride + i[None, :]
        tl.store(k, new_low, mask=key)
        tl.store(k + apart, new_high, mask=key)
        value = inside & (head >= H + G)[:, None] & held
        v = v_pages + page + (head - H - G)[:, None] * group_stride + i[None, :]
        tl.store(v, low, mask=value)
        tl.store(v + apart, high, mask=value)


def fused_qkv(heads_TXD: torch.Tensor, ops: HeadOps, k_NGPD: torch.Tensor | None = None,
              v_NGPD: torch.Tensor | None = None, slots_T: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel for ``fused_qkv_reference``, where ``fits`` says so. Pages are of the rows' dtype."""
    rows, total, dim = heads_TXD.shape
    heads, groups = ops.num_heads, 0 if k_NGPD is None else k_NGPD.shape[1]
    assert total == heads + 2 * groups and heads_TXD.stride(2) == 1 and dim % 2 == 0 and ops.table.shape[1] <= dim, \
        "heads do not fit"
    q_THD = torch.empty(rows, heads, dim, dtype=heads_TXD.dtype, device=heads_TXD.device)
    if rows == 0:
        return q_THD
    pages, size = (heads_TXD, 1) if k_NGPD is None else (k_NGPD, k_NGPD.shape[2])
    if k_NGPD is not None:
        assert k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1) and k_NGPD.shape[3] == dim, \
            "pages: see store_kv"
        assert k_NGPD.dtype == v_NGPD.dtype == heads_TXD.dtype and slots_T.shape == (rows, ), \
            "one slot a row, of the rows' dtype"
    half = next_power_of_2(dim // 2)
    per_program = max(1, min(next_power_of_2(total), BLOCK // (2 * half)))
    weight, eps = (heads_TXD, 0.0) if ops.norm is None else ops.norm
    early = pdl(heads_TXD.device)
    _fused_qkv[(rows, cdiv(total, per_program))](
        heads_TXD, q_THD, pages, heads_TXD if v_NGPD is None else v_NGPD,
        ops.positions_T if slots_T is None else slots_T, ops.table,
        ops.positions_T, weight, eps, heads_TXD.stride(0), heads_TXD.stride(1), pages.stride(0), pages.stride(1),
        pages.shape[0] * size,
        H=heads, G=groups, P=size, D=dim, R=ops.table.shape[1], HEADS=per_program, HALF=half,
        NORM=ops.norm is not None, PDL=early, num_warps=4, launch_pdl=early)
    return q_THD


def fits(heads_TXD: torch.Tensor) -> bool:
    """Whether the kernel takes these heads."""
    return use_triton(heads_TXD) and heads_TXD.shape[2] % 2 == 0


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``groups`` 0: queries only. ``skip``: every ``skip``-th row has slot -1 (0: none).
    ``turned``: dimensions of a head that are turned (0: all)."""

    rows: int
    heads: int
    groups: int
    dim: int
    norm: bool = False
    page_slots: int = 16
    skip: int = 0
    turned: int = 0


def grid() -> Iterator[Case]:
    for rows in (0, 1, 5, 33):
        yield Case(rows, 4, 2, 64, norm=True, skip=rows // 3)
    for heads, groups, dim in ((1, 1, 8), (3, 1, 80), (32, 8, 128), (4, 4, 256), (2, 1, 512), (7, 1, 96)):
        for norm in (False, True):
            yield Case(3, heads, groups, dim, norm, page_slots=32)
    for norm in (False, True):
        yield Case(4, 6, 0, 64, norm)
        for dim, turned in ((64, 32), (128, 96), (96, 24), (10, 2)):
            yield Case(3, 5, 2, dim, norm, turned=turned)
