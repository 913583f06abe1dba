"""Mixture of experts on the device, without a host read: route, sort by expert, two grouped products, weighted sum.

A *pair* is a row with one of its experts. ``moe_routing`` sorts the pairs and lists the *tiles*: up to BLOCK_M pairs of
one expert. The grids are sized for the worst routing; programs beyond the last tile end at once. The first product
gathers its rows by pair and ends in activation(gate) * up. The second writes each pair's result to the pair's own
place, so that the weighted sum reads K neighbouring rows in the order of the row's own top-k: no atomics, no order of
arrival.

A single row needs no sort: ``_route_row`` computes the router's product, too, and ``_gate_up_row`` and ``_down_row``
stream the row's experts. The latter ends in the weighted sum. That is three launches, including the norm before and the
residual add after.

Tiles with ``copies`` fetch weights by tile copies (``kernels.moe_prompt``), for prompts.

Gather-fused grouped GEMM and the sum without atomics: SonicMoE (arXiv:2512.14080). Its token rounding, which changes
the experts that a row sees, is an option (``kernels.moe_rounding``). Bytes: 3 x F x E x itemsize per expert that has
rows. FLOPs: 6 x F x E a pair.

Weights may be codes in FP8 (``kernels.f8``): SCALES is -1 for plain ones, 0 for a scale a channel, else the outputs and
inputs of a block. Codes with scales by group have kernels of their own (``kernels.codes_moe``). What is computed is the
product with the dequantised weights.

Legend: T rows, X experts, K experts per row, P = T * K pairs, E model dim, F width of an expert, D the summed dimension
and N the outputs of one product.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvasir import tuned
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.codes_moe import down_row_codes, gate_up_row_codes, grouped_codes
from kvasir.kernels.f8 import F8, dequantise_reference, from_e4m3
from kvasir.kernels.gemv import _row
from kvasir.kernels.hardware import name_of
from kvasir.kernels.moe_prompt import fits_prompt, grouped_prompt
from kvasir.kernels.moe_rounding import Rounding, round_reference, round_triton, sum_listed_triton
from kvasir.kernels.moe_routing import Routing, _pick, route_reference, route_triton

Experts = torch.Tensor | F8 | Coded  # the matrices of all experts
Biases = tuple[torch.Tensor, torch.Tensor]  # of experts: gate_up [X, 2F], gate first, and down [X, E]


def moe_reference(x_TE: torch.Tensor, logits_TX: torch.Tensor, gate_up_XFE: Experts, down_XEF: Experts,
                  top_k: int, renormalize: bool, activation: str = "silu",
                  biases: Biases | None = None) -> torch.Tensor:
    """One pair after the other, in x's dtype, with the sum in the weights' dtype: [T, E] in x's dtype."""
    weights_TK, ids_TK = route_reference(logits_TX, top_k, renormalize)
    pairs = [list(zip(weights, ids)) for weights, ids in zip(weights_TK, ids_TK.tolist())]
    return _sum_reference(x_TE, pairs, weights_TK.dtype, gate_up_XFE, down_XEF, activation, biases)


def rounded_reference(x_TE: torch.Tensor, logits_TX: torch.Tensor, gate_up_XFE: Experts, down_XEF: Experts,
                      top_k: int, renormalize: bool, rounding: Rounding, activation: str = "silu",
                      biases: Biases | None = None, fixed_T: torch.Tensor | None = None) -> torch.Tensor:
    """``moe_reference`` of the pairs that token rounding leaves, each row's by expert."""
    routed = route_reference(logits_TX, top_k, renormalize)
    kept_TX, weights_TX = round_reference(logits_TX, *routed, renormalize, rounding, fixed_T)
    pairs = [[(weights[expert], expert) for expert in kept.nonzero().flatten().tolist()]
             for weights, kept in zip(weights_TX, kept_TX)]
    return _sum_reference(x_TE, pairs, weights_TX.dtype, gate_up_XFE, down_XEF, activation, biases)


def _sum_reference(x_TE: torch.Tensor, pairs: list[list[tuple[torch.Tensor, int]]], dtype: torch.dtype,
                   gate_up_XFE: Experts, down_XEF: Experts, activation: str, biases: Biases | None) -> torch.Tensor:
    """The sum over each row's pairs of weight and expert, in ``dtype``: [T, E] in x's dtype."""
    gate_up_XFE, down_XEF = (dequantise_reference(w, x_TE.dtype) if isinstance(w, F8) else
                             w.numbers().to(x_TE.dtype) if isinstance(w, Coded) else w
                             for w in (gate_up_XFE, down_XEF))
    out_TE = torch.zeros(x_TE.shape, dtype=dtype, device=x_TE.device)
    for t, row in enumerate(pairs):
        for weight, expert in row:
            gate_up = x_TE[t:t + 1] @ gate_up_XFE[expert].t()
            inner = gated(gate_up if biases is None else gate_up + biases[0][expert], ACTIVATIONS[activation])
            out = (inner @ down_XEF[expert].t())[0]
            out_TE[t] += weight * (out if biases is None else out + biases[1][expert]).to(weight.dtype)
    return out_TE.to(x_TE.dtype)


# ------------------------------------------------------------------------------------------------------------- products


@jit
def _activate(x, up, ACTIVATION: tl.constexpr):
    """The activations of ``kernels.activation`` in fp32, times up."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x) * up
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)) * up
    elif ACTIVATION == "clamped_swiglu":
        x = tl.minimum(x, 7.0)
        return x * tl.sigmoid(1.702 * x) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1)
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) * up


@jit
def _numbers(w, SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Weights as the product takes them; codes without their scales."""
    if SCALES >= 0:
        return from_e4m3(w, DTYPE)
    else:
        return w.to(DTYPE)


@jit
def _grouped(a_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles_ptr, a_row, w_expert, w_row,
             w_col, scale_expert, SCALES: tl.constexpr,
             N: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
             BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             PDL: tl.constexpr):
    """One tile of pairs, BLOCK_N outputs of its expert. w is [X, N, D], or [X, 2N, D] if GATED (gate first); with BIAS,
    bias [X, N] or [X, 2N] is dense.

    GATED: rows are gathered from a [T, D], and out [P, N] is in sorted order. Else a [P, D] is in sorted order and out
    [P, N] in the order of pairs.
    """
    tile = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tile < tl.load(num_tiles_ptr):
        expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        m = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live = m < tl.load(tiles_ptr + tile * 3 + 2)
        pair = tl.load(order_ptr + m, mask=live, other=0).to(tl.int64)
        row = pair // TOP_K if GATED else m.to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        d = tl.arange(0, BLOCK_D)
        a = a_ptr + row[:, None] * a_row + d[None, :]
        w = w_ptr + expert * w_expert + n.to(tl.int64)[None, :] * w_row + d[:, None] * w_col
        up = w + N * w_row
        s = w_scale_ptr + expert * scale_expert
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, D, BLOCK_D):
            if D % BLOCK_D == 0 and N % BLOCK_N == 0:
                rows_m, rows_n = live[:, None], None
            else:
                left = D - start
                rows_m, rows_n = live[:, None] & (d < left)[None, :], (n < N)[None, :] & (d < left)[:, None]
            x = tl.load(a, mask=rows_m, other=0.0)
            if SCALES >= 0:
                gate_w = from_e4m3(tl.load(w, mask=rows_n, other=None if rows_n is None else 0), x.dtype)
                if GATED:
                    up_w = from_e4m3(tl.load(up, mask=rows_n, other=None if rows_n is None else 0), x.dtype)
                if SCALES > 0:  # a step of the sum is within one block
                    at = s + n // SCALES * ((D + SCALES - 1) // SCALES) + start // SCALES
                    acc += tl.dot(x, gate_w, input_precision="ieee") * tl.load(at, mask=n < N, other=0.0)[None, :]
                    if GATED:
                        at += N // SCALES * ((D + SCALES - 1) // SCALES)
                        acc_up += tl.dot(x, up_w, input_precision="ieee") * tl.load(at, mask=n < N, other=0.0)[None, :]
                else:
                    acc = tl.dot(x, gate_w, acc, input_precision="ieee")
                    if GATED:
                        acc_up = tl.dot(x, up_w, acc_up, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.load(w, mask=rows_n, other=None if rows_n is None else 0.0), acc,
                             input_precision="ieee")
                if GATED:
                    acc_up = tl.dot(x, tl.load(up, mask=rows_n, other=None if rows_n is None else 0.0), acc_up,
                                    input_precision="ieee")
            if GATED:
                up += BLOCK_D * w_col
            a += BLOCK_D
            w += BLOCK_D * w_col
        if SCALES == 0:
            acc *= tl.load(s + n, mask=n < N, other=0.0)[None, :]
            if GATED:
                acc_up *= tl.load(s + N + n, mask=n < N, other=0.0)[None, :]
        if BIAS:
            bias = bias_ptr + expert * (2 * N if GATED else N) + n
            acc += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                acc_up += tl.load(bias + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = _activate(acc, acc_up, ACTIVATION)
        to = m.to(tl.int64) if GATED else pair
        tl.store(out_ptr + to[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty),
                 mask=live[:, None] & (n < N)[None, :])


@jit
def _sum_pairs(y_ptr, weights_ptr, out_ptr, E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr,
               RESIDUAL: tl.constexpr,
               PDL: tl.constexpr):
    """BLOCK_E outputs of one row: the pairs' results y [P, E] times their weights, in the order of the row's choices,
    in fp32, plus the old value of out if RESIDUAL."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        acc += tl.load(weights_ptr + pair) * tl.load(y_ptr + pair * E + e, mask=e < E, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(out_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + e, acc.to(out_ptr.dtype.element_ty), mask=e < E)


@jit
def _route_row(x_ptr, scale_ptr, router_ptr, bias_ptr, arrived_ptr, logits_ptr, weights_ptr, ids_ptr, eps, w_row, w_col,
               E: tl.constexpr,
               X: tl.constexpr, X_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
               RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
               BLOCK_E: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    """One logit of a single row's router, rounded to x's dtype. The program that finishes last picks the experts. A
    program has one warp, since the picking would otherwise be a series of barriers.

    NORM, here and in ``_gate_up_row``: x's RMS norm is applied as a factor of the sums, as in ``kernels.gemv``.

    ``arrived`` counts the programs that are done; the last one sets it back to zero.
    """
    part = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    at = router_ptr + part * w_row + e * w_col
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(at, mask=e < E, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros([BLOCK_E], tl.float32)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, E, BLOCK_E):
        at += BLOCK_E * w_col
        ahead = tl.load(at, mask=e < E - start - BLOCK_E, other=0.0)
        x, squares = _row(x_ptr, scale_ptr, start + e, squares, E, E % BLOCK_E == 0, NORM)
        acc += w.to(tl.float32) * x
        w = ahead
    product = tl.sum(acc, 0)
    if NORM:
        product *= tl.rsqrt(tl.sum(squares, 0) / E + eps)
    if BIAS:
        product += tl.load(bias_ptr + part).to(tl.float32)
    tl.store(logits_ptr + part, product.to(x_ptr.dtype.element_ty).to(tl.float32))
    tl.debug_barrier()  # the whole program's logits are stored before it counts as done
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        experts = tl.arange(0, X_PAD)
        choice = tl.arange(0, K_PAD)
        logits = tl.load(logits_ptr + experts, mask=experts < X, other=-float("inf"), cache_modifier=".cg")
        ids, weights = _pick(logits, experts, X, X_PAD, TOP_K, K_PAD, RENORMALIZE)
        tl.store(ids_ptr + choice, ids, mask=choice < TOP_K)
        tl.store(weights_ptr + choice, weights, mask=choice < TOP_K)


@jit
def _gate_up_row(x_ptr, scale_ptr, w_ptr, w_scale_ptr, bias_ptr, ids_ptr, inner_ptr, eps, w_expert, w_row, w_col,
                 scale_expert, SCALES: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr,
                 ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, NORM: tl.constexpr,
                 PDL: tl.constexpr):
    """BLOCK_F outputs of one expert of a single row: inner [K, F]. The bytes of w are the bound, so no tensor core is
    needed."""
    k = tl.program_id(1)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    e = tl.arange(0, BLOCK_E)
    if PDL:  # the next kernel starts once the experts are known: it fetches their weights before it waits for this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids_ptr + k).to(tl.int64)
    at = w_ptr + expert * w_expert + f[:, None] * w_row + e[None, :] * w_col
    s = w_scale_ptr + expert * scale_expert
    gate_w = tl.load(at, mask=(f < F)[:, None] & (e < E)[None, :], other=0)
    up_w = tl.load(at + F * w_row, mask=(f < F)[:, None] & (e < E)[None, :], other=0)
    squares = tl.zeros([BLOCK_E], tl.float32)
    gate = tl.zeros([BLOCK_F, BLOCK_E], tl.float32)
    up = tl.zeros([BLOCK_F, BLOCK_E], tl.float32)
    for start in range(0, E, BLOCK_E):
        at += BLOCK_E * w_col
        inside = (f < F)[:, None] & (e < E - start - BLOCK_E)[None, :]
        next_gate = tl.load(at, mask=inside, other=0)  # is on its way while this block is multiplied
        next_up = tl.load(at + F * w_row, mask=inside, other=0)
        x, squares = _row(x_ptr, scale_ptr, start + e, squares, E, E % BLOCK_E == 0, NORM)
        x_up = x
        if SCALES > 0:  # a program's outputs are within one block: its scales multiply x
            columns: tl.constexpr = (E + SCALES - 1) // SCALES
            block = s + tl.program_id(0) * BLOCK_F // SCALES * columns + (start + e) // SCALES
            x_up = x * tl.load(block + F // SCALES * columns, mask=start + e < E, other=0.0)
            x *= tl.load(block, mask=start + e < E, other=0.0)
        gate += _numbers(gate_w, SCALES, tl.float32) * x[None, :]
        up += _numbers(up_w, SCALES, tl.float32) * x_up[None, :]
        gate_w, up_w = next_gate, next_up
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / E + eps)
    gate_F, up_F = tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor
    if SCALES == 0:
        gate_F *= tl.load(s + f, mask=f < F, other=0.0)
        up_F *= tl.load(s + F + f, mask=f < F, other=0.0)
    if BIAS:
        bias = bias_ptr + expert * (2 * F) + f
        gate_F += tl.load(bias, mask=f < F, other=0.0).to(tl.float32)
        up_F += tl.load(bias + F, mask=f < F, other=0.0).to(tl.float32)
    inner = _activate(gate_F, up_F, ACTIVATION)
    tl.store(inner_ptr + k * F + f, inner.to(inner_ptr.dtype.element_ty), mask=f < F)


@jit
def _down_row(inner_ptr, w_ptr, w_scale_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, w_expert, w_row, w_col,
              scale_expert, SCALES: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr,
              TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, RESIDUAL: tl.constexpr,
              PDL: tl.constexpr):
    """BLOCK_E outputs of a single row from all its experts: out [E] is their weighted sum, added to its old value if
    RESIDUAL."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    f = tl.arange(0, BLOCK_F)
    inner_f = f[None, :] + tl.zeros([BLOCK_E, 1], tl.int32)  # each thread fetches what it multiplies
    acc = tl.zeros([BLOCK_E, BLOCK_F], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = w_ptr + e[:, None] * w_row + f[None, :] * w_col
    inside = (e < E)[:, None] & (f < F)[None, :]
    w = tl.load(at + tl.load(ids_ptr, cache_modifier=".cg").to(tl.int64) * w_expert, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if RESIDUAL:
        residual = tl.load(out_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):  # unrolled: all experts' blocks are on their way at once
        expert = at + tl.load(ids_ptr + k).to(tl.int64) * w_expert
        weight = tl.load(weights_ptr + k)
        s = w_scale_ptr + tl.load(ids_ptr + k).to(tl.int64) * scale_expert
        for start in tl.static_range(0, F, BLOCK_F):
            if k > 0 or start > 0:
                w = tl.load(expert + start * w_col, mask=(e < E)[:, None] & (f < F - start)[None, :], other=0)
            inner = tl.load(inner_ptr + k * F + start + inner_f, mask=inner_f < F - start,
                            other=0.0).to(tl.float32) * weight
            if SCALES > 0:
                block = s + tl.program_id(0) * BLOCK_E // SCALES * ((F + SCALES - 1) // SCALES) + (start + f) // SCALES
                inner *= tl.load(block, mask=f < F - start, other=0.0)[None, :]
            elif SCALES == 0:
                inner *= tl.load(s + e, mask=e < E, other=0.0)[:, None]
            acc += _numbers(w, SCALES, tl.float32) * inner
    out = tl.sum(acc, 1)
    if BIAS:
        for k in tl.static_range(TOP_K):
            bias = bias_ptr + tl.load(ids_ptr + k).to(tl.int64) * E + e
            out += tl.load(weights_ptr + k) * tl.load(bias, mask=e < E, other=0.0).to(tl.float32)
    if RESIDUAL:
        out += residual
    tl.store(out_ptr + e, out.to(out_ptr.dtype.element_ty), mask=e < E)


# ------------------------------------------------------------------------------------------------------------ launchers


class Tile(NamedTuple):
    """Shape of one product's tile (pairs, outputs, summed dimension), and how it is run.

    ``copies``: by ``moe_prompt``, where it fits; there ``joined`` fetches gate and up as one operand, and ``programs``
    is the number of programs a multiprocessor (0: one an item)."""

    m: int
    n: int
    d: int
    warps: int
    stages: int
    copies: bool = False
    joined: bool = False
    programs: int = 0


class Tiling(NamedTuple):
    """The tiles of the two products; their ``m`` is the same."""

    gate_up: Tile
    down: Tile


TILINGS = tuple((conditions, Tiling(*(Tile(*tile) for tile in tiles))) for conditions, tiles in tuned.MOE_TILINGS.value)
CODE_TILINGS = tuple((conditions, Tiling(*(Tile(*tile) for tile in tiles)))
                     for conditions, tiles in tuned.CODES_MOE.value)
FIXED_PAIRS = 96  # pairs an expert whose tiling every step of exact mode takes; another number would change its bits


@functools.cache  # every layer asks
def tiling_for(num_pairs: int, num_experts: int, dtype: torch.dtype, fixed: bool = False,
               coded: bool = False) -> Tiling:
    """Tiles for ``num_pairs`` pairs, by the pairs that an expert has on average.

    fp32 products are not for the tensor cores: they fill registers, which hold small tiles only. In 16 bits the
    weights' bytes are the bound up to some 190 pairs an expert on an H200. ``fixed``: exact mode, one tiling for every
    step. ``coded``: the weights are ``Coded``.
    """
    if coded and dtype != torch.float32:
        return tuned.look_up(CODE_TILINGS, pairs=num_pairs / num_experts)
    return tuned.look_up(TILINGS, dtype=name_of(dtype), pairs=FIXED_PAIRS if fixed else num_pairs / num_experts)


def _planes(w: Experts, block: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Numbers or codes of the experts' matrices, their scales, the scales of one expert, and the block of scales.
    ``block``: outputs or inputs that must lie in one of them."""
    if not isinstance(w, F8):
        return w, w, 0, -1
    assert not w.block or w.block % block == 0 and w.codes.shape[1] % w.block == 0, "a program's weights share scales"
    return w.bytes, w.scale, w.scale.stride(0), w.block


def moe_triton(x_TE: torch.Tensor, logits_TX: torch.Tensor, gate_up_XFE: Experts, down_XEF: Experts,
               top_k: int, renormalize: bool, activation: str = "silu", fixed: bool = False,
               tiling: Tiling | None = None, residual_TE: torch.Tensor | None = None, biases: Biases | None = None,
               routed: tuple[torch.Tensor, torch.Tensor] | None = None, rounding: Rounding | None = None,
               fixed_T: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``moe_reference`` with sums in fp32: [T, E] in x's dtype; the host reads nothing back.

    ``routed``: weights [T, K] fp32 and expert ids [T, K] int32, where the softmax of the logits does not say them.
    ``rounding``: compute ``rounded_reference`` instead; rows with a number other than 0 in ``fixed_T`` keep their
    experts.

    ``gate_up_XFE`` [X, 2F, E], gate first; ``down_XEF`` [X, E, F]. ``fixed``: a row's bits depend on the row and its
    logits alone. ``tiling`` overrides the choice by the number of pairs. ``residual_TE`` is added, overwritten with the
    result, and returned.
    """
    num_rows, dim = x_TE.shape
    (num_experts, _), dtypes = _check(gate_up_XFE, down_XEF, dim)
    assert dtypes <= {x_TE.dtype} and x_TE.stride(1) == 1, "dense rows of the weights' dtype"
    assert residual_TE is None or (residual_TE.shape == x_TE.shape and residual_TE.is_contiguous()), \
        "the residual is as the result"
    out_TE = residual_TE if residual_TE is not None else torch.empty((num_rows, dim), dtype=x_TE.dtype,
                                                                     device=x_TE.device)
    if num_rows == 0:
        return out_TE
    coded = isinstance(gate_up_XFE, Coded)
    tiling = tiling or tiling_for(num_rows * top_k, num_experts, x_TE.dtype, fixed, coded)
    assert tiling.gate_up.m == tiling.down.m, "both products run over the same tiles"
    routing = route_triton(logits_TX, top_k, renormalize, tiling.gate_up.m, routed)
    overlap = pdl(x_TE.device)
    early = {"PDL": overlap, "launch_pdl": overlap}
    if rounding is None:
        y_PE = _products(x_TE, gate_up_XFE, down_XEF, biases, activation, tiling, routing, routing, top_k, early)
        block_e = min(1024, next_power_of_2(dim))
        _sum_pairs[(num_rows, cdiv(dim, block_e))](y_PE, routing.weights, out_TE, E=dim, TOP_K=top_k, BLOCK_E=block_e,
                                                   RESIDUAL=residual_TE is not None, num_warps=4, **early)
    else:
        rounded = round_triton(logits_TX, routing.weights, routing.ids, renormalize, rounding, tiling.gate_up.m,
                               fixed_T)
        y_PE = _products(x_TE, gate_up_XFE, down_XEF, biases, activation, tiling, rounded.gather, rounded.stay, 1,
                         early)
        sum_listed_triton(y_PE, rounded, out_TE, residual_TE is not None)
    return out_TE


def _products(x_TE: torch.Tensor, gate_up_XFE: Experts, down_XEF: Experts, biases: Biases | None, activation: str,
              tiling: Tiling, gather: Routing, scatter: Routing, top_k: int, early: dict[str, bool]) -> torch.Tensor:
    """The pairs' results [P, E], each at the place that ``scatter.order`` says. The row of a sorted pair is its number
    in ``gather.order`` divided by ``top_k``."""
    pairs, dim = len(gather.order), x_TE.shape[1]
    inner_PF = torch.empty((pairs, _width(gate_up_XFE)), dtype=x_TE.dtype, device=x_TE.device)
    y_PE = torch.empty((pairs, dim), dtype=x_TE.dtype, device=x_TE.device)
    first, second = (x_TE, x_TE) if biases is None else biases
    for a, w, bias, out, shape, is_gated in ((x_TE, gate_up_XFE, first, inner_PF, tiling.gate_up, True),
                                             (inner_PF, down_XEF, second, y_PE, tiling.down, False)):
        routing = gather if is_gated else scatter
        if isinstance(w, Coded):
            grouped_codes(a, w, None if biases is None else bias, out, routing, top_k, activation if is_gated else None,
                          shape, early)
            continue
        if shape.copies and fits_prompt(a, w, biases is not None, out.shape[1], shape.n, shape.d):
            grouped_prompt(a, w, out, routing, top_k, activation if is_gated else None, shape, early)
            continue
        numbers, scale, scale_expert, scales = _planes(w, shape.d)
        _grouped[(cdiv(out.shape[1], shape.n), len(routing.tiles))](
            a, numbers, scale, bias, out, routing.order, routing.tiles, routing.num_tiles, a.stride(0),
            *numbers.stride(), scale_expert, SCALES=scales, N=out.shape[1],
            D=a.shape[1],
            TOP_K=top_k, GATED=is_gated, ACTIVATION=activation, BIAS=biases is not None, BLOCK_M=shape.m,
            BLOCK_N=shape.n, BLOCK_D=shape.d,
            num_warps=shape.warps, num_stages=shape.stages, **early)
    return y_PE


def _width(gate_up_XFE: Experts) -> int:
    """The width of an expert."""
    return (gate_up_XFE if isinstance(gate_up_XFE, torch.Tensor) else gate_up_XFE.codes).shape[1] // 2


def _check(gate_up_XFE: Experts, down_XEF: Experts, dim: int) -> tuple[tuple[int, int], set[torch.dtype]]:
    """The number of experts, their width, and the types of plain weights."""
    shapes = [(*w.codes.shape[:2], w.num_inputs) if isinstance(w, Coded) else tuple(w.codes.shape)
              if isinstance(w, F8) else tuple(w.shape) for w in (gate_up_XFE, down_XEF)]
    num_experts, width = shapes[0][0], _width(gate_up_XFE)
    assert shapes == [(num_experts, 2 * width, dim), (num_experts, dim, width)], "weights do not fit"
    assert not isinstance(gate_up_XFE, F8) or not gate_up_XFE.block or width % gate_up_XFE.block == 0, \
        "gate and up begin with a block"
    return (num_experts, width), {w.dtype for w in (gate_up_XFE, down_XEF) if isinstance(w, torch.Tensor)}


def moe_row_triton(x_1E: torch.Tensor, router_XE: torch.Tensor, gate_up_XFE: Experts, down_XEF: Experts,
                   top_k: int, renormalize: bool, arrived: torch.Tensor, activation: str = "silu", *,
                   norm: tuple[torch.Tensor, float] | None = None, residual_1E: torch.Tensor | None = None,
                   biases: Biases | None = None, router_bias_X: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``moe_reference`` for a single row, its router's logits included; each weight that is needed is read
    once.

    ``norm``: weight [E] and eps of an RMS norm of x, which is not rounded in between. ``residual_1E``, which may be x,
    is added, overwritten with the result, and returned. ``arrived`` [1] int32 on the device holds 0 before and after;
    two calls that may run at once need one each.
    """
    dim = x_1E.shape[1]
    (num_experts, width), dtypes = _check(gate_up_XFE, down_XEF, dim)
    assert x_1E.shape == (1, dim) and router_XE.shape == (num_experts, dim)
    assert dtypes | {router_XE.dtype} == {x_1E.dtype} and x_1E.stride(1) == 1, "a dense row of the weights' dtype"
    logits, weights = (torch.empty(n, dtype=torch.float32, device=x_1E.device) for n in (num_experts, top_k))
    ids = torch.empty(top_k, dtype=torch.int32, device=x_1E.device)
    inner_KF = torch.empty((top_k, width), dtype=x_1E.dtype, device=x_1E.device)
    assert residual_1E is None or (residual_1E.shape == x_1E.shape and residual_1E.stride(1) == 1), \
        "the residual is as the result"
    out_1E, overlap = torch.empty_like(x_1E) if residual_1E is None else residual_1E, pdl(x_1E.device)
    early = {"PDL": overlap, "launch_pdl": overlap}
    scale, eps = (x_1E, 0.0) if norm is None else norm
    first, second = (x_1E, x_1E) if biases is None else biases
    _route_row[(num_experts,)](
        x_1E, scale, router_XE, x_1E if router_bias_X is None else router_bias_X, arrived, logits, weights, ids, eps,
        *router_XE.stride(), E=dim, X=num_experts,
        X_PAD=next_power_of_2(num_experts), TOP_K=top_k, K_PAD=next_power_of_2(top_k), RENORMALIZE=renormalize,
        BIAS=router_bias_X is not None, BLOCK_E=min(2048, next_power_of_2(dim)), NORM=norm is not None, num_warps=1,
        **early)
    if isinstance(gate_up_XFE, Coded):
        gate_up_row_codes(x_1E, gate_up_XFE, None if biases is None else first, ids, inner_KF, norm, activation, early)
    else:
        numbers, w_scale, scale_expert, scales = _planes(gate_up_XFE, 8)
        _gate_up_row[(cdiv(width, 8), top_k)](
            x_1E, scale, numbers, w_scale, first, ids, inner_KF, eps, *numbers.stride(), scale_expert, SCALES=scales,
            E=dim, F=width, BIAS=biases is not None, ACTIVATION=activation, BLOCK_F=8,
            BLOCK_E=min(256, next_power_of_2(dim)), NORM=norm is not None, num_warps=4, **early)
    if isinstance(down_XEF, Coded):
        down_row_codes(inner_KF, down_XEF, None if biases is None else second, ids, weights, out_1E,
                       residual_1E is not None, early)
    else:
        numbers, w_scale, scale_expert, scales = _planes(down_XEF, 8)
        _down_row[(cdiv(dim, 8),)](
            inner_KF, numbers, w_scale, second, ids, weights, out_1E, *numbers.stride(), scale_expert, SCALES=scales,
            E=dim, F=width, BIAS=biases is not None, TOP_K=top_k, BLOCK_E=8, BLOCK_F=min(256, next_power_of_2(width)),
            RESIDUAL=residual_1E is not None, num_warps=8, **early)
    return out_1E


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid. ``routing``: by random logits, or all rows to the same experts."""

    rows: int
    experts: int = 8
    top_k: int = 2
    dim: int = 64
    width: int = 32
    renormalize: bool = True
    activation: str = "silu"
    routing: str = "random"
    tiling: Tiling | None = None
    bias: bool = False


def grid() -> Iterator[Case]:
    for rows in (0, 1, 2, 5, 33):
        yield Case(rows=rows)
        yield Case(rows=rows, experts=5, top_k=3, dim=40, width=24, renormalize=False)
    for experts, top_k in ((1, 1), (4, 4), (6, 1), (128, 8), (96, 5)):
        for rows in (1, 7):
            yield Case(rows=rows, experts=experts, top_k=top_k)
    for dim, width in ((16, 16), (130, 72), (200, 136), (24, 300)):
        for rows in (1, 6):
            yield Case(rows=rows, dim=dim, width=width)
    for activation in ("gelu", "gelu_tanh", "clamped_swiglu"):
        for rows in (1, 6):
            yield Case(rows=rows, activation=activation)
    for rows in (1, 7, 40):
        yield Case(rows=rows, dim=72, width=56, activation="clamped_swiglu", bias=True)
    yield Case(rows=40, routing="same")  # all experts but two without rows, several tiles an expert
    yield Case(rows=130, experts=3, top_k=1, routing="same")
    yield Case(rows=77, experts=128, top_k=8)  # several blocks of rows: 128 experts fit 32 rows a block
    yield Case(rows=140, experts=64, top_k=2)
    for _, tiling in TILINGS[1:]:  # the first is that of fp32
        yield Case(rows=45, experts=3, top_k=2, dim=136, width=144, tiling=tiling)
        yield Case(rows=45, experts=3, top_k=2, dim=256, width=128, tiling=tiling)
    for joined, programs in ((False, 0), (True, 0), (True, 1)):  # tile copies
        tile = Tile(64, 64, 64, 4, 3, True, joined, programs)
        yield Case(rows=45, experts=3, top_k=2, dim=128, width=64, tiling=Tiling(tile, tile))
