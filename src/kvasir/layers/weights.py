"""The device and dtype of a model's weights, and the places that stored tensors fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Placement:
    """Device, dtype and mode of a model's layers. ``exact``: exact mode. ``fused`` False: norms, RoPE, activations and
    products of few rows are torch's own, one after the other, to measure what fusing gains."""

    device: torch.device
    dtype: torch.dtype
    exact: bool = False
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one stored tensor, often a slice of a fused weight. ``offset`` is added to the stored value;
    ``repeat``: one stored vector fills every row of the target."""

    target: torch.Tensor
    offset: float = 0.0
    repeat: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the stored tensor."""
        return self.target.shape[1:] if self.repeat else self.target.shape

    def fill(self, stored: torch.Tensor) -> None:
        """Copy ``stored`` into place, converting dtype and device."""
        self.target.copy_(stored)
        if self.offset:
            self.target.add_(self.offset)
