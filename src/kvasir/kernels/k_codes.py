"""Codes of llama.cpp's K-quants: blocks of 256 inputs whose groups have small whole scales, and factors for these.
Plain torch; the reference of their kernels (``codes_gemv.py``), equal to ``gguf.quants`` bit for bit.

| layout | codes | weight |
|---|---|---|
| ``q4_k`` | 0 .. 15 | code * (d * scale) - dmin * least, groups of 32 with scale and least 0 .. 63 |
| ``q6_k`` | 0 .. 63 | (code - 32) * (d * scale), groups of 16 with scale -128 .. 127 |

Factors d and dmin are fp16 numbers of a block. Source: ggml-quants.c of llama.cpp.

Legend: N outputs, K inputs, G groups, B blocks.
"""

from __future__ import annotations

import torch

from kvasir.kernels.weight_codes import grouped, pack_nibbles, pack_six, unpack_nibbles, unpack_six

BLOCK = 256  # inputs of a factor
Q4_GROUP, Q6_GROUP = 32, 16
CENTRE = 32


def scales_q4_k(scales_NC: torch.Tensor, factors_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that multiply the codes of each group, and that are taken off: fp32 [..., N, G] each, of scales and least
    codes in turn, uint8 [..., N, 2 G], and factors d and dmin in turn, fp16 [..., N, 2 B]."""
    small, factors = scales_NC.unflatten(-1, (-1, 2)).float(), factors_NC.unflatten(-1, (-1, 2)).float()
    wide = small * factors.repeat_interleave(BLOCK // Q4_GROUP, -2)
    return wide[..., 0], wide[..., 1]


def scales_q6_k(scales_NG: torch.Tensor, factors_NB: torch.Tensor) -> torch.Tensor:
    """Numbers that multiply the codes of each group: fp32 [..., N, G] of int8 [..., N, G] and fp16 [..., N, B]."""
    return scales_NG.float() * factors_NB.float().repeat_interleave(BLOCK // Q6_GROUP, -1)


def dequantise_q4_k(bytes_NH: torch.Tensor, scales_NC: torch.Tensor, factors_NC: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [..., N, K]."""
    codes_NK = unpack_nibbles(bytes_NH).float()
    scales_NG, least_NG = scales_q4_k(scales_NC, factors_NC)
    return codes_NK * grouped(scales_NG, codes_NK.shape[-1]) - grouped(least_NG, codes_NK.shape[-1])


def dequantise_q6_k(
    low_NH: torch.Tensor, high_NQ: torch.Tensor, scales_NG: torch.Tensor, factors_NB: torch.Tensor
) -> torch.Tensor:
    """Weights fp32 [..., N, K]."""
    codes_NK = unpack_six(low_NH, high_NQ).float() - CENTRE
    return codes_NK * grouped(scales_q6_k(scales_NG, factors_NB), codes_NK.shape[-1])


def quantise_q4_k(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [N, K / 2], scales and least codes uint8 [N, 2 G], factors fp16 [N, 2 B]. The codes of a group reach from
    its smallest weight, or zero, to its largest."""
    w_NGJ = w_NK.float().unflatten(-1, (-1, Q4_GROUP))
    low_NG, high_NG = w_NGJ.amin(-1).clamp(max=0), w_NGJ.amax(-1).clamp(min=0)
    scales_NG, d_NB = _small((high_NG - low_NG) / 15, 63, BLOCK // Q4_GROUP)
    least_NG, dmin_NB = _small(-low_NG, 63, BLOCK // Q4_GROUP)
    scales_NC = torch.stack([scales_NG, least_NG], -1).flatten(-2).to(torch.uint8)
    factors_NC = torch.stack([d_NB, dmin_NB], -1).flatten(-2)
    step_NG, off_NG = scales_q4_k(scales_NC, factors_NC)
    codes = ((w_NGJ + off_NG[..., None]) / _safe(step_NG)[..., None]).round().clamp(0, 15)
    return pack_nibbles(codes.to(torch.uint8).flatten(1)), scales_NC, factors_NC


def quantise_q6_k(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [N, K / 2] and [N, K / 4], scales int8 [N, G], factors fp16 [N, B]. The side of a group's largest weight
    gets the code 0, which has no partner."""
    w_NGJ = w_NK.float().unflatten(-1, (-1, Q6_GROUP))
    side_NG = w_NGJ.gather(-1, w_NGJ.abs().argmax(-1, keepdim=True)).squeeze(-1)
    small_NG, factors_NB = _small(side_NG / -CENTRE, 127, BLOCK // Q6_GROUP)
    scales_NG = small_NG.to(torch.int8)
    step_NG = scales_q6_k(scales_NG, factors_NB)
    codes = ((w_NGJ / _safe(step_NG)[..., None]).round() + CENTRE).clamp(0, 63)
    return *pack_six(codes.to(torch.uint8).flatten(1)), scales_NG, factors_NB


def _small(scales_NG: torch.Tensor, most: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers of at most ``most``, and the fp16 factor [N, B] of each ``count`` of them."""
    factors_NB = (scales_NG.unflatten(-1, (-1, count)).abs().amax(-1) / most).half()
    wide_NG = _safe(factors_NB.float()).repeat_interleave(count, -1)
    return (scales_NG / wide_NG).round().clamp(-most, most), factors_NB


def _safe(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: a group of zeros has scale 0."""
    return torch.where(scales == 0, 1.0, scales)
