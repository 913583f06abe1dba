"""Products with a plain matrix. In exact mode a row's bits depend neither on the number of rows in its batch nor on its
place among them.

A BLAS picks another order of summation for another number of rows. In exact mode every product therefore has one order.
On a GPU it is that of ``kernels.matmul``. On a CPU every product has the same shape: tiles of ``TILE`` rows, the last
one padded with zeros, at equally aligned addresses.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvasir import tuned
from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS, gated, gated_reference
from kvasir.kernels.matmul import matmul_invariant
from kvasir.layers.norm import RMSNorm
from kvasir.layers.weights import Placement

TILE = 32
FUSED_NORM_ROWS = tuned.FUSED_NORM_ROWS.value
# outputs; below, a BLAS may compute the last rows of a tile by another kernel (seen on an AMD EPYC: 5 to 7 and 9 to 11)
NARROW = 16
ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, and what a BLAS may look at when it picks a kernel


def matrix(*shape: int, place: Placement) -> torch.Tensor:
    """An empty weight [..., N, K]. On a CPU the memory order is [..., K, N], with which products of few rows are up to
    twice as fast."""
    if place.device.type == "cuda":
        return torch.empty(shape, device=place.device, dtype=place.dtype)
    return torch.empty(*shape[:-2], shape[-1], shape[-2], device=place.device, dtype=place.dtype).transpose(-1, -2)


def streams(place: Placement) -> bool:
    """Whether products of few rows may take the kernels of ``kernels.gemv``, whose bits depend on the number of
    rows."""
    return place.device.type == "cuda" and place.dtype == torch.bfloat16 and place.fused and not place.exact


def normed(x_TK: torch.Tensor, norm: RMSNorm | None, normed_TK: torch.Tensor | None) -> torch.Tensor:
    """``norm``(x): ``normed_TK``, where the caller has it. x itself where there is no norm."""
    if norm is None:
        return x_TK
    return norm(x_TK) if normed_TK is None else normed_TK


def with_norm(
    x_TK: torch.Tensor, norm: RMSNorm | None, normed_TK: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
    """The rows that a product of few rows with codes reads, and the norm that it applies to them itself. Beyond
    ``FUSED_NORM_ROWS`` rows it reads ``norm``(x): ``normed_TK``, where the caller has it."""
    if norm is None or x_TK.shape[0] <= FUSED_NORM_ROWS:
        return x_TK, None if norm is None else norm.parameters
    return normed(x_TK, norm, normed_TK), None


def linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, exact: bool = False
) -> torch.Tensor:
    """x @ weight^T + bias: [T, N] in x's dtype."""
    if not exact:  # what F.linear does, with fewer calls on the way
        return torch.mm(x_TK, weight_NK.t()) if bias_N is None else torch.addmm(bias_N, x_TK, weight_NK.t())
    if use_triton(x_TK):
        return matmul_invariant(x_TK, weight_NK, bias_N)
    num_rows, width = x_TK.shape
    if num_rows % TILE or not x_TK.is_contiguous() or x_TK.data_ptr() % ALIGNMENT:
        tiles = x_TK.new_zeros(-(-num_rows // TILE) * TILE, width)
        tiles[:num_rows] = x_TK
    else:
        tiles = x_TK
    width_out = weight_NK.shape[0]
    if width_out < NARROW:
        wide = weight_NK.new_zeros(width, NARROW).t()
        wide[:width_out] = weight_NK
        weight_NK = wide
    # The bias is added separately: a BLAS might add a fused one in another order.
    parts = [F.linear(tile, weight_NK) for tile in tiles.split(TILE)]
    product = (
        (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]
        if parts
        else x_TK.new_empty(0, weight_NK.shape[0])
    )
    if width_out < NARROW:
        product = product[:, :width_out].contiguous()
    return product if bias_N is None else product + bias_N


def finish(
    y_TN: torch.Tensor, activation: str | None, residual_TO: torch.Tensor | None, place: Placement
) -> torch.Tensor:
    """Apply the gated activation to the halves of a product, and add the residual, whose memory may be used."""
    if activation is not None:
        kind = ACTIVATIONS[activation]
        y_TN = gated(y_TN, kind, place.exact) if place.fused else gated_reference(y_TN, kind)
    return y_TN if residual_TO is None else y_TN.add_(residual_TO)
