"""4-bit floats (E2M1) in blocks of 16 with E4M3 scales (NVFP4), scales by ScaleSearch (arXiv:2605.12464). Lossy. 4.5
bits an element.

The emulation is exact: a code times its block's scale has 6 significant bits, which bf16 holds. Without ``search`` a
block's scale puts its largest magnitude on 6, the largest of E2M1. With it, nine neighbouring scales are tried and the
one with the least squared error is kept. ``unit``: the format's fp32 scale. It is fixed, since one taken from the
current tokens would change what earlier tokens mean; the default covers magnitudes from 0.006 to 168. ``order``: size
of a Hadamard rotation of the keys; 0: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.quantize import pack_nibbles, unpack_nibbles
from kvasir.kv.quantized import QuantizedCodec
from kvasir.kv.rotation import Rotation

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OFFSETS = (0, -1, 1, -2, 2, 3, 4, 5, 6)  # of the scale's code; on a tie the first wins
LARGEST = 126  # code of 448; 127 is NaN


@dataclass(frozen=True, slots=True)
class Config:
    """Options of ``nvfp4``; the module says what they do."""

    search: bool = True
    unit: float = 0.0625
    order: int = 0


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest E2M1 number, ties to the even code, saturating: uint8, the sign in bit 3."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for i, (a, b) in enumerate(zip(E2M1, E2M1[1:])):
        middle = (a + b) / 2
        code += (size > middle) if i % 2 == 0 else (size >= middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_value(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers that E2M1 ``codes`` stand for."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[codes.long()]


class Nvfp4Codec(QuantizedCodec):
    """E2M1 codes in blocks with E4M3 scales."""

    kernel = "nvfp4"
    page_slots = 32  # a page of 16 would be smaller than one of bf16

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.config.unit > 0:
            raise ConfigError(
                f"nvfp4:unit={self.config.unit}: the unit of the scales must be positive; "
                f"the default is {Config().unit}"
            )

    def side(self, head_dim: int) -> dict[str, tuple[int, torch.dtype]]:
        if head_dim % (2 * BLOCK):
            raise ConfigError(
                f"'nvfp4' has blocks of {BLOCK} and packs two elements into a byte: it needs a head dim that is a "
                f"multiple of {2 * BLOCK}, not {head_dim}. Use --kv-codec int4_bdr."
            )
        return {"": (head_dim // 2, torch.uint8), "_scale": (head_dim // BLOCK, torch.uint8)}

    def rotation(self, side: str, head_dim: int) -> Rotation | None:
        return Rotation(self.config.order, head_dim, signs=True) if self.config.order and side == "k" else None

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        nearest = (
            (blocks.abs().amax(-1) / (6 * self.config.unit))
            .clamp(2.0**-9, 448)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
            .int()
        )
        best_scale = best_code = best_error = None
        for offset in OFFSETS if self.config.search else (0,):
            scale = (nearest + offset).clamp(1, LARGEST).to(torch.uint8)
            step = scale.view(torch.float8_e4m3fn).float().unsqueeze(-1) * self.config.unit
            code = e2m1(blocks / step)
            error = (blocks - e2m1_value(code) * step).square().sum(-1)
            if best_error is None:
                best_scale, best_code, best_error = scale, code, error
                continue
            better = error < best_error
            best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
            best_code = torch.where(better.unsqueeze(-1), code, best_code)
        return {"": pack_nibbles(best_code.flatten(-2)), "_scale": best_scale}

    def decode(self, planes: dict[str, torch.Tensor], head_dim: int) -> torch.Tensor:
        step = planes["_scale"].contiguous().view(torch.float8_e4m3fn).float() * self.config.unit
        return (e2m1_value(unpack_nibbles(planes[""])).unflatten(-1, (-1, BLOCK)) * step.unsqueeze(-1)).flatten(-2)
