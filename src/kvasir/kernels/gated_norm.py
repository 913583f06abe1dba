"""The gated RMS norm that ends a recurrent mixer: every head's result, normed, times its gate.

    y = x / rms(x) * weight * gate * sigmoid(gate)       Gated DeltaNet (silu)
    y = x / rms(x) * weight * sigmoid(gate)              Kimi Delta Attention

Separately these are five or six kernels, of which most read and write fp32. Bytes: 4 of x and twice the model's
itemsize, for each number.

Legend: T rows, H heads, V value dim, N = H V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.norm import rms_norm_reference

BLOCK = 1024  # most numbers of a program, in whole heads


def gated_norm_reference(x_THV: torch.Tensor, gate_TN: torch.Tensor, weight_V: torch.Tensor, eps: float, silu: bool,
                         exact: bool = False) -> torch.Tensor:
    """x fp32, gate in the model's type: [T, N] in the gate's type, rounded once. ``exact``: as for
    ``activation.sigmoid``."""
    gate = gate_TN.to(x_THV.dtype)
    factor = sigmoid(gate, exact)
    normed = rms_norm_reference(x_THV, weight_V, eps).flatten(1)
    return (normed * (gate * factor if silu else factor)).to(gate_TN.dtype)


@jit
def _gated_norm(x_ptr, gate_ptr, weight_ptr, y_ptr, gate_row, eps, H: tl.constexpr, V: tl.constexpr,
                HEADS: tl.constexpr, BV: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr):
    """HEADS heads of one row."""
    row, v = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < H)[:, None] & (v < V)[None, :]
    at = head[:, None] * V + v[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * H * V + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * weight[None, :] * tl.sigmoid(gate)
    if SILU:
        y *= gate
    tl.store(y_ptr + row * H * V + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_norm_triton(x_THV: torch.Tensor, gate_TN: torch.Tensor, weight_V: torch.Tensor, eps: float,
                      silu: bool) -> torch.Tensor:
    """The kernel for ``gated_norm_reference``. A row's bits depend on the row alone."""
    rows, heads, width = x_THV.shape
    assert x_THV.is_contiguous() and x_THV.dtype == torch.float32, "dense results in fp32"
    assert gate_TN.shape == (rows, heads * width) and gate_TN.stride(1) == 1, "a gate for each number"
    y_TN = torch.empty(rows, heads * width, dtype=gate_TN.dtype, device=gate_TN.device)
    if rows:
        wide, early = next_power_of_2(width), pdl(x_THV.device)
        some = min(next_power_of_2(heads), max(1, BLOCK // wide))
        _gated_norm[(rows, cdiv(heads, some))](
            x_THV, gate_TN, weight_V, y_TN, gate_TN.stride(0), eps, H=heads, V=width, HEADS=some, BV=wide, SILU=silu,
            PDL=early, num_warps=4, launch_pdl=early)
    return y_TN


def gated_norm(x_THV: torch.Tensor, gate_TN: torch.Tensor, weight_V: torch.Tensor, eps: float, *, silu: bool,
               exact: bool = False, fused: bool = True) -> torch.Tensor:
    """Compute ``gated_norm_reference``, by the kernel if ``fused`` and there is a GPU."""
    if fused and use_triton(x_THV) and x_THV.dtype == torch.float32:
        return gated_norm_triton(x_THV.contiguous(), gate_TN, weight_V, eps, silu)
    return gated_norm_reference(x_THV, gate_TN, weight_V, eps, silu, exact)


@dataclass(frozen=True)
class Case:
    """One point of the test grid."""

    rows: int
    heads: int
    width: int
    silu: bool = True


def grid() -> Iterator[Case]:
    for rows in (0, 1, 5):
        yield Case(rows, 4, 32)
    # The last ones: a program with one head of eight, heads that do not fill a block, one head that is longer than it.
    for heads, width in ((3, 12), (32, 128), (48, 128), (1, 7), (9, 128), (5, 200), (3, 1100)):
        for silu in (False, True):
            yield Case(2, heads, width, silu)
