"""Products of experts whose weights are codes with scales by group: ``kernels.moe`` launches them where the matrices
are ``codes_gemv.Coded``.

The codes stay packed in memory and become numbers in registers, as in ``kernels.codes_gemv``, whose kernel of one row
takes the gate and up of a row's experts, too. A tile of pairs is a product W x^T: the weights are the left side, which
tensor cores of Hopper read from registers.

Bytes: those of the planes of every expert that has rows, once for each tile of its pairs. Legend: T rows, X experts, K
experts per row, P = T * K pairs, N outputs and D inputs of one product, B bytes and G groups of a row of W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl
from kvasir.kernels.activation import ACTIVATIONS, KINDS, activate
from kvasir.kernels.code_tiles import expert_at, factor_of, inputs_of, load_scales, scales_of, weights_of
from kvasir.kernels.codes_gemv import Coded, _one_row_codes, add_product
from kvasir.kernels.gemv import UNGATED
from kvasir.kernels.moe_routing import Routing


@jit
def _codes(at, live, b, B):
    """A block of bytes [N, BYTES], which other tiles of the same expert may read from the L2 cache."""
    return tl.load(at + b[None, :], mask=live[:, None] & (b < B)[None, :], other=0)


@jit
def _gathered(x_ptr, x_row, row, live_m, k, D):
    """Inputs k of the rows of a tile: x^T [., M]."""
    return tl.load(x_ptr + row[None, :] * x_row + k[:, None], mask=live_m[None, :] & (k < D)[:, None], other=0.0)


@jit
def _grouped_codes(x_ptr, w_ptr, w_scale_ptr, more_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles_ptr, x_row,
                   N: tl.constexpr, D: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TOP_K: tl.constexpr,
                   KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr,
                   LAYOUT: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):
    """One tile of pairs, BLOCK_N outputs of its expert, as ``moe._grouped`` has it. KIND of the activation >= 0: the
    matrix has gate and up, rows are gathered from x [T, D], and out [P, N] is in sorted order. Else x [P, D] is in
    sorted order and out [P, N] in the order of pairs."""
    tile = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tile < tl.load(num_tiles_ptr):
        GATED: tl.constexpr = KIND >= 0
        ROWS: tl.constexpr = 2 * N if GATED else N
        expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        m = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live_m = m < tl.load(tiles_ptr + tile * 3 + 2)
        pair = tl.load(order_ptr + m, mask=live_m, other=0).to(tl.int64)
        row = pair // TOP_K if GATED else m.to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        b = tl.arange(0, BYTES)
        k = tl.arange(0, PAIR * BYTES)
        live = n < N
        w_ptr, w_scale_ptr, more_ptr = expert_at(w_ptr, w_scale_ptr, more_ptr, expert * ROWS, B, G, ZEROS)
        at = w_ptr + n.to(tl.int64)[:, None] * B
        up_at = w_ptr + (n.to(tl.int64) + N)[:, None] * B
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        s, z = load_scales(w_scale_ptr, more_ptr, n, live, 0, G, LAYOUT, ZEROS, GROUP, GROUPS)
        if GATED:
            s_up, z_up = load_scales(w_scale_ptr, more_ptr, n + N, live, 0, G, LAYOUT, ZEROS, GROUP, GROUPS)
        for b0 in range(0, B, BYTES):
            w = _codes(at, live, b0 + b, B)
            x = _gathered(x_ptr, x_row, row, live_m, b0 * PAIR + k, D)
            group = (b0 // BYTES + 1) * GROUPS
            ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
            acc = add_product(acc, w, s, z, x, LAYOUT, BLOCK_N, GROUP, GROUPS, BYTES, PAIR, ZEROS, ASM)
            s, z = ahead, z_ahead
            if GATED:
                w = _codes(up_at, live, b0 + b, B)
                ahead, z_ahead = load_scales(w_scale_ptr, more_ptr, n + N, live, group, G, LAYOUT, ZEROS, GROUP, GROUPS)
                acc_up = add_product(acc_up, w, s_up, z_up, x, LAYOUT, BLOCK_N, GROUP, GROUPS, BYTES, PAIR, ZEROS, ASM)
                s_up, z_up = ahead, z_ahead
        acc *= factor_of(w_scale_ptr, more_ptr, n, live, LAYOUT, GROUP)[:, None]
        if GATED:
            acc_up *= factor_of(w_scale_ptr, more_ptr, n + N, live, LAYOUT, GROUP)[:, None]
        if BIAS:
            bias = bias_ptr + expert * ROWS + n
            acc += tl.load(bias, mask=live, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc_up += tl.load(bias + N, mask=live, other=0.0).to(tl.float32)[:, None]
        to = pair
        if GATED:
            acc = activate(acc, acc_up, KIND)
            to = m.to(tl.int64)
        tl.store(out_ptr + to[None, :] * N + n[:, None], acc.to(out_ptr.dtype.element_ty),
                 mask=live[:, None] & live_m[None, :])


@jit
def _down_row_codes(inner_ptr, w_ptr, w_scale_ptr, more_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, N: tl.constexpr,
                    D: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr,
                    RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
                    GROUP: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr, ZEROS: tl.constexpr,
                    ASM: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_N outputs of a single row from all its experts: out [N] is their weighted sum, added to its old value if
    RESIDUAL. See ``moe._down_row``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BYTES)
    wide_b = tl.broadcast_to(b[None, :], [BLOCK_N, BYTES])  # in the layout of the codes: nothing changes places
    live = n < N
    acc = tl.zeros([BLOCK_N, BYTES], tl.float32)
    out = tl.zeros([BLOCK_N], tl.float32)
    row = n.to(tl.int64)[:, None] * B
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = _codes(w_ptr + tl.load(ids_ptr, cache_modifier=".cg").to(tl.int64) * (N * B) + row, live, b, B)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if RESIDUAL:
        out += tl.load(out_ptr + n, mask=live, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):  # unrolled: all experts' blocks are on their way at once
        expert = tl.load(ids_ptr + k).to(tl.int64)
        weight = tl.load(weights_ptr + k)
        at, scale, more = expert_at(w_ptr, w_scale_ptr, more_ptr, expert * N, B, G, ZEROS)
        own = tl.zeros([BLOCK_N, BYTES], tl.float32)
        for b0 in tl.static_range(0, B, BYTES):
            if k > 0 or b0 > 0:
                w = _codes(at + row, live, b0 + b, B)
            s, z = load_scales(scale, more, n, live, b0 // BYTES * GROUPS, G, LAYOUT, ZEROS, GROUP, GROUPS)
            s, z = scales_of(s, z, LAYOUT)
            even, odd = weights_of(w, s, z, LAYOUT, BLOCK_N, GROUPS, BYTES, ZEROS, GROUP != 0, ASM)
            x_even, x_odd = inputs_of(inner_ptr + k * D, b0 + wide_b, B, PAIR, False)
            own += even * x_even
            if PAIR == 2:
                own += odd * x_odd
        acc += own * (factor_of(scale, more, n, live, LAYOUT, GROUP)[:, None] * weight)
        if BIAS:
            out += weight * tl.load(bias_ptr + expert * N + n, mask=live, other=0.0).to(tl.float32)
    out += tl.sum(acc, 1)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=live)


# ------------------------------------------------------------------------------------------------------------ launchers


def row_shape(gated: bool) -> tuple[int, int, int]:
    """Outputs and warps of a program for a single row, and bytes of codes of one output in flight."""
    return tuned.look_up(tuned.CODES_ROW.value, gated=gated)


def block_of(w: Coded, inputs: int) -> int:
    """Inputs that a program takes at a time: about so many, in whole groups."""
    return max(inputs, w.group, 16 * w.pair)


# Layouts of experts: a code has no upper bits beside it, and a scale no factor of its own.
SERVED = frozenset({"i8", "u4", "mxfp4", "nvfp4"})


def planes_of(w: Coded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and ``more`` of experts in a layout of ``SERVED``."""
    assert w.layout in SERVED, w.layout
    codes, _, scales, more = w.pointers()
    return codes, scales, more


def grouped_codes(x: torch.Tensor, w: Coded, bias: torch.Tensor | None, out_PN: torch.Tensor,
                  routing: Routing, top_k: int, activation: str | None, tile: tuple[int, ...],
                  early: dict[str, bool]) -> None:
    """Write one of the two products of all pairs; see ``_grouped_codes``. ``tile``: a ``moe.Tile``, of
    which pairs, outputs, inputs, warps and stages count. ``activation`` None: it is that of ``down``."""
    (pairs, outputs, inputs, warps, stages, *_), num_outputs = tile, out_PN.shape[1]
    _grouped_codes[(cdiv(num_outputs, outputs), len(routing.tiles))](
        x, *planes_of(w), x if bias is None else bias, out_PN, routing.order, routing.tiles, routing.num_tiles,
        x.stride(0), N=num_outputs,
        D=w.num_inputs, TOP_K=top_k, KIND=UNGATED if activation is None else KINDS[ACTIVATIONS[activation]],
        BIAS=bias is not None, BLOCK_M=pairs, BLOCK_N=outputs, **w.constants(block_of(w, inputs)), num_warps=warps,
        num_stages=stages, **early)


def gate_up_row_codes(x_1D: torch.Tensor, w: Coded, bias: torch.Tensor | None, ids: torch.Tensor, out_KN: torch.Tensor,
                      norm: tuple[torch.Tensor, float] | None, activation: str, early: dict[str, bool]) -> None:
    """Write activation(gate) * up of a single row's experts ``ids`` [K]: [K, N], after the norm."""
    num_outputs, norm_D, eps = out_KN.shape[1], *(norm or (x_1D, 0.0))
    block_n, warps, size = row_shape(True)
    constants = w.constants(block_of(w, min(size * w.pair, next_power_of_2(w.num_inputs))))
    whole = w.codes.shape[-1] % constants["BYTES"] == 0 and num_outputs % block_n == 0
    _one_row_codes[(cdiv(num_outputs, block_n), len(ids))](
        x_1D, *w.pointers(), out_KN, norm_D, x_1D if bias is None else bias, out_KN, eps, num_outputs, w.num_inputs,
        **constants, BLOCK_N=block_n, WHOLE=whole, NORM=norm is not None, BIAS=bias is not None,
        KIND=KINDS[ACTIVATIONS[activation]], RESIDUAL=False, ids_ptr=ids, EXPERTS=True, num_warps=warps, **early)


def down_row_codes(inner_KD: torch.Tensor, w: Coded, bias: torch.Tensor | None, ids: torch.Tensor,
                   weights: torch.Tensor, out_1N: torch.Tensor, residual: bool, early: dict[str, bool]) -> None:
    """Write, or add to ``out_1N``, the weighted sum of a single row's experts."""
    num_outputs, (block_n, warps, size) = out_1N.shape[1], row_shape(False)
    inputs = min(size * w.pair, next_power_of_2(w.num_inputs))
    _down_row_codes[(cdiv(num_outputs, block_n),)](
        inner_KD, *planes_of(w), inner_KD if bias is None else bias, ids, weights, out_1N, N=num_outputs,
        D=w.num_inputs, TOP_K=len(ids), BIAS=bias is not None, RESIDUAL=residual, BLOCK_N=block_n,
        **w.constants(block_of(w, inputs)), num_warps=warps, **early)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid: both products of experts, as ``kernels.moe`` launches them. ``outputs`` and ``warps``
    are those of a tile."""

    layout: str
    group: int
    rows: int
    zeros: bool = False
    experts: int = 5
    dim: int = 96
    width: int = 64
    activation: str = "silu"
    bias: bool = False
    outputs: int = 32
    warps: int = 2


def grid() -> Iterator[Case]:
    for layout, group, zeros in (("i8", 0, False), ("i8", 32, False), ("u4", 32, False), ("u4", 64, True),
                                 ("mxfp4", 32, False), ("nvfp4", 16, False)):
        for rows in (1, 3, 40):
            yield Case(layout, group, rows, zeros, dim=128 if group == 64 else 96)
        yield Case(layout, group, 9, zeros, dim=128, width=128, outputs=64, warps=4)
    for rows in (0, 1, 7):  # gpt-oss: nothing is a multiple of a block
        yield Case("mxfp4", 32, rows, dim=160, width=224, activation="clamped_swiglu", bias=True)
    yield Case("u4", 128, 2, dim=384, width=256, activation="gelu_tanh", bias=True)
    yield Case("u4", 0, 1, True, dim=72, width=40)
