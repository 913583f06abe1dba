"""The sum of a residual stream and the expert that every row uses, behind its gate (Qwen2-MoE and its successors).

    y = residual + sigmoid(x . w) * shared        or with an RMS norm:  x / rms(x) * scale in place of x

Separately that is a product of one output, a sigmoid, a product and a sum, four launches of a few microseconds each.
Here every program computes the gate of its row again, from the L2 cache, and adds its own part of the row.

Bytes: E itemsize of w, and a row of x, shared, residual and y each.

Legend: T rows, E model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.norm import MAX_WIDTH, rms_norm_reference

BLOCK = 1024  # outputs of a program

Norm = tuple[torch.Tensor, float]  # weight [E] and eps


def add_shared_reference(x_TE: torch.Tensor, gate_E: torch.Tensor, shared_TE: torch.Tensor,
                         residual_TE: torch.Tensor | None, norm: Norm | None = None) -> torch.Tensor:
    """The sum, [T, E] in x's dtype, rounded once. ``gate_E``: the gate's matrix. ``residual_TE`` None: nothing is
    added."""
    wide_TE = x_TE.float() if norm is None else rms_norm_reference(x_TE.float(), norm[0].float(), norm[1])
    y_TE = shared_TE.float() * (wide_TE @ gate_E.float()).sigmoid().unsqueeze(1)
    return (y_TE if residual_TE is None else residual_TE.float() + y_TE).to(x_TE.dtype)


@jit
def _add_shared(x_ptr, scale_ptr, gate_ptr, shared_ptr, residual_ptr, y_ptr, x_row, eps, E: tl.constexpr,
                WIDE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
                PDL: tl.constexpr):
    """BLOCK outputs of one row. The norm is applied as a factor of the sum, as in ``kernels.gemv``."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if NORM:
        gate *= tl.load(scale_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_row + e, mask=e < E, other=0.0).to(tl.float32)
    score = tl.sum(x * gate, 0)
    if NORM:
        score *= tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.sigmoid(score) * tl.load(shared_ptr + row * E + out, mask=out < E, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * E + out, mask=out < E, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * E + out, y.to(y_ptr.dtype.element_ty), mask=out < E)


def add_shared_triton(x_TE: torch.Tensor, gate_E: torch.Tensor, shared_TE: torch.Tensor,
                      residual_TE: torch.Tensor | None, norm: Norm | None = None) -> torch.Tensor:
    """The kernel for ``add_shared_reference``. The result has the memory of ``shared_TE``."""
    rows, width = x_TE.shape
    assert x_TE.stride(1) == 1 and shared_TE.shape == x_TE.shape and shared_TE.is_contiguous(), "dense rows"
    assert width <= MAX_WIDTH and gate_E.shape == (width,) and gate_E.is_contiguous(), "a gate of a row in registers"
    assert residual_TE is None or (residual_TE.shape == x_TE.shape and residual_TE.is_contiguous()), "a dense residual"
    if rows:
        scale, eps = (gate_E, 0.0) if norm is None else norm
        residual, block, early = shared_TE if residual_TE is None else residual_TE, BLOCK, pdl(x_TE.device)
        _add_shared[(rows, cdiv(width, block))](
            x_TE, scale, gate_E, shared_TE, residual, shared_TE, x_TE.stride(0), eps, E=width,
            WIDE=next_power_of_2(width), BLOCK=block, NORM=norm is not None, RESIDUAL=residual_TE is not None,
            PDL=early, num_warps=8, launch_pdl=early)
    return shared_TE


def add_shared(x_TE: torch.Tensor, gate_E: torch.Tensor, shared_TE: torch.Tensor, residual_TE: torch.Tensor | None,
               norm: Norm | None = None) -> torch.Tensor:
    """Compute ``add_shared_reference``. The memory of ``shared_TE`` may hold the result; no other argument changes."""
    if use_triton(x_TE):
        return add_shared_triton(x_TE, gate_E, shared_TE, residual_TE, norm)
    return add_shared_reference(x_TE, gate_E, shared_TE, residual_TE, norm)


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    width: int
    norm: bool = False
    residual: bool = True


def grid() -> Iterator[Case]:
    for rows in (0, 1, 5):
        yield Case(rows, 96)
    yield Case(3, 2049, norm=True)
    yield Case(3, 1, residual=False)
    for width in (7, 1024, 2500):
        yield Case(2, width)
        yield Case(1, width, norm=True)
        yield Case(1, width, norm=True, residual=False)
