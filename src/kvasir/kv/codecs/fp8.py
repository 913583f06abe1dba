"""8-bit floats (E4M3) with a scale for every token and head. Lossy: 3 bits of mantissa. 8.25 bits an element at D =
128.

The scale makes a row's largest magnitude 448, the largest of E4M3, so that no calibration is needed and nothing
saturates."""

from __future__ import annotations

import torch

from kvasir.kernels.quantize import FP16_MAX, FP16_TINY
from kvasir.kv.quantized import QuantizedCodec

E4M3_MAX = 448.0


class Fp8Codec(QuantizedCodec):
    """E4M3 codes with an fp32 scale for each row."""

    kernel = "fp8"
    latents = True
    page_slots = 32  # as large as a page of 16 in bf16; a block of the decode kernel lies in one page
    fuses = True

    def side(self, head_dim: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"": (head_dim, torch.float8_e4m3fn), "_meta": (1, torch.float32)}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(FP16_TINY, FP16_MAX)
        # Rounding may leave the largest element slightly above the range. E4M3 has no infinity: it would become NaN.
        return {"": (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), "_meta": scale}

    def decode(self, planes: dict[str, torch.Tensor], head_dim: int) -> torch.Tensor:
        return planes[""].float() * planes["_meta"]
