"""Linear layers. In exact mode a row's bits depend neither on the number of rows in its batch nor on its place among
them.

A BLAS picks another order of summation for another number of rows. In exact mode every product therefore has one order.
On a GPU it is that of ``kernels.matmul``. On a CPU every product has the same shape: tiles of ``TILE`` rows, the last
one padded with zeros, at equally aligned addresses.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kvasir.kernels import packed_fp16
from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS, gated, gated_reference
from kvasir.kernels.gemv import choose, gemv
from kvasir.kernels.hopper_gemv import GATES, choose_ring, stream_rows
from kvasir.kernels.matmul import matmul_invariant
from kvasir.layers.adapters import LowRank
from kvasir.layers.norm import RMSNorm
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch

TILE = 32
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


class Linear:
    """One or more stored matrices with the same input, fused along the output. ``widths``: the output size of each.

    ``low_rank``: adapters that rows with a variant add to the product; None: there are none."""

    def __init__(self, num_inputs: int, widths: dict[str, int], *, bias: bool, place: Placement) -> None:
        total = sum(widths.values())
        self.widths = widths
        self.exact, self.fused = place.exact, place.fused
        self.streams = streams(place)
        self.weight_NK = matrix(total, num_inputs, place=place)
        self.weight_KN = self.weight_NK.t()
        self.bias_N = torch.empty(total, device=place.device, dtype=place.dtype) if bias else None
        self.place = place
        self.low_rank: LowRank | None = None
        self.packed: torch.ScriptObject | None = None  # a copy for products of few rows, made by the first
        self.may_pack = place.device.type == "cpu" and place.dtype == torch.float32 and not bias

    def __call__(
        self,
        x_TK: torch.Tensor,
        norm: RMSNorm | None = None,
        residual_TN: torch.Tensor | None = None,
        activation: str | None = None,
        batch: StepBatch | None = None,
    ) -> torch.Tensor:
        """The product of x, or of ``norm``(x): [T, N]. With ``activation`` the halves of N are gate and up, and the
        result is [T, N / 2]. ``residual_TN`` is added, and its memory may be used for the result. ``batch`` says which
        rows have variants."""
        if batch is not None and batch.variants is not None and self.low_rank is not None:
            return self._varied(x_TK, norm, residual_TN, activation, batch)
        if self._streams(activation):
            halves = activation is not None
            if (ring := choose_ring(x_TK.shape[0], self.weight_NK, halves)) is not None:
                return stream_rows(
                    x_TK if norm is None else norm(x_TK), self.weight_NK, ring, gated=halves, residual_TO=residual_TN
                )
        if self.streams and (config := choose(x_TK.shape[0], *self.weight_NK.shape)) is not None:
            return gemv(
                x_TK,
                self.weight_NK,
                config,
                norm=None if norm is None else norm.parameters,
                bias_N=self.bias_N,
                activation=activation,
                residual_TO=residual_TN,
            )
        if norm is not None:
            x_TK = norm(x_TK)
        if residual_TN is not None and self.streams and self.bias_N is None and activation is None:
            return residual_TN.addmm_(x_TK, self.weight_KN)  # the BLAS adds as it stores
        y = self.product(x_TK)
        if activation is not None:
            y = (
                gated(y, ACTIVATIONS[activation], self.exact)
                if self.fused
                else gated_reference(y, ACTIVATIONS[activation])
            )
        return y if residual_TN is None else y.add_(residual_TN)

    def _varied(
        self,
        x_TK: torch.Tensor,
        norm: RMSNorm | None,
        residual_TN: torch.Tensor | None,
        activation: str | None,
        batch: StepBatch,
    ) -> torch.Tensor:
        """Compute the product and what variants add to it. A row without a variant gets the bits of ``__call__``: where
        that one applies the activation to fp32 sums, these are kept in fp32 up to here."""
        assert activation is None or residual_TN is None, "no layer needs both"
        shape = x_TK.shape[0], self.weight_NK.shape[0]
        ring = choose_ring(shape[0], self.weight_NK, activation is not None) if self._streams(activation) else None
        config = choose(shape[0], *self.weight_NK.shape) if self.streams and ring is None else None
        scale = None if norm is None else norm.parameters
        if config is not None and self.low_rank.fits(config):
            shrunk, rest = self.low_rank.shrink(x_TK, batch, norm), {"bias_N": self.bias_N, "residual_TO": residual_TN}
            return gemv(x_TK, self.weight_NK, config, norm=scale, activation=activation, shrunk=shrunk, **rest)
        normed = x_TK if norm is None else norm(x_TK)
        if activation is None:  # a ring and the BLAS take the normed rows, as they would in ``__call__``
            y = self(normed, None, residual_TN) if config is None else self(x_TK, norm, residual_TN)
            self.extra(normed, y, batch)
            return y
        if ring is not None:
            y = stream_rows(normed, self.weight_NK, ring, out_TO=normed.new_empty(shape, dtype=torch.float32))
        elif config is not None:
            y = normed.new_empty(shape, dtype=torch.float32)
            gemv(x_TK, self.weight_NK, config, norm=scale, bias_N=self.bias_N, out_TO=y)
        else:
            y = self.product(normed)
        if self.fused and use_triton(y):
            return self.low_rank.add_gated(normed, y, batch, activation)
        self.extra(normed, y, batch)
        gate = ACTIVATIONS[activation]
        y = gated(y, gate, self.exact) if self.fused else gated_reference(y, gate)
        return y.to(x_TK.dtype)

    def extra(self, x_TK: torch.Tensor, y_TN: torch.Tensor, batch: StepBatch) -> None:
        """Add to the product ``y_TN`` of ``x_TK``, before activation, what the variants of the batch's rows say."""
        self.low_rank.add(x_TK, y_TN, batch, partial(linear, exact=True))

    def _streams(self, activation: str | None) -> bool:
        """Whether a product of few rows may take the kernels that are written by hand."""
        return self.streams and self.bias_N is None and activation in GATES

    def use_adapters(self, num_slots: int, rank: int) -> None:
        """Make room for so many resident adapters of at most this rank."""
        widths, num_inputs = tuple(self.widths.values()), self.weight_NK.shape[1]
        self.low_rank = LowRank(num_slots, rank, num_inputs, widths, self.place)

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x @ weight^T + bias by the BLAS: [T, N]."""
        if self.exact:
            return linear(x_TK, self.weight_NK, self.bias_N, exact=True)
        if self.may_pack and x_TK.shape[0] <= packed_fp16.MAX_ROWS:
            if self.packed is None and packed_fp16.fits(self.weight_NK):
                self.packed = packed_fp16.pack(self.weight_NK)
            self.may_pack = self.packed is not None
            if self.may_pack:
                return packed_fp16.linear(x_TK, self.packed)
        return torch.mm(x_TK, self.weight_KN) if self.bias_N is None else torch.addmm(self.bias_N, x_TK, self.weight_KN)

    def slots(self) -> dict[str, Slot]:
        sizes = list(self.widths.values())
        found = {f"{name}.weight": Slot(part) for name, part in zip(self.widths, self.weight_NK.split(sizes))}
        if self.bias_N is not None:
            found |= {f"{name}.bias": Slot(part) for name, part in zip(self.widths, self.bias_N.split(sizes))}
        return found
