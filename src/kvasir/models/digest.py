"""Digest of a decoder's weights by content, as they lie on the device: equal wherever the same weights are loaded.

Every stored tensor is mixed word by word with its position and summed, on its own device; the sums, names and shapes
are hashed. It tells different checkpoints apart. It is no defence against somebody who constructs a collision.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvasir.models.decoder import Decoder

# Words of 8 bytes that are mixed at once: 32 MiB, with scratch memory of a few times as much.
CHUNK = 1 << 22
# Odd factors of the mix, from the golden ratio and from splitmix64 (Steele et al. 2014), as signed 64-bit numbers.
STRIDE, FACTOR = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


@torch.inference_mode()
def digest(decoder: Decoder) -> str:
    """Hex digest of all weights that a checkpoint fills, 32 characters."""
    found = blake2b(digest_size=16)
    for name, slot in sorted(decoder.slots().items()):
        found.update(repr((name, tuple(slot.target.shape), str(slot.target.dtype), mixed(slot.target))).encode())
    return found.hexdigest()


def mixed(tensor: torch.Tensor) -> tuple[int, bytes]:
    """The sum (mod 2**64) over a tensor's whole words, each mixed with its position, and the bytes behind them."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        place = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        mix = (part ^ (place * STRIDE)) * FACTOR
        total += (mix ^ (mix >> 31)).sum()
    return int(total), bytes(raw[whole:].tolist())
