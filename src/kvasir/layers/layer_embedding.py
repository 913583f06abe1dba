"""Embeddings of a token for each layer, as in Gemma 3n and 4: a second table gives every layer a few numbers about the
row's token, and a projection of the row's embedding is added to them.

Legend: T rows, E model dim, L layers, P numbers per layer, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvasir.kernels.activation import ACTIVATIONS
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import LayerEmbeddingSpec
from kvasir.layers.weights import Placement, Slot


class LayerEmbeddings:
    """The table and the projection that give all layers their inputs."""

    def __init__(
        self, spec: LayerEmbeddingSpec, num_layers: int, num_tokens: int, hidden_size: int, place: Placement
    ) -> None:
        width = num_layers * spec.size
        self.size = spec.size
        self.table_VN = torch.empty(num_tokens, width, device=place.device, dtype=place.dtype)
        # Rounded to the model's dtype, as the scale of the embeddings is.
        self.scale = torch.tensor(spec.size**0.5, dtype=place.dtype).item()
        self.projection = Linear(hidden_size, {"projection": width}, bias=False, place=place)
        self.projection_scale = hidden_size**-0.5
        self.norm = RMSNorm(spec.size, spec.norm, place)

    def __call__(self, ids_T: torch.Tensor, embedded_TE: torch.Tensor) -> torch.Tensor:
        """Inputs of the layers [T, L, P] for tokens and their embeddings."""
        own_TLP = (F.embedding(ids_T, self.table_VN) * self.scale).unflatten(1, (-1, self.size))
        seen_TN = self.projection(embedded_TE) * self.projection_scale
        seen_MP = self.norm(seen_TN.view(-1, self.size))
        return (seen_MP.view(own_TLP.shape) + own_TLP) * 2**-0.5

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(self.table_VN)} | self.projection.slots() | {"norm.weight": self.norm.slots()["weight"]}


class LayerInput:
    """One layer's part that adds to the stream: norm(project(activation(gate(h)) * input))."""

    def __init__(self, spec: LayerEmbeddingSpec, hidden_size: int, place: Placement) -> None:
        self.gate = Linear(hidden_size, {"gate": spec.size}, bias=False, place=place)
        self.projection = Linear(spec.size, {"projection": hidden_size}, bias=False, place=place)
        self.norm = RMSNorm(hidden_size, spec.norm, place)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, h_TE: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """The result [T, E] before its norm."""
        return self.projection(self.activation(self.gate(h_TE)) * input_TP)

    def slots(self) -> dict[str, Slot]:
        return self.gate.slots() | self.projection.slots() | {"norm.weight": self.norm.slots()["weight"]}
