"""Scatter the K/V rows of a step into the pages: one copy of the new rows, nothing else moves.

Bytes: 2 x T x G x D x itemsize read and as many written. Slot ``page * P + offset`` says where a row goes; -1 skips it.

Legend: T rows, G KV heads, D head dim, N pages, P slots per page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl, use_triton

MAX_BLOCK = 2048  # elements of a row that one program copies


def store_kv_ref(k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor,
                 slots_T: torch.Tensor) -> None:
    """``store_kv`` in plain torch."""
    if slots_T.numel() and int(slots_T.min()) < 0:
        keep = slots_T >= 0
        k_TGD, v_TGD, slots_T = k_TGD[keep], v_TGD[keep], slots_T[keep]
    size = k_NGPD.shape[2]
    page, offset = torch.div(slots_T, size, rounding_mode="floor"), slots_T % size
    k_NGPD[page, :, offset] = k_TGD.to(k_NGPD.dtype)
    v_NGPD[page, :, offset] = v_TGD.to(v_NGPD.dtype)


def row_view(pages_NGPD: torch.Tensor) -> torch.Tensor:
    """The pages as a matrix [rows, D] over the same memory. ``row_index`` gives the row of a token's head."""
    count, heads, size, dim = pages_NGPD.shape
    return pages_NGPD.as_strided((((count - 1) * pages_NGPD.stride(0)) // dim + heads * size, dim), (dim, 1))


def row_index(slots_T: torch.Tensor, pages_NGPD: torch.Tensor) -> torch.Tensor | None:
    """Rows of ``row_view`` that hold the heads of these slots: [T * G] int64, the same for every layer of a pool. None
    when some slot is -1, or a page is not a whole number of rows: then ``store_kv`` does it."""
    _, heads, size, dim = pages_NGPD.shape
    slots = slots_T.cpu().numpy()  # numpy costs a fraction of torch for so few numbers
    if pages_NGPD.stride(0) % dim or (slots < 0).any():
        return None
    first = slots // size * (pages_NGPD.stride(0) // dim) + slots % size
    return torch.from_numpy((first[:, None] + np.arange(0, heads * size, size)).ravel()).to(slots_T.device)


@jit(do_not_specialize=["num_slots"])
def _store_kv(k, v, k_pages, v_pages, slots, k_row, k_head, v_row, v_head, page_stride, head_stride, num_slots,
              G: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        head, i = (at // D).to(tl.int64), at % D
        inside = at < G * D
        target = (slot // P) * page_stride + head * head_stride + (slot % P) * D + i
        tl.store(k_pages + target, tl.load(k + row * k_row + head * k_head + i, mask=inside), mask=inside)
        tl.store(v_pages + target, tl.load(v + row * v_row + head * v_head + i, mask=inside), mask=inside)


def store_kv_triton(k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor,
                    slots_T: torch.Tensor) -> None:
    """``store_kv`` on a GPU."""
    rows, heads, dim = k_TGD.shape
    pages, _, size, _ = k_NGPD.shape
    assert k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1), \
        "planes must be page-strided with dense slots"
    assert k_TGD.stride(-1) == 1 and v_TGD.stride(-1) == 1, "rows must be dense along the head dim"
    if rows == 0:
        return
    block = min(next_power_of_2(heads * dim), MAX_BLOCK)
    _store_kv[(rows, cdiv(heads * dim, block))](
        k_TGD, v_TGD, k_NGPD, v_NGPD, slots_T, k_TGD.stride(0), k_TGD.stride(1), v_TGD.stride(0), v_TGD.stride(1),
        k_NGPD.stride(0), k_NGPD.stride(1), pages * size, G=heads, P=size, D=dim, BLOCK=block, num_warps=4)


def store_kv(k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor,
             slots_T: torch.Tensor) -> None:
    """Write row t of ``k``, ``v`` [T, G, D] to slot ``slots[t]`` (int64; -1: nowhere) of two [N, G, P, D] page views.

    Rows are cast to the pages' dtype. Two rows must not share a slot: which one stays is undefined.
    """
    assert k_TGD.shape == v_TGD.shape and k_TGD.shape[1:] == (k_NGPD.shape[1], k_NGPD.shape[3]), \
        "rows do not fit the pages"
    assert slots_T.shape == k_TGD.shape[:1] and slots_T.dtype == torch.int64, "one int64 slot a row"
    (store_kv_triton if use_triton(k_TGD) else store_kv_ref)(k_TGD, v_TGD, k_NGPD, v_NGPD, slots_T)


def store_rows(row_TD: torch.Tensor, pages_NGPD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write row t of [T, D] to slot ``slots[t]`` of pages [N, 1, P, D], as ``store_kv`` does for keys and values."""
    rows_TGD = row_TD.unsqueeze(1)
    if use_triton(row_TD):  # the values take the keys' place: the same bytes once more, from registers
        store_kv_triton(rows_TGD, rows_TGD, pages_NGPD, pages_NGPD, slots_T)
    else:
        store_kv_ref(rows_TGD, rows_TGD, pages_NGPD, pages_NGPD, slots_T)


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``skip``: every ``skip``-th row has slot -1 (0: none)."""

    rows: int
    heads: int
    dim: int
    page_slots: int
    skip: int = 0


def grid() -> Iterator[Case]:
    for rows in (0, 1, 7, 33):
        yield Case(rows, 2, 64, 16, skip=rows // 3)
    for heads, dim in ((1, 8), (3, 80), (8, 128), (4, 256), (16, 256), (2, 512)):
        yield Case(5, heads, dim, 16)
    for page_slots in (32, 64):
        yield Case(9, 2, 96, page_slots, skip=4)
