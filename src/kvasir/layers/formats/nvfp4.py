"""Weights of 4 bits as NVFP4: E2M1 numbers, an E4M3 scale for each 16 inputs, and one factor for the tensor.
Lossy.

Activations stay as they are (W4A16): before Blackwell no tensor core multiplies these numbers.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.kernels.weight_codes import E2M1_MAX, NV_GROUP, quantise_nvfp4, tensor_scale_nvfp4
from kvasir.layers.codes import SCALE, TENSOR_SCALE, CodeFormat, compressed, packed, usual
from kvasir.layers.weight_format import MATRIX, Plane


@dataclass(frozen=True)
class Config:
    """``scale``: how quantising chooses the scales."""

    scale: Literal["max", "search"] = "max"


class NVFP4(CodeFormat):
    """number * scale * the tensor's scale."""

    group, more = NV_GROUP, TENSOR_SCALE

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups, size = sum(widths), self.groups(num_inputs), usual(num_inputs) / E2M1_MAX
        return (
            packed(MATRIX, rows, num_inputs // 2),
            Plane(SCALE, rows, groups, torch.float8_e4m3fn, types=("F8_E4M3",), random=(1, 1)),
            Plane(TENSOR_SCALE, rows, None, torch.float32, random=(size, size)),
        )

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        factor = tensor_scale_nvfp4(w_NK)
        codes, scales = quantise_nvfp4(w_NK, factor, self.search)
        return {MATRIX: codes, SCALE: scales, TENSOR_SCALE: factor.expand(len(w_NK)).contiguous()}

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        divisor = planes[TENSOR_SCALE][:1].reciprocal()
        return {"weight_packed": planes[MATRIX], "weight_scale": planes[SCALE], "weight_global_scale": divisor}

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        return compressed("nvfp4-pack-quantized", 4, self.group, ignore, type="float", strategy="tensor_group")
