"""Weights as codes of 8 and 4 bits in panels for the C kernels. Products sum fp32 inputs times codes.

A weight is ``scale * (code - zero)``, with a scale (and perhaps a zero point) for each output and group of inputs. The
panels hold what ``quantized.h`` describes. Nothing is lost on the way: scales are kept in fp32, codes as they are.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import ctypes

import torch

from kvasir.kernels.native.program import BF16_INPUTS, CENTRED, I8, NO_OFFSETS, OFFSETS, ROUNDED, U4, Packed

CENTRE = 8.0  # the zero point of 4-bit codes that have none of their own
CODES_A_WORD = 8  # of 4 bits
LEAST_GROUP = 16  # inputs: sums over groups are by whole registers


def dequantise_reference(codes_NK: torch.Tensor, scales_NG: torch.Tensor,
                         zeros_NG: torch.Tensor | None = None) -> torch.Tensor:
    """Weights fp32 [N, K] of ``pack_codes``' arguments."""
    group = codes_NK.shape[1] // scales_NG.shape[1]
    zeros_NK = _zeros(codes_NK, scales_NG, zeros_NG).repeat_interleave(group, 1)
    return (codes_NK.float() - zeros_NK) * scales_NG.float().repeat_interleave(group, 1)


def pack_codes(library: ctypes.CDLL, codes_NK: torch.Tensor, scales_NG: torch.Tensor,
               zeros_NG: torch.Tensor | None = None, gated: bool = False,
               offsets_NG: torch.Tensor | None = None, rounded: bool = False) -> Packed:
    """Pack codes for ``Program.linear``.

    ``codes_NK``: int8, or uint8 with values 0 .. 15. ``scales_NG``: G = 1, or groups of a multiple of 16 inputs
    (matrix tiles take multiples of 32). ``zeros_NG``: zero points, whole or not; None: 0 for int8 and 8 for uint8.
    ``gated``: gate and up are halves of N. ``offsets_NG``: -scale * zero, where it is known and the zero is not.
    ``rounded``: for inputs that are rounded to 8 bits (``rounded.h``), in groups of a multiple of 32.
    """
    outputs, inputs = codes_NK.shape
    groups = scales_NG.shape[1]
    whole = inputs % BF16_INPUTS == 0 and inputs // groups % LEAST_GROUP == 0
    assert inputs % groups == 0 and (groups == 1 or whole), "groups of 16, 32, 48, ..."
    wide = codes_NK.dtype == torch.int8
    if zeros_NG is not None:
        offsets_NG = -scales_NG.float() * zeros_NG.float()
    offsets = OFFSETS if offsets_NG is not None else NO_OFFSETS if wide else CENTRED
    head = [scales_NG.float()] + ([] if offsets_NG is None else [offsets_NG.float()])
    parts, lanes = 2 if gated else 1, library.kvasir_lanes()
    outputs //= parts
    blocks = -(-outputs // lanes) if gated else -(-outputs // (2 * lanes)) * 2
    padded = -(-inputs // BF16_INPUTS) * BF16_INPUTS

    def blocked(x_NC: torch.Tensor, columns: int) -> torch.Tensor:
        """[blocks, parts, G, columns / G, lanes]: a part's blocks take turns."""
        full = x_NC.new_zeros(parts, blocks * lanes, columns)
        full[:, :outputs, : x_NC.shape[1]] = x_NC.reshape(parts, outputs, -1)
        return full.view(parts, blocks, lanes, groups, columns // groups).permute(1, 0, 3, 4, 2)

    assert not rounded or groups == 1 or inputs // groups % ROUNDED == 0, "groups of 32, 64, 96, ..."
    codes = blocked(codes_NK.view(torch.uint8) ^ 128 if wide and rounded else codes_NK, padded)
    if rounded:
        fours = codes.unflatten(3, (-1, 4 if wide else CODES_A_WORD))  # [blocks, parts, G, words, 4 or 8, lanes]
        fours = fours if wide else fours[..., :4, :] | fours[..., 4:, :] << 4
        words = fours.transpose(-1, -2).contiguous().view(torch.int32)
    elif wide:
        words = codes.contiguous().view(torch.int32)
    else:
        nibbles = codes.unflatten(3, (-1, CODES_A_WORD))  # [blocks, parts, G, words, 8, lanes]
        pairs = nibbles[..., 0::2, :] | nibbles[..., 1::2, :] << 4
        words = pairs.transpose(-1, -2).contiguous().view(torch.int32)
    numbers = torch.cat([blocked(x, groups) for x in head], 3).contiguous().view(torch.int32)
    data = torch.cat([numbers.flatten(3), words.flatten(3)], 3).view(-1)
    group = 0 if groups == 1 else inputs // groups
    return Packed(data, I8 if wide else U4, outputs, inputs, gated, group, offsets, rounded)


def unpack_codes(library: ctypes.CDLL, packed: Packed) -> torch.Tensor:
    """The codes [N, K] that were packed, bit for bit."""
    parts, lanes, wide = 2 if packed.gated else 1, library.kvasir_lanes(), packed.format == I8
    padded = -(-packed.num_inputs // BF16_INPUTS) * BF16_INPUTS
    groups = packed.num_inputs // packed.group if packed.group else 1
    heads = 2 if packed.offsets == OFFSETS else 1
    outputs = packed.num_outputs
    blocks = -(-outputs // lanes) if packed.gated else -(-outputs // (2 * lanes)) * 2
    words = packed.data.view(blocks, parts, groups, -1)[..., heads * lanes :].contiguous().view(torch.uint8)
    if wide and not packed.rounded:
        codes = words.unflatten(3, (-1, lanes))
    else:
        fours = words.unflatten(3, (-1, lanes, 4)).transpose(-1, -2)  # [blocks, parts, G, words, 4, lanes]
        low, high = fours & 15, fours >> 4
        if wide:
            codes = fours ^ 128
        elif packed.rounded:
            codes = torch.cat((low, high), -2)
        else:
            codes = torch.stack((low, high), -2).flatten(4, 5)
        codes = codes.flatten(3, 4)
    full = codes.permute(1, 0, 4, 2, 3).reshape(parts, blocks * lanes, padded)
    found = full[:, :outputs, : packed.num_inputs].reshape(parts * outputs, packed.num_inputs).contiguous()
    return found.view(torch.int8) if wide else found


def _zeros(codes_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor | None) -> torch.Tensor:
    if zeros_NG is not None:
        return zeros_NG.float()
    return torch.full_like(scales_NG, 0.0 if codes_NK.dtype == torch.int8 else CENTRE, dtype=torch.float32)
