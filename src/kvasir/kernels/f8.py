"""Weights in FP8: codes of E4M3 and fp32 scales, one for each output (channel) or for each block of outputs x inputs.

A weight is its code times its scale; a code has the sign, four bits of exponent and three of mantissa, up to 448, and
no infinity. A scale of a whole tensor is kept as one for each of its outputs, so that fused matrices may differ.

Quantisation rounds to the nearest code, ties to even, with the largest magnitude of a channel or block on 448 ("FP8
Formats for Deep Learning", arXiv:2209.05433; blocks of 128 x 128: DeepSeek-V3, arXiv:2412.19437).

Bytes: N x K codes read and 2 N x K written. Legend: T rows, N outputs, K inputs, B outputs and inputs of a block, G
groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.norm import fits as norm_fits
from kvasir.kernels.norm import rms_norm

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
TINY = 2.0**-126  # the least normal fp32 number: a channel of zeros gets it as its scale
DEQUANTISE_N, DEQUANTISE_K = 4, 512  # weights that a program dequantises
QUANTISE_K = 1024  # inputs of a row that a program quantises, or one group if it is longer


class F8(NamedTuple):
    """A matrix in FP8: ``codes`` [..., N, K] and ``scale`` fp32: [..., N], or with a ``block`` of B outputs x B inputs
    [..., N / B, K / B], rounded up."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int = 0

    @property
    def bytes(self) -> torch.Tensor:
        """The codes as kernels take them."""
        return self.codes.view(torch.uint8)


def wide_scale(w: F8) -> torch.Tensor:
    """The scale of every weight, broadcastable to [..., N, K]."""
    if not w.block:
        return w.scale[..., None]
    outputs, inputs = w.codes.shape[-2:]
    by_row = w.scale.repeat_interleave(w.block, -2)[..., :outputs, :]
    return by_row.repeat_interleave(w.block, -1)[..., :inputs]


def dequantise_reference(w: F8, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [..., N, K] in ``dtype``: products of codes and scales in fp32, rounded once."""
    return (w.codes.float() * wide_scale(w)).to(dtype)


def quantise(w_NK: torch.Tensor, block: int = 0) -> F8:
    """The nearest codes to a matrix [..., N, K], with one scale a channel (``block`` 0) or a block."""
    w = w_NK.float()
    if not block:
        scale = (w.abs().amax(-1) / LARGEST).clamp_(min=TINY)
    else:
        outputs, inputs = w.shape[-2:]
        padded = torch.nn.functional.pad(w.abs(), (0, -inputs % block, 0, -outputs % block))
        scale = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).amax((-1, -3)) / LARGEST
        scale.clamp_(min=TINY)
    scaled = (w / wide_scale(F8(w, scale, block))).clamp_(-LARGEST, LARGEST)
    return F8(scaled.to(E4M3), scale, block)


def quantise_rows_reference(x_TK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] of the rows of x, and scales [T, G] fp32: one for each ``group`` of inputs."""
    padded = torch.nn.functional.pad(x_TK.float(), (0, -x_TK.shape[1] % group)).unflatten(1, (-1, group))
    scale_TG = (padded.abs().amax(-1) / LARGEST).clamp_(min=TINY)
    codes = (padded / scale_TG[..., None]).clamp_(-LARGEST, LARGEST).to(E4M3)
    return codes.flatten(1)[:, : x_TK.shape[1]].contiguous(), scale_TG


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def from_e4m3(codes, DTYPE: tl.constexpr):
    """Values of codes, which are bytes. From fp16 to bf16 there is but an instruction of an eighth of the rate, so they
    are fp32 in between."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)


@jit
def _dequantise(w_ptr, scale_ptr, y_ptr, N, K, B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of the matrix."""
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = (n < N)[:, None] & (k < K)[None, :]
    at = n[:, None] * K + k[None, :]
    w = from_e4m3(tl.load(w_ptr + at, mask=live, other=0), tl.float32)
    if B:
        columns = (K + B - 1) // B
        scale = tl.load(scale_ptr + (n // B)[:, None] * columns + (k // B)[None, :], mask=live, other=0.0)
    else:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    tl.store(y_ptr + at, (w * scale).to(y_ptr.dtype.element_ty), mask=live)


@jit(do_not_specialize=["rows"])
def _quantise_rows(x_ptr, norm_ptr, codes_ptr, scale_ptr, eps, rows, x_row, scale_row, scale_group, K, GROUPS,
                   GROUP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr,
                   PDL: tl.constexpr):
    """CHUNK groups of one row: their codes and scales. Rows from ``rows`` on are zeros. NORM: of the row's RMS norm,
    where the chunk is the whole row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    within = tl.arange(0, WIDTH)
    k = group[:, None] * GROUP + within[None, :]
    live = (within < GROUP)[None, :] & (k < K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_row + k, mask=live & (row < rows), other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + k, mask=live, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / K + eps)
        x = (x * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1.1754943508222875e-38)
    codes = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row * K + k, codes, mask=live)
    tl.store(scale_ptr + row * scale_row + group * scale_group, scale, mask=group < GROUPS)


def dequantise(w: F8, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``dequantise_reference``; on a GPU in one launch."""
    if not use_triton(w.codes):
        return dequantise_reference(w, dtype)
    outputs, inputs = w.codes.shape[-2:]
    assert w.codes.is_contiguous() and w.scale.is_contiguous(), "dense planes"
    assert w.codes.dim() == 2 or not w.block or outputs % w.block == 0, "the experts' blocks are whole"
    rows = w.codes.numel() // max(inputs, 1)
    y = torch.empty(w.codes.shape, dtype=dtype, device=w.codes.device)
    if rows:
        _dequantise[(cdiv(inputs, DEQUANTISE_K), cdiv(rows, DEQUANTISE_N))](
            w.bytes, w.scale, y, rows, inputs, B=w.block, BLOCK_N=DEQUANTISE_N, BLOCK_K=DEQUANTISE_K)
    return y


def quantise_rows(x_TK: torch.Tensor, group: int, pad: int = 1, by_group: bool = False,
                  norm: tuple[torch.Tensor, float] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``quantise_rows_reference``; on a GPU in one launch. ``pad``: append zeros up to a multiple of so many
    rows. ``by_group``: the scales of a group, and not those of a row, lie side by side in memory. ``norm``: weight [K]
    and eps of an RMS norm whose rows are quantised."""
    (rows, inputs), groups = x_TK.shape, cdiv(x_TK.shape[1], group)
    padded = cdiv(rows, pad) * pad
    if norm is not None and not (norm_fits(x_TK, norm[0]) and groups * group == inputs):
        x_TK, norm = rms_norm(x_TK, *norm), None
    if not use_triton(x_TK):
        codes, scale_TG = quantise_rows_reference(torch.nn.functional.pad(x_TK, (0, 0, 0, padded - rows)), group)
        return codes, scale_TG.t().contiguous().t() if by_group else scale_TG
    assert x_TK.stride(1) == 1, "dense rows"
    codes = torch.empty(padded, inputs, dtype=E4M3, device=x_TK.device)
    shape = (groups, padded) if by_group else (padded, groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
    scale_TG = scale.t() if by_group else scale
    early = pdl(x_TK.device)
    weight, eps = (x_TK, 0.0) if norm is None else norm
    if padded:
        width = next_power_of_2(group)
        chunk = max(1, min(QUANTISE_K // width, next_power_of_2(groups)))
        chunk = chunk if norm is None else next_power_of_2(groups)
        _quantise_rows[(padded, cdiv(groups, chunk))](
            x_TK, weight, codes.view(torch.uint8), scale_TG, eps, rows, x_TK.stride(0), *scale_TG.stride(), inputs,
            groups, GROUP=group, WIDTH=width, CHUNK=chunk, NORM=norm is not None, PDL=early,
            num_warps=4 if width * chunk <= QUANTISE_K else 8, launch_pdl=early)
    return codes, scale_TG


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True)
class Case:
    """One point of the test grid. ``block``: of the weights; of the rows it is the group (0: the whole row)."""

    outputs: int
    inputs: int
    block: int = 0
    experts: int | None = None


def grid() -> Iterator[Case]:
    yield Case(1, 16)
    yield Case(33, 200)
    yield Case(40, 520, experts=3)
    yield Case(64, 96, 32)
    yield Case(70, 100, 32)  # nothing is a multiple of a block
    yield Case(64, 300, 128)
    yield Case(64, 64, 32, experts=3)
