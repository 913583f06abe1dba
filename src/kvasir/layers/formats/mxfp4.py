"""Weights of 4 bits as MXFP4: E2M1 numbers, and a power of two for each 32 inputs (OCP Microscaling 1.0). Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kvasir.kernels.weight_codes import E2M1_MAX, E8M0_BIAS, MX_GROUP, quantise_mxfp4
from kvasir.layers.codes import SCALE, CodeFormat, packed, usual
from kvasir.layers.weight_format import MATRIX, Plane


@dataclass(frozen=True)
class Config:
    """``scale``: how quantising chooses the scales."""

    scale: Literal["max", "search"] = "max"


class MXFP4(CodeFormat):
    """number * 2^(scale - 127)."""

    group = MX_GROUP

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, power = sum(widths), E8M0_BIAS + round(math.log2(usual(num_inputs) / E2M1_MAX))
        return (
            packed(MATRIX, rows, num_inputs // 2),
            Plane(SCALE, rows, self.groups(num_inputs), torch.uint8, types=("U8",), random=(power, power)),
        )

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales = quantise_mxfp4(w_NK, self.search)
        return {MATRIX: codes, SCALE: scales}
