"""Grouped products of many rows for Hopper: ``moe._grouped`` with its weights fetched by tile copies.

With some 512 pairs an expert a mixture of experts is bound by the tensor cores, and by what feeds them. Here the
weights of a block, and the inputs of the second product, which are in sorted order, come by the tensor memory
accelerator: one thread asks for a tile, and no register holds an address. Only the first product's rows are gathered,
by 16-byte copies. JOINED fetches gate and up as one operand of 2 x BLOCK_N outputs, so that a block of rows is read
from shared memory once for both. Programs may be fewer than items: each then takes one item after the other.

For weights in 16 bits that are dense and whole blocks; all others take ``moe._grouped``. What is computed is the same:
the reference is ``moe.moe_reference``.

Legend: as in ``moe``.
"""

from __future__ import annotations

from typing import Any

import torch

from kvasir.kernels._triton import cdiv, jit, tl
from kvasir.kernels.activation import ACTIVATIONS, KINDS, activate
from kvasir.kernels.hardware import multiprocessors
from kvasir.kernels.moe_routing import Routing


@jit
def _grouped_prompt(a_ptr, a_desc, w_desc, out_ptr, order_ptr, tiles_ptr, num_tiles_ptr, a_row, N: tl.constexpr,
                    D: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, JOINED: tl.constexpr,
                    FLATTEN: tl.constexpr, PDL: tl.constexpr):
    """Tiles of pairs times BLOCK_N outputs of their experts. ``w_desc``: [X x N, D], or [X x 2N, D] if GATED (gate
    first), or [X x 2, N, D] if JOINED. ``a_desc``: [P, D] in sorted order, unless GATED."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    COLUMNS: tl.constexpr = N // BLOCK_N
    d = tl.arange(0, BLOCK_D)
    items = tl.load(num_tiles_ptr) * COLUMNS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        tile = item // COLUMNS  # neighbours share rows, and an expert's weights stay in the L2 cache
        first_n = item % COLUMNS * BLOCK_N
        expert = tl.load(tiles_ptr + tile * 3)
        first = tl.load(tiles_ptr + tile * 3 + 1)
        m = first + tl.arange(0, BLOCK_M)
        live = m < tl.load(tiles_ptr + tile * 3 + 2)
        pair = tl.load(order_ptr + m, mask=live, other=0).to(tl.int64)
        a = a_ptr + (pair // TOP_K)[:, None] * a_row + d[None, :]
        if JOINED:
            acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, D, BLOCK_D):
            if GATED:
                x = tl.load(a)  # rows past the tile's end are row 0 of x: computed, and not stored
                a += BLOCK_D
            else:
                x = a_desc.load([first, start])
            if JOINED:
                w = w_desc.load([expert * 2, first_n, start]).reshape(2 * BLOCK_N, BLOCK_D)
                acc = tl.dot(x, w.T, acc)
            else:
                row = expert * (2 * N if GATED else N) + first_n
                acc = tl.dot(x, w_desc.load([row, start]).T, acc)
                if GATED:
                    acc_up = tl.dot(x, w_desc.load([row + N, start]).T, acc_up)
        n = first_n + tl.arange(0, BLOCK_N)
        if JOINED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
            out = activate(gate, up, KIND)
        elif GATED:
            out = activate(acc, acc_up, KIND)
        else:
            out = acc
        to = m.to(tl.int64) if GATED else pair
        tl.store(out_ptr + to[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None])


def fits_prompt(a: torch.Tensor, w: Any, biased: bool, outputs: int, block_n: int, block_d: int) -> bool:
    """Whether these operands can be fetched by tile copies."""
    return (
        isinstance(w, torch.Tensor)
        and not biased
        and a.dtype in (torch.bfloat16, torch.float16)
        and w.is_contiguous()
        and outputs % block_n == 0
        and a.shape[1] % block_d == 0
        and a.stride(0) % 8 == 0
        and a.data_ptr() % 16 == 0
    )


def grouped_prompt(a: torch.Tensor, w: torch.Tensor, out_PN: torch.Tensor, routing: Routing, top_k: int,
                   activation: str | None, shape: Any, early: dict[str, Any]) -> None:
    """One product of ``moe.moe_triton``. ``activation``: rows are gathered from a [T, D], and w is [X, 2N, D] of gate
    and up; None: a [P, D] is in sorted order, and w is [X, N, D]. ``shape``: a ``moe.Tile``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    outputs, inputs = out_PN.shape[1], a.shape[1]
    gated = activation is not None
    joined = gated and shape.joined
    if joined:
        w_desc = TensorDescriptor.from_tensor(w.view(-1, outputs, inputs), [2, shape.n, shape.d])
    else:
        w_desc = TensorDescriptor.from_tensor(w.view(-1, inputs), [shape.n, shape.d])
    a_desc = w_desc if gated else TensorDescriptor.from_tensor(a, [shape.m, shape.d])
    kind = 0 if activation is None else KINDS[ACTIVATIONS[activation]]
    items = cdiv(outputs, shape.n) * len(routing.tiles)
    programs = min(items, shape.programs * multiprocessors(a.device)) if shape.programs else items
    _grouped_prompt[(programs,)](
        a, a_desc, w_desc, out_PN, routing.order, routing.tiles, routing.num_tiles, a.stride(0), N=outputs, D=inputs,
        TOP_K=top_k, GATED=gated, KIND=kind, BLOCK_M=shape.m, BLOCK_N=shape.n, BLOCK_D=shape.d,
        JOINED=joined, FLATTEN=shape.programs > 0, num_warps=shape.warps, num_stages=shape.stages, **early)
