"""Weights of 6 bits as llama.cpp's Q6_K: groups of 16 with small scales, and a factor for each 256 inputs. Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import torch

from kvasir.kernels.k_codes import BLOCK, CENTRE, Q6_GROUP, quantise_q6_k, scales_q6_k
from kvasir.kernels.weight_codes import pack_six, unpack_six
from kvasir.layers.codes import FACTOR, HIGH, SCALE, CodeFormat, packed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight

MOST = 127  # a small scale


class Q6K(CodeFormat):
    """(code - 32) * (factor * scale)."""

    native = True
    code_planes = (MATRIX, HIGH)
    group, block, more = Q6_GROUP, BLOCK, FACTOR

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups, size = sum(widths), self.groups(num_inputs), usual(num_inputs) / MOST / CENTRE
        return (
            packed(MATRIX, rows, num_inputs // 2),
            packed(HIGH, rows, num_inputs // 4),
            Plane(SCALE, rows, groups, torch.int8, types=("I8",), random=(MOST, MOST)),
            Plane(FACTOR, rows, num_inputs // BLOCK, torch.float16, random=(size, size)),
        )

    def codes(self, weight: Weight) -> Codes:
        planes = weight.planes
        codes_NK = unpack_six(planes[MATRIX], planes[HIGH]).to(torch.int8) - CENTRE
        return Codes(codes_NK, scales_q6_k(planes[SCALE], planes[FACTOR]))

    def of_codes(self, codes_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        low, high = pack_six((codes_NK + CENTRE).to(torch.uint8))
        return {MATRIX: low, HIGH: high}

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        low, high, scales, factors = quantise_q6_k(w_NK)
        return {MATRIX: low, HIGH: high, SCALE: scales, FACTOR: factors}
