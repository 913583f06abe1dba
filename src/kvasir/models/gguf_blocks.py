"""Slots that rows of GGUF blocks fill: one plane of codes each, or plain numbers.

Every conversion keeps the numbers that ``gguf.quants`` dequantises a block to. Legend: N outputs, K inputs, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvasir.kernels import k_codes
from kvasir.kernels.weight_codes import dequantise_i8, dequantise_u4, pack_nibbles, pack_six
from kvasir.layers.weights import Slot
from kvasir.models.gguf_file import BLOCKS
from kvasir.models.repacked import Repacked

Bytes = torch.Tensor  # uint8 [..., B, bytes]


def part_of(plane: str, kind: str, shape: tuple[int, ...], slot: Slot) -> Slot:
    """The slot of a plane, filled by its bytes of every block. ``shape``: that of the stored rows of blocks."""
    where = BLOCKS[kind].planes[plane]
    given = (*shape[:-1], where.stop - where.start)
    return Repacked(slot.target, types=("U8",), convert=CONVERT[kind][plane], given=given)


def numbers_of(kind: str, shape: tuple[int, ...], slot: Slot) -> Slot:
    """The slot of plain weights, filled by whole blocks."""

    def convert(blocks: Bytes) -> torch.Tensor:
        parts = {plane: CONVERT[kind][plane](blocks[..., where]) for plane, where in BLOCKS[kind].planes.items()}
        return NUMBERS[kind](parts)

    return Repacked(slot.target, types=("U8",), convert=convert, given=shape)


def _halves(numbers: Bytes) -> torch.Tensor:
    """fp16 numbers [..., B x count] of two bytes each."""
    return numbers.contiguous().view(torch.float16).flatten(-2)


def _signed(codes: Bytes) -> torch.Tensor:
    return codes.contiguous().view(torch.int8).flatten(-2)


def _nibbles(codes: Bytes, run: int) -> torch.Tensor:
    """Codes uint8 [..., B, 2 x bytes]: of each ``run`` bytes the lower halves, then the upper ones."""
    runs = codes.unflatten(-1, (-1, run))
    return torch.cat([runs & 15, runs >> 4], -1).flatten(-2)


def _five(codes: Bytes) -> torch.Tensor:
    """Codes int8 [..., K] of Q5_0: the fifth bits of 32 codes, then their lower four."""
    fifth = torch.stack([codes[..., i // 8] >> i % 8 & 1 for i in range(32)], -1)
    return ((_nibbles(codes[..., 4:], 16) | fifth << 4).to(torch.int8) - 16).flatten(-2)


def _small_scales(scales: Bytes) -> torch.Tensor:
    """Scales and least codes in turn, uint8 [..., B x 16], of six bits each: four and four, then the lower four bits
    of both of four more, whose upper two stand above the first ones."""
    d, m, both = scales.split(4, -1)
    first = torch.cat([d & 63, both & 15 | d >> 2 & 48], -1)
    least = torch.cat([m & 63, both >> 4 | m >> 2 & 48], -1)
    return torch.stack([first, least], -1).flatten(-3)


def _low(codes: Bytes) -> torch.Tensor:
    """The plane of lower bits of Q6_K."""
    return pack_nibbles(_nibbles(codes, 64)).flatten(-2)


def _high(codes: Bytes) -> torch.Tensor:
    """The plane of upper bits of Q6_K: of each 32 bytes the lowest pairs, then the next ones."""
    runs = codes.unflatten(-1, (-1, 32))
    upper = torch.stack([runs >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)
    return pack_six(upper << 4)[1].flatten(-2)


Convert = Callable[[Bytes], torch.Tensor]
CONVERT: dict[str, dict[str, Convert]] = {
    "Q8_0": {"scale": _halves, "weight": _signed},
    "Q5_0": {"scale": _halves, "weight": _five},
    "Q4_0": {"scale": _halves, "weight": lambda codes: pack_nibbles(_nibbles(codes, 16)).flatten(-2)},
    "Q4_K": {
        "factor": _halves,
        "scale": _small_scales,
        "weight": lambda codes: pack_nibbles(_nibbles(codes, 32)).flatten(-2),
    },
    "Q6_K": {"weight": _low, "high": _high, "scale": _signed, "factor": _halves},
}
NUMBERS: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "Q8_0": lambda p: dequantise_i8(p["weight"], p["scale"]),
    "Q5_0": lambda p: dequantise_i8(p["weight"], p["scale"]),
    "Q4_0": lambda p: dequantise_u4(p["weight"], p["scale"]),
    "Q4_K": lambda p: k_codes.dequantise_q4_k(p["weight"], p["scale"], p["factor"]),
    "Q6_K": lambda p: k_codes.dequantise_q6_k(p["weight"], p["high"], p["scale"], p["factor"]),
}
