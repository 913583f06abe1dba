"""RMS norm as a layer: holds its scale.

Legend: E the normalised dimension.
"""

from __future__ import annotations

import torch

from kvasir.kernels.norm import rms_norm
from kvasir.layers.linear import Placement, Slot
from kvasir.layers.spec import NormSpec


class RMSNorm:
    def __init__(self, width: int, spec: NormSpec, place: Placement) -> None:
        # 1 + w rounded to bf16 would lose most of w, so a shifted scale stays in fp32.
        self.weight_E = torch.empty(width, device=place.device, dtype=torch.float32 if spec.offset else place.dtype)
        self.eps = spec.eps
        self.offset = spec.offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight_E, self.eps)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(self.weight_E, self.offset)}
