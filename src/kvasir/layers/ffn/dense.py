"""The gated feed-forward block of Llama and most models since.

Legend: T rows, E model dim, F width of the block.
"""

from __future__ import annotations

import torch

from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.layers.linear import Linear, Placement, Slot
from kvasir.layers.spec import DenseSpec


class FFN:
    def __init__(self, spec: DenseSpec, hidden_size: int, place: Placement) -> None:
        self.gate_up = Linear(hidden_size, {"gate": spec.intermediate_size, "up": spec.intermediate_size}, bias=spec.bias, place=place)
        self.down = Linear(spec.intermediate_size, {"down": hidden_size}, bias=spec.bias, place=place)
        self.activation = ACTIVATIONS[spec.activation]
        self.exact = place.exact

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate_up(x_TE), self.activation, self.exact))

    def slots(self) -> dict[str, Slot]:
        return self.gate_up.slots() | self.down.slots()
