"""The arithmetic of quantised rows: Hadamard rotation, integer grids, nibbles. It is the reference of the fused
kernels, and the CPU path.

Rows are encoded alone, by elementwise torch operations and reductions along the row, so that a row's bytes never depend
on its batch.

Legend: D head dim.
"""

from __future__ import annotations

import torch

FP16_MAX, FP16_TINY = 65504.0, 2.0**-14  # largest, and smallest normal


def hadamard(x: torch.Tensor, order: int) -> torch.Tensor:
    """x [..., D] times the block-diagonal, orthonormal Sylvester-Hadamard matrix of blocks ``order`` (a power of two
    that divides D): log2(order) butterflies, all sums and differences of two numbers, in fp32."""
    shape = x.shape
    y = x.float() * order**-0.5
    half = 1
    while half < order:
        y = y.reshape(*shape[:-1], -1, 2, half)
        a, b = y.unbind(-2)
        y = torch.stack((a + b, a - b), -2)
        half *= 2
    return y.reshape(shape)


def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric codes of rows x [..., D]: uint8 [..., D] in 0 .. 2^bits - 1, and fp16 (scale, bias) [..., 2].

    The code c stands for ``scale * (c - 2^(bits-1)) + bias``; scale and bias are rounded before codes are chosen.
    """
    x, middle = x.float(), 1 << (bits - 1)
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / (2 * middle - 1)).clamp(FP16_TINY, FP16_MAX).half()
    bias = (low + middle * scale.float()).clamp(-FP16_MAX, FP16_MAX).half()
    codes = ((x - bias.float()) / scale.float() + 0.5).floor_().clamp_(-middle, middle - 1).add_(middle)
    return codes.to(torch.uint8), torch.cat((scale, bias), -1)


def dequantize(codes: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows that codes and their (scale, bias) stand for: fp32 [..., D]."""
    scale, bias = meta.float().split(1, -1)
    return (codes.float() - (1 << (bits - 1))) * scale + bias


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., D] of 0 .. 15 -> uint8 [..., D / 2]: byte i holds element i in its low and element i + D / 2 in its high
    half, so that a kernel unpacks two contiguous halves of a head."""
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes [..., D] of bytes [..., D / 2], as ``pack_nibbles`` packed them."""
    return torch.cat((packed & 15, packed >> 4), -1)
