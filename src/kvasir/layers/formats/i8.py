"""Weights of 8 bits: signed codes with a scale by channel or by group of inputs. ``i8:group=32``. Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.kernels.weight_codes import quantise_i8
from kvasir.layers.codes import SCALE, IntegerFormat, codes_of, compressed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight


@dataclass(frozen=True)
class Config:
    """``group``: inputs of a scale, 0: all. ``scale``: how quantising chooses it. ``inputs``: int8 rounds those of a
    product in blocks of 32, on a CPU."""

    group: int = 0
    scale: Literal["max", "search"] = "max"
    inputs: Literal["float", "int8"] = "float"


class I8(IntegerFormat):
    """code * scale."""

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        size = usual(num_inputs) / 127
        return (
            Plane(MATRIX, sum(widths), num_inputs, torch.int8, types=("I8",), random=(-127, 127)),
            Plane(SCALE, sum(widths), self.groups(num_inputs), torch.float32, random=(size, size)),
        )

    def codes(self, weight: Weight) -> Codes:
        return Codes(codes_of(weight), weight.planes[SCALE], rounded=self.rounded)

    def of_codes(self, codes_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        return {MATRIX: codes_NK}

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales = quantise_i8(w_NK, self.group, self.search)
        return {MATRIX: codes, SCALE: scales}

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {MATRIX: planes[MATRIX], "weight_scale": planes[SCALE]}

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        return compressed("int-quantized", 8, self.group, ignore)
