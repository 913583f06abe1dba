"""Weights of 4 bits: codes 0 to 15 with a scale, and perhaps a zero point, by group of inputs. ``u4:group=128``.
Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.weight_codes import CENTRE, pack_nibbles, quantise_u4, unpack_nibbles
from kvasir.layers.codes import SCALE, ZERO, CodeFormat, codes_of, compressed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight

GROUPS = (0, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """``group``: inputs of a scale, 0: all. ``zeros``: a zero point for each scale; without, it is 8. ``scale``: how
    quantising chooses it. ``inputs``: int8 rounds those of a product in blocks of 32, on a CPU."""

    group: int = 128
    zeros: bool = False
    scale: Literal["max", "search"] = "max"
    inputs: Literal["float", "int8"] = "float"


class U4(CodeFormat):
    """(code - zero) * scale."""

    native = True
    code_planes = (MATRIX,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.group not in GROUPS:
            raise ConfigError(f"u4: group is {config.group}; there are {', '.join(map(str, GROUPS))} (0: by channel)")
        self.group, self.zeros = config.group, config.zeros

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups, size = sum(widths), self.groups(num_inputs), usual(num_inputs) / CENTRE
        codes = Plane(MATRIX, rows, num_inputs // 2, torch.uint8, types=("U8",), random=(0, 256))
        scale = Plane(SCALE, rows, groups, torch.float32, random=(size, size))
        zero = Plane(ZERO, rows, groups, torch.uint8, types=("U8",), random=(CENTRE, CENTRE))
        return (codes, scale, zero) if self.zeros else (codes, scale)

    def coded(self, weight: Weight) -> Coded:
        return Coded(self.name, codes_of(weight), weight.planes[SCALE], weight.planes.get(ZERO), self.group)

    def codes(self, weight: Weight) -> Codes:
        codes_NK = unpack_nibbles(codes_of(weight))
        return Codes(codes_NK, weight.planes[SCALE], weight.planes.get(ZERO), rounded=self.rounded)

    def of_codes(self, codes_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        return {MATRIX: pack_nibbles(codes_NK)}

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, zeros = quantise_u4(w_NK, self.group, self.zeros, self.search)
        return {MATRIX: codes, SCALE: scales} | ({} if zeros is None else {ZERO: zeros})

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes, shape = planes[MATRIX], (planes[MATRIX].shape[0], 2 * planes[MATRIX].shape[1])
        found = {"weight_packed": codes.view(torch.int32), "weight_scale": planes[SCALE]}
        if ZERO in planes:  # packed along outputs
            found["weight_zero_point"] = pack_nibbles(planes[ZERO].t()).contiguous().view(torch.int32).t().contiguous()
        return found | {"weight_shape": torch.tensor(shape)}

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        return compressed("pack-quantized", 4, self.group, ignore, symmetric=not self.zeros)
