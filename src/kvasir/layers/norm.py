"""RMS norm as a layer: holds its scale."""

from __future__ import annotations

import torch

from kvasir.kernels.norm import rms_norm
from kvasir.layers.linear import Placement, Slot
from kvasir.layers.spec import NormSpec


class RMSNorm:
    """``shape``: of the scale; its last dimension is the one that is normalised."""

    def __init__(self, shape: int | tuple[int, ...], spec: NormSpec, place: Placement) -> None:
        # 1 + w rounded to bf16 would lose most of w, so a shifted scale stays in fp32.
        self.weight = torch.empty(shape, device=place.device, dtype=torch.float32 if spec.offset else place.dtype)
        self.eps = spec.eps
        self.eps_1 = None if place.exact else torch.full((1,), spec.eps, device=place.device, dtype=torch.float32)
        self.offset = spec.offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.eps_1)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(self.weight, self.offset)}
