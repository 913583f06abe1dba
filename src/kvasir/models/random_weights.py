"""Random numbers in the place of stored weights."""

from __future__ import annotations

import torch

from kvasir.layers.weights import Slot

DRAWN = 1 << 24  # random codes that are drawn at a time


def draw_random(slots: dict[str, Slot], generator: torch.Generator, narrow: bool = False) -> None:
    """Fill slots with random numbers: matrices as ``kvasir.models.loader.fill_random`` says, scales of norms with
    ones, and other vectors with zeros. ``narrow``: numbers in fp32 are rounded to bf16."""
    for name, slot in slots.items():
        if slot.random is not None:
            _draw(slot.target, *slot.random, generator)
        elif slot.target.dim() >= 2 and not slot.repeat:
            bound = (3.0 / slot.shape[-1]) ** 0.5
            slot.target.uniform_(-bound, bound, generator=generator)
            if narrow and slot.target.dtype == torch.float32:
                slot.target.copy_(slot.target.bfloat16())
        else:
            slot.target.fill_(1.0 if name.endswith(("norm.weight", "scale")) else 0.0)


def _draw(target: torch.Tensor, low: float, high: float, generator: torch.Generator) -> None:
    """Fill codes with random numbers in [low, high), or scales with the one number that both are."""
    if low == high:
        target.fill_(low)
        return
    for part in target.split(max(1, DRAWN // max(1, target[0].numel()))):
        part.copy_(torch.empty(part.shape, device=part.device).uniform_(low, high, generator=generator))
