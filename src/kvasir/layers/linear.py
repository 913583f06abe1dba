"""Linear layers: a weight in its format, a bias, and what adapters add.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from functools import partial

import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS, gated, gated_reference
from kvasir.layers.adapters import LowRank
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import linear
from kvasir.layers.weight_format import Weight
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Linear:
    """One or more stored matrices with the same input, fused along the output. ``widths``: the output size of each.

    ``low_rank``: adapters that rows with a variant add to the product; None: there are none."""

    def __init__(self, num_inputs: int, widths: dict[str, int], *, bias: bool, place: Placement) -> None:
        total = sum(widths.values())
        self.widths = widths
        self.num_inputs, self.num_outputs = num_inputs, total
        self.weight = Weight(widths, num_inputs, place)
        self.bias_N = torch.empty(total, device=place.device, dtype=place.dtype) if bias else None
        self.place = place
        self.low_rank: LowRank | None = None

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
        weight = self.weight
        return weight.format.product(
            weight, x_TK, norm=norm, bias_N=self.bias_N, activation=activation, residual_TO=residual_TN
        )

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
        weight = self.weight
        if weight.format.folds(weight, x_TK.shape[0], self.bias_N is not None, activation, self.low_rank):
            shrunk = self.low_rank.shrink(x_TK, batch, norm)
            return weight.format.product(
                weight, x_TK, norm=norm, bias_N=self.bias_N, activation=activation, residual_TO=residual_TN,
                shrunk=shrunk,
            )  # fmt: skip
        normed = x_TK if norm is None else norm(x_TK)
        if activation is None:
            y = weight.format.product(
                weight, x_TK, norm=norm, bias_N=self.bias_N, residual_TO=residual_TN, normed_TK=normed
            )
            self.extra(normed, y, batch)
            return y
        y = weight.format.sums(weight, x_TK, norm, self.bias_N, normed, activation)
        if self.place.fused and use_triton(y):
            return self.low_rank.add_gated(normed, y, batch, activation)
        self.extra(normed, y, batch)
        gate = ACTIVATIONS[activation]
        y = gated(y, gate, self.place.exact) if self.place.fused else gated_reference(y, gate)
        return y.to(x_TK.dtype)

    def extra(self, x_TK: torch.Tensor, y_TN: torch.Tensor, batch: StepBatch) -> None:
        """Add to the product ``y_TN`` of ``x_TK``, before activation, what the variants of the batch's rows say."""
        self.low_rank.add(x_TK, y_TN, batch, partial(linear, exact=True))

    def use_adapters(self, num_slots: int, rank: int) -> None:
        """Make room for so many resident adapters of at most this rank."""
        self.low_rank = LowRank(num_slots, rank, self.num_inputs, tuple(self.widths.values()), self.place)

    def slots(self) -> dict[str, Slot]:
        found = self.weight.slots()
        if self.bias_N is not None:
            sizes = list(self.widths.values())
            found |= {f"{name}.bias": Slot(part) for name, part in zip(self.widths, self.bias_N.split(sizes))}
        return found
