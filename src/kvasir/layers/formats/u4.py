"""Weights of 4 bits: codes 0 to 15 with a scale, and perhaps a zero point, by group of inputs. ``u4:group=128``.
Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir.kernels.weight_codes import CENTRE, pack_nibbles, quantise_u4, unpack_nibbles
from kvasir.layers.codes import SCALE, ZERO, IntegerFormat, codes_of, compressed, packed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight


@dataclass(frozen=True)
class Config:
    """``group``: inputs of a scale, 0: all. ``zeros``: a zero point for each scale; without, it is 8. ``scale``: how
    quantising chooses it. ``inputs``: int8 rounds those of a product in blocks of 32, on a CPU."""

    group: int = 128
    zeros: bool = False
    scale: Literal["max", "search"] = "max"
    inputs: Literal["float", "int8"] = "float"


class U4(IntegerFormat):
    """(code - zero) * scale."""

    more = ZERO

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups, size = sum(widths), self.groups(num_inputs), usual(num_inputs) / CENTRE
        codes = packed(MATRIX, rows, num_inputs // 2)
        scale = Plane(SCALE, rows, groups, torch.float32, random=(size, size))
        zero = Plane(ZERO, rows, groups, torch.uint8, types=("U8",), random=(CENTRE, CENTRE))
        return (codes, scale, zero) if self.config.zeros else (codes, scale)

    def codes(self, weight: Weight) -> Codes:
        codes_NK = unpack_nibbles(codes_of(weight))
        return Codes(codes_NK, weight.planes[SCALE], weight.planes.get(ZERO), rounded=self.rounded)

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, zeros = quantise_u4(w_NK, self.group, self.config.zeros, self.search)
        return {MATRIX: codes, SCALE: scales} | ({} if zeros is None else {ZERO: zeros})

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes, shape = planes[MATRIX], (planes[MATRIX].shape[0], 2 * planes[MATRIX].shape[1])
        found = {"weight_packed": codes.view(torch.int32), "weight_scale": planes[SCALE]}
        if ZERO in planes:  # packed along outputs
            found["weight_zero_point"] = pack_nibbles(planes[ZERO].t()).contiguous().view(torch.int32).t().contiguous()
        return found | {"weight_shape": torch.tensor(shape)}

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        return compressed("pack-quantized", 4, self.group, ignore, symmetric=not self.config.zeros)
