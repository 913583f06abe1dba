"""Weights of 4 bits: codes 0 to 15 with a scale, and perhaps a zero point, by group of inputs. ``u4:group=128``.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.weight_codes import quantise_u4, unpack_nibbles
from kvasir.layers.codes import SCALE, ZERO, CodeFormat, codes_of
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight

GROUPS = (0, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """``group``: inputs of a scale, 0: all. ``zeros``: a zero point for each scale; without, it is 8."""

    group: int = 128
    zeros: bool = False


class U4(CodeFormat):
    """(code - zero) * scale."""

    native = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.group not in GROUPS:
            raise ConfigError(f"u4: group is {config.group}; there are {', '.join(map(str, GROUPS))} (0: by channel)")
        self.group, self.zeros = config.group, config.zeros

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups = sum(widths), self.groups(num_inputs)
        found = (
            Plane(MATRIX, rows, num_inputs // 2, torch.uint8, types=("U8",)),
            Plane(SCALE, rows, groups, torch.float32),
        )
        return (*found, Plane(ZERO, rows, groups, torch.uint8, types=("U8",))) if self.zeros else found

    def coded(self, weight: Weight) -> Coded:
        return Coded(self.name, codes_of(weight), weight.planes[SCALE], weight.planes.get(ZERO), self.group)

    def codes(self, weight: Weight) -> Codes:
        return Codes(unpack_nibbles(codes_of(weight)), weight.planes[SCALE], weight.planes.get(ZERO))

    def quantise(self, w_NK: torch.Tensor, search: bool = False) -> dict[str, torch.Tensor]:
        codes, scales, zeros = quantise_u4(w_NK, self.group, self.zeros, search)
        return {MATRIX: codes, SCALE: scales} | ({} if zeros is None else {ZERO: zeros})
