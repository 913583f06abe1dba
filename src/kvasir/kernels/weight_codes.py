"""Codes of weights: what they stand for, how they are packed, and how they are chosen. Plain torch; every kernel's
reference.

Two codes of 4 bits share a byte, the even input in the low half. A group is a run of inputs with one scale.

| layout | codes | weight |
|---|---|---|
| ``i8`` | int8 | code * scale |
| ``u4`` | 0 .. 15 | (code - zero) * scale, zero 8 where none is stored |
| ``mxfp4`` | E2M1 | number * 2^(scale - 127), groups of 32 (OCP Microscaling 1.0) |
| ``nvfp4`` | E2M1 | number * scale (E4M3) * the tensor's scale, groups of 16 |
| ``fp6`` | E3M2, its upper two bits in a plane of their own | number * scale of the output (FP6-LLM) |

``k_codes.py`` has the layouts of llama.cpp's blocks of 256 inputs.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

CENTRE = 8  # the zero point of u4 codes that have none of their own
MX_GROUP, NV_GROUP = 32, 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; the fourth is the sign
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_LEAST = 2.0**-9  # the smallest scale that is not zero
E8M0_BIAS = 127
E3M2_MAX = 28.0
INPUTS = 32  # of a row that share a scale where they are rounded to 8 bits
LEAST_INPUT = 1e-30  # smaller ones are zeros there: the inverse of their scale would overflow
# Factors that ``scale=search`` tries for a group's scale: those of the largest weight on the largest code and below.
SHRINK = tuple(1 - i / 64 for i in range(21))
# Places in E4M3's order, from the one of the largest weight, that a search tries (design brief 2.2: as good as all).
E4M3_OFFSETS = range(-2, 7)


def unpack_nibbles(bytes_NH: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] of bytes [..., K / 2]."""
    return torch.stack([bytes_NH & 15, bytes_NH >> 4], -1).flatten(-2)


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., K / 2] of codes [..., K]."""
    return codes_NK[..., 0::2] | codes_NK[..., 1::2] << 4


def grouped(x_NG: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """A number a group as a number an input: [..., K] of [..., G]."""
    return x_NG.repeat_interleave(num_inputs // x_NG.shape[-1], -1)


def numbers_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of E2M1 codes 0 .. 15."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[codes.int()]


def codes_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each number, uint8; halfway to the even code, beyond 6 to 6."""
    size, sign = x.abs(), torch.signbit(x).to(torch.uint8) << 3
    code = torch.zeros_like(sign)
    for i, (below, above) in enumerate(zip(E2M1, E2M1[1:])):
        middle = (below + above) / 2
        code += size >= middle if i % 2 else size > middle
    return code | sign


def numbers_e3m2(codes: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of E3M2 codes 0 .. 63: no code is infinite or no number. Exponent bias 3 (OCP Microscaling 1.0)."""
    wide = codes.int()
    bits = (wide & 32) << 26 | (wide & 31) << 21  # in fp32's places, with an exponent 124 too low
    return bits.view(torch.float32) * 2.0**124


def codes_e3m2(x: torch.Tensor) -> torch.Tensor:
    """The nearest E3M2 code of each number, uint8; halfway to the even code, beyond 28 to 28."""
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-1) - 3)  # subnormals share the least one
    size = ((x.abs() / step).round() * step).clamp(max=E3M2_MAX)
    _, exponent = torch.frexp(size)  # rounding may have reached the next power of two
    normal = size >= 0.25
    mantissa = torch.where(normal, torch.ldexp(size, 3 - exponent) - 4, size * 16).to(torch.uint8)
    place = torch.where(normal, exponent + 2, 0).to(torch.uint8)
    return torch.signbit(x).to(torch.uint8) << 5 | place << 2 | mantissa


def unpack_six(low_NH: torch.Tensor, high_NQ: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] of 6 bits: the lower four of bytes [..., K / 2], the upper two of bytes [..., K / 4]."""
    upper = torch.stack([high_NQ >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return unpack_nibbles(low_NH) | upper << 4


def pack_six(codes_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., K / 2] and [..., K / 4] of codes of 6 bits."""
    upper = codes_NK >> 4
    high_NQ = upper[..., 0::4] | upper[..., 1::4] << 2 | upper[..., 2::4] << 4 | upper[..., 3::4] << 6
    return pack_nibbles(codes_NK & 15), high_NQ


def numbers_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two of E8M0 codes, uint8. 255 is NaN; 0 stands for 2^-127."""
    bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)  # the exponent of fp32 has the same bias
    return torch.where(scales == 255, torch.nan, bits.view(torch.float32))


def dequantise_i8(codes_NK: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [..., N, K]."""
    return codes_NK.float() * grouped(scales_NG.float(), codes_NK.shape[-1])


def dequantise_u4(
    bytes_NH: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights fp32 [..., N, K]."""
    codes_NK = unpack_nibbles(bytes_NH).float()
    zeros = CENTRE if zeros_NG is None else grouped(zeros_NG.float(), codes_NK.shape[-1])
    return (codes_NK - zeros) * grouped(scales_NG.float(), codes_NK.shape[-1])


def dequantise_mxfp4(bytes_NH: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [..., N, K]. ``scales_NG``: E8M0 codes, uint8."""
    return numbers_e2m1(unpack_nibbles(bytes_NH)) * grouped(numbers_e8m0(scales_NG), 2 * bytes_NH.shape[-1])


def dequantise_nvfp4(bytes_NH: torch.Tensor, scales_NG: torch.Tensor, tensor_N: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [..., N, K]. ``scales_NG``: E4M3. ``tensor_N``: the tensor's scale, a factor, for every output."""
    scales = scales_NG.float() * tensor_N[..., None]
    return numbers_e2m1(unpack_nibbles(bytes_NH)) * grouped(scales, 2 * bytes_NH.shape[-1])


def dequantise_fp6(low_NH: torch.Tensor, high_NQ: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [..., N, K]. ``scales_NG``: one for each output, G = 1."""
    return numbers_e3m2(unpack_six(low_NH, high_NQ)) * scales_NG.float()


def round_inputs(x_TK: torch.Tensor) -> torch.Tensor:
    """Inputs [T, K] as products with ``inputs=int8`` take them: rounded to -127 .. 127 times a scale for each 32."""
    blocks = torch.nn.functional.pad(x_TK.float(), (0, -x_TK.shape[-1] % INPUTS)).unflatten(-1, (-1, INPUTS))
    top = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > LEAST_INPUT, 127 / top, 0.0)
    return ((blocks * inverse).round() * (top / 127)).flatten(-2)[..., : x_TK.shape[-1]].to(x_TK.dtype)


# --------------------------------------------------------------------------------------------------------- quantising


def quantise_i8(w_NK: torch.Tensor, group: int, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [N, K] and scales fp32 [N, G]. ``group`` 0: one scale for all inputs. ``search``: the scale with the
    least squared error instead of that of the largest weight."""
    w_NGJ = _in_groups(w_NK, group)
    top_NG = w_NGJ.abs().amax(-1) / 127

    def codes(scales_NG: torch.Tensor) -> torch.Tensor:
        return (w_NGJ / _safe(scales_NG)[..., None]).round().clamp(-127, 127)

    scales_NG = _best([top_NG * f for f in SHRINK], codes, w_NGJ) if search else top_NG
    return codes(scales_NG).to(torch.int8).flatten(1), scales_NG


def quantise_u4(
    w_NK: torch.Tensor, group: int, zeros: bool = False, search: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bytes [N, K / 2], scales fp32 [N, G] and, with ``zeros``, zero points uint8 [N, G]."""
    w_NGJ = _in_groups(w_NK, group)
    if zeros:
        low, high = w_NGJ.amin(-1).clamp(max=0), w_NGJ.amax(-1).clamp(min=0)
        top_NG = (high - low) / 15
        shift_NG = (-low / _safe(top_NG)).round().clamp(0, 15)
    else:  # the side of the largest weight gets the code 0, which has no partner
        side = w_NGJ.gather(-1, w_NGJ.abs().argmax(-1, keepdim=True)).squeeze(-1)
        top_NG = side / -CENTRE
        shift_NG = torch.full_like(top_NG, CENTRE)

    def codes(scales_NG: torch.Tensor) -> torch.Tensor:
        return ((w_NGJ / _safe(scales_NG)[..., None]).round() + shift_NG[..., None]).clamp(0, 15) - shift_NG[..., None]

    scales_NG = _best([top_NG * f for f in SHRINK], codes, w_NGJ) if search else top_NG
    found = (codes(scales_NG) + shift_NG[..., None]).to(torch.uint8).flatten(1)
    return pack_nibbles(found), scales_NG, shift_NG.to(torch.uint8) if zeros else None


def quantise_mxfp4(w_NK: torch.Tensor, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, K / 2] and E8M0 scales uint8 [N, G]: the standard's power of two, or with ``search`` the better one of
    it and its neighbours."""
    w_NGJ = _in_groups(w_NK, MX_GROUP)
    _, exponent = torch.frexp(w_NGJ.abs().amax(-1))
    place_NG = exponent - 1 - 2  # 2^(floor(log2 max) - 2): the largest weight lies in [4, 8)

    def numbers(scales_NG: torch.Tensor) -> torch.Tensor:
        return numbers_e2m1(codes_e2m1(w_NGJ / scales_NG[..., None]))

    powers = [(place_NG + step + E8M0_BIAS).clamp(0, 254).to(torch.uint8) for step in ((0, 1, -1) if search else (0,))]
    scales_NG = _best([numbers_e8m0(p) for p in powers], numbers, w_NGJ)
    codes = codes_e2m1(w_NGJ / scales_NG[..., None]).flatten(1)
    return pack_nibbles(codes), (torch.frexp(scales_NG)[1] - 1 + E8M0_BIAS).to(torch.uint8)


def quantise_nvfp4(
    w_NK: torch.Tensor, tensor_scale: torch.Tensor, search: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, K / 2] and E4M3 scales [N, G], for the tensor's scale that ``tensor_scale_nvfp4`` gives.

    ``search``: ScaleSearch (arXiv 2605.12464): of the scales near the one that puts the largest weight on 6, the one
    with the least squared error of the block."""
    w_NGJ = _in_groups(w_NK, NV_GROUP) / tensor_scale
    top_NG = (w_NGJ.abs().amax(-1) / E2M1_MAX).clamp(E4M3_LEAST, E4M3_MAX).to(torch.float8_e4m3fn)

    def numbers(scales_NG: torch.Tensor) -> torch.Tensor:
        return numbers_e2m1(codes_e2m1(w_NGJ / scales_NG[..., None]))

    scales_NG = top_NG.float()
    if search:  # positive numbers of E4M3 stand in the order of their bits
        place = top_NG.view(torch.uint8).int()
        near = [(place + step).clamp(1, 126).to(torch.uint8) for step in sorted(E4M3_OFFSETS, key=abs)]
        scales_NG = _best([p.view(torch.float8_e4m3fn).float() for p in near], numbers, w_NGJ)
    codes = codes_e2m1(w_NGJ / scales_NG[..., None]).flatten(1)
    return pack_nibbles(codes), scales_NG.to(torch.float8_e4m3fn)


def quantise_fp6(w_NK: torch.Tensor, search: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes [N, K / 2], bytes [N, K / 4] and scales fp32 [N, 1], the largest weight of an output on 28. ``search``: the
    scale with the least squared error."""
    w_NGJ = _in_groups(w_NK, 0)
    top_NG = w_NGJ.abs().amax(-1) / E3M2_MAX

    def numbers(scales_NG: torch.Tensor) -> torch.Tensor:
        return numbers_e3m2(codes_e3m2(w_NGJ / _safe(scales_NG)[..., None]))

    scales_NG = _best([top_NG * f for f in SHRINK], numbers, w_NGJ) if search else top_NG
    return *pack_six(codes_e3m2(w_NGJ / _safe(scales_NG)[..., None]).flatten(1)), scales_NG


def tensor_scale_nvfp4(w_NK: torch.Tensor) -> torch.Tensor:
    """The factor fp32 of a whole tensor: the largest weight is then 448 times 6."""
    return (w_NK.float().abs().amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=torch.finfo(torch.float32).tiny)


def _in_groups(w_NK: torch.Tensor, group: int) -> torch.Tensor:
    return w_NK.float().unflatten(-1, (-1, group or w_NK.shape[-1]))


def _safe(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: a group of zeros has scale 0 and any codes of zero."""
    return torch.where(scales == 0, 1.0, scales)


def _best(tries: Sequence[torch.Tensor], numbers, w_NGJ: torch.Tensor) -> torch.Tensor:
    """The scale of every group [N, G]: the first of those whose ``numbers`` come closest to its weights."""
    best, least = tries[0], None
    for scales_NG in tries:
        error = (numbers(scales_NG) * scales_NG[..., None] - w_NGJ).square().sum(-1)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        best = torch.where(better, scales_NG, best)
        least = error if least is None else torch.where(better, error, least)
    return best


def all_codes(layout: str) -> Iterator[tuple[int, float]]:
    """Every code of a layout and the number that it stands for, before its scale."""
    if layout == "i8":
        yield from ((code, float(code)) for code in range(-128, 128))
    elif layout == "u4":
        yield from ((code, float(code - CENTRE)) for code in range(16))
    elif layout == "fp6":
        for code in range(64):
            sign, exponent, mantissa = (-1.0 if code & 32 else 1.0), code >> 2 & 7, code & 3
            yield code, sign * (mantissa / 4 * 0.25 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 3))
    else:
        yield from enumerate([*E2M1, *(-x for x in E2M1)])
