"""The gated feed-forward block of Llama and most models since.

Legend: T rows, E model dim, F width of the block.
"""

from __future__ import annotations

import torch

from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import DenseSpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class FFN:
    """down(activation(gate(x)) * up(x))."""

    native = True  # the C kernels run it (``models/native_decoder.py``)
    varies = True  # its products are given the batch, so that adapters may change them
    static = True  # its torch calls depend on shapes alone, so a tape may repeat them
    fuses = True  # ``forward`` takes the norm before it and the residual add after it

    def __init__(self, spec: DenseSpec, hidden_size: int, place: Placement) -> None:
        self.gate_up = Linear(
            hidden_size, {"gate": spec.intermediate_size, "up": spec.intermediate_size}, bias=spec.bias, place=place
        )
        self.down = Linear(spec.intermediate_size, {"down": hidden_size}, bias=spec.bias, place=place)
        self.activation = spec.activation

    def forward(
        self,
        x_TE: torch.Tensor,
        norm: RMSNorm | None = None,
        residual_TE: torch.Tensor | None = None,
        batch: StepBatch | None = None,
    ) -> torch.Tensor:
        """The block of x, or of ``norm``(x): [T, E]. ``residual_TE`` is added, and its memory may be used for the
        result. ``batch`` says which of these rows have variants."""
        gated_TF = self.gate_up(x_TE, norm, activation=self.activation, batch=batch)
        return self.down(gated_TF, residual_TN=residual_TE, batch=batch)

    def slots(self) -> dict[str, Slot]:
        return self.gate_up.slots() | self.down.slots()
