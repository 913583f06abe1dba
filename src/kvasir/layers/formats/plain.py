"""Plain weights: one tensor in the model's dtype. Exact.

On a GPU, products of few rows stream the matrix through ``kernels.gemv`` or ``kernels.hopper_gemv`` where they were
measured to be faster than the BLAS. On a CPU they may read a copy in fp16 (``kernels.packed_fp16``).

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels import packed_fp16
from kvasir.kernels.gemv import choose, gemv
from kvasir.kernels.hopper_gemv import GATES, choose_ring, stream_rows
from kvasir.kernels.lora import Shrunk
from kvasir.layers.adapters import LowRank
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import finish, linear, matrix, normed
from kvasir.layers.weight_format import MATRIX, Plane, Weight, WeightFormat
from kvasir.layers.weights import Placement


@dataclass(slots=True)
class Made:
    """The matrix as products take it. ``packed``: a copy for products of few rows on a CPU, made by the first;
    ``may_pack``: it is worth a try."""

    w_NK: torch.Tensor
    w_KN: torch.Tensor
    may_pack: bool
    packed: torch.ScriptObject | None = None


class Plain(WeightFormat):
    """The matrix itself."""

    exact = True
    native = True

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(MATRIX, sum(widths), num_inputs, dtype),)

    def allocate(
        self, count: int | None, widths: tuple[int, ...], num_inputs: int, place: Placement
    ) -> dict[str, torch.Tensor]:
        lead = () if count is None else (count,)
        return {MATRIX: matrix(*lead, sum(widths), num_inputs, place=place)}

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        return {MATRIX: w_NK}

    def dequantise(self, weight: Weight) -> torch.Tensor:
        return weight.tensor

    def product(
        self,
        weight: Weight,
        x_TK: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        bias_N: torch.Tensor | None = None,
        activation: str | None = None,
        residual_TO: torch.Tensor | None = None,
        normed_TK: torch.Tensor | None = None,
        shrunk: Shrunk | None = None,
    ) -> torch.Tensor:
        made = weight.made if weight.made is not None else self._make(weight)
        rows = x_TK.shape[0]
        if weight.streams and bias_N is None and activation in GATES:
            gates = activation is not None
            if (ring := choose_ring(rows, made.w_NK, gates)) is not None:
                return stream_rows(normed(x_TK, norm, normed_TK), made.w_NK, ring, gated=gates, residual_TO=residual_TO)
        if weight.streams and (config := choose(rows, *made.w_NK.shape)) is not None:
            scale = None if norm is None else norm.parameters
            return gemv(
                x_TK, made.w_NK, config, norm=scale, bias_N=bias_N, activation=activation, residual_TO=residual_TO,
                shrunk=shrunk,
            )  # fmt: skip
        x_TK = normed(x_TK, norm, normed_TK)
        if residual_TO is not None and weight.streams and bias_N is None and activation is None:
            return residual_TO.addmm_(x_TK, made.w_KN)  # the BLAS adds as it stores
        return finish(self._multiply(weight, made, x_TK, bias_N), activation, residual_TO, weight.place)

    def folds(self, weight: Weight, rows: int, biased: bool, activation: str | None, low_rank: LowRank) -> bool:
        if not weight.streams:
            return False
        made = weight.made if weight.made is not None else self._make(weight)
        if not biased and activation in GATES and choose_ring(rows, made.w_NK, activation is not None) is not None:
            return False
        config = choose(rows, *made.w_NK.shape)
        return config is not None and low_rank.fits(config)

    def sums(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, bias_N: torch.Tensor | None,
        normed_TK: torch.Tensor, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        made = weight.made if weight.made is not None else self._make(weight)
        shape = x_TK.shape[0], made.w_NK.shape[0]
        ring = None
        if weight.streams and bias_N is None and activation in GATES:
            ring = choose_ring(shape[0], made.w_NK, True)
        if ring is not None:
            return stream_rows(normed_TK, made.w_NK, ring, out_TO=x_TK.new_empty(shape, dtype=torch.float32))
        if weight.streams and (config := choose(*shape, made.w_NK.shape[1])) is not None:
            y_TN = x_TK.new_empty(shape, dtype=torch.float32)
            return gemv(
                x_TK, made.w_NK, config, norm=None if norm is None else norm.parameters, bias_N=bias_N, out_TO=y_TN
            )
        return self._multiply(weight, made, normed_TK, bias_N)

    def _multiply(self, weight: Weight, made: Made, x_TK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias by the BLAS: [T, N]."""
        if weight.place.exact:
            return linear(x_TK, made.w_NK, bias_N, exact=True)
        if made.may_pack and bias_N is None and x_TK.shape[0] <= packed_fp16.MAX_ROWS:
            if made.packed is None and packed_fp16.fits(made.w_NK):
                made.packed = packed_fp16.pack(made.w_NK)
            made.may_pack = made.packed is not None
            if made.may_pack:
                return packed_fp16.linear(x_TK, made.packed)
        return torch.mm(x_TK, made.w_KN) if bias_N is None else torch.addmm(bias_N, x_TK, made.w_KN)

    def _make(self, weight: Weight) -> Made:
        place, w_NK = weight.place, weight.tensor
        may_pack = weight.copies and place.device.type == "cpu" and place.dtype == torch.float32
        weight.made = Made(w_NK, w_NK.t(), may_pack)
        return weight.made
