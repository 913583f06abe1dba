"""Weights of 4 bits as llama.cpp's Q4_K: groups of 32 with small scales and least codes, factors for 256 inputs. Lossy.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import torch

from kvasir.kernels.k_codes import BLOCK, Q4_GROUP, quantise_q4_k, scales_q4_k
from kvasir.kernels.weight_codes import unpack_nibbles
from kvasir.layers.codes import FACTOR, SCALE, CodeFormat, codes_of, packed, usual
from kvasir.layers.weight_format import MATRIX, Codes, Plane, Weight

MOST = 63  # a small scale


class Q4K(CodeFormat):
    """code * (factor * scale) - factor * least code."""

    native = True
    code_planes = (MATRIX,)
    group, block, more = Q4_GROUP, BLOCK, FACTOR

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        rows, groups, size = sum(widths), self.groups(num_inputs), usual(num_inputs) / MOST / 8
        return (
            packed(MATRIX, rows, num_inputs // 2),
            Plane(SCALE, rows, 2 * groups, torch.uint8, types=("U8",), random=(MOST // 8, MOST // 8)),
            Plane(FACTOR, rows, 2 * num_inputs // BLOCK, torch.float16, random=(size, size)),
        )

    def codes(self, weight: Weight) -> Codes:
        scales_NG, least_NG = scales_q4_k(weight.planes[SCALE], weight.planes[FACTOR])
        return Codes(unpack_nibbles(codes_of(weight)), scales_NG, offsets_NG=-least_NG)

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, factors = quantise_q4_k(w_NK)
        return {MATRIX: codes, SCALE: scales, FACTOR: factors}
