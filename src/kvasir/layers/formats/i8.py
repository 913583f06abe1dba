"""Weights of 8 bits: signed codes with a scale by channel or by group of inputs. ``i8:group=32``. Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.weight_codes import quantise_i8
from kvasir.layers.codes import SCALE, CodeFormat, codes_of, compressed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight

GROUPS = (0, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """``group``: inputs of a scale, 0: all. ``scale``: how quantising chooses it. ``inputs``: int8 rounds those of a
    product in blocks of 32, on a CPU."""

    group: int = 0
    scale: Literal["max", "search"] = "max"
    inputs: Literal["float", "int8"] = "float"


class I8(CodeFormat):
    """code * scale."""

    native = True
    code_planes = (MATRIX,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.group not in GROUPS:
            raise ConfigError(f"i8: group is {config.group}; there are {', '.join(map(str, GROUPS))} (0: by channel)")
        self.group = config.group

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        size = usual(num_inputs) / 127
        return (
            Plane(MATRIX, sum(widths), num_inputs, torch.int8, types=("I8",), random=(-127, 127)),
            Plane(SCALE, sum(widths), self.groups(num_inputs), torch.float32, random=(size, size)),
        )

    def coded(self, weight: Weight) -> Coded:
        return Coded(self.name, codes_of(weight), weight.planes[SCALE], None, self.group)

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
