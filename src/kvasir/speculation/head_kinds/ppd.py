"""PPD (arXiv 2405.18628): embeddings that stand behind row p as if they were tokens.

The model's own output for number j of them, read as that of any row, guesses the token j + 2 places after row p. Each
may be an ensemble whose outputs are averaged.

Legend: E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvasir.speculation.head import Head


@dataclass(frozen=True)
class PromptShape:
    """Number of prompt tokens (``depth``), and embeddings for each (``ensemble``; the paper's own trainer has one). No
    layer is tapped."""

    dim: int
    layers: tuple[int, ...] = ()
    depth: int = 3
    ensemble: int = 1


class Prompts(Head):
    shape_class = PromptShape

    def __init__(self, shape: PromptShape) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.zeros(shape.ensemble, shape.depth, shape.dim))

    @classmethod
    def shape_for(cls, dim: int, num_layers: int) -> PromptShape:
        return PromptShape(dim)

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Each begins as some token would: drawn with the mean and the spread of the vocabulary's embeddings."""
        with torch.no_grad():
            self.weight.copy_(embed_VE.mean(0) + embed_VE.std(0) * torch.randn(self.weight.shape, generator=generator))
