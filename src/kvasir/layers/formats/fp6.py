"""Weights of 6 bits as FP6-LLM has them: E3M2 numbers in planes of 4 and 2 bits, with a scale by channel. Lossy.

Source: FP6-LLM (arXiv 2401.14112), whose kernel puts the codes of a fragment of a tensor core side by side. Here a
plane is a matrix of its own, and a product joins the two in registers.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.weight_codes import E3M2_MAX, quantise_fp6
from kvasir.layers.codes import HIGH, SCALE, CodeFormat, packed, usual
from kvasir.layers.weight_format import MATRIX, Plane


@dataclass(frozen=True)
class Config:
    """``scale``: how quantising chooses the scales."""

    scale: Literal["max", "search"] = "max"


class FP6(CodeFormat):
    """number * scale of the output."""

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        if num_inputs % 4:
            raise ConfigError(f"the weight format 'fp6' packs four inputs, which {num_inputs} are no multiple of")
        rows, size = sum(widths), usual(num_inputs) / E3M2_MAX
        return (
            packed(MATRIX, rows, num_inputs // 2),
            packed(HIGH, rows, num_inputs // 4),
            Plane(SCALE, rows, 1, torch.float32, random=(size, size)),
        )

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        low, high, scales = quantise_fp6(w_NK, self.search)
        return {MATRIX: low, HIGH: high, SCALE: scales}

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {MATRIX: planes[MATRIX], "weight_high": planes[HIGH], "weight_scale": planes[SCALE]}

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        return {"quant_method": "fp6", "fmt": "e3m2", "modules_to_not_convert": ignore}
