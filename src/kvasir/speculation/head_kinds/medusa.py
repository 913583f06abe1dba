"""Medusa (arXiv 2401.10774): head k = 0, 1, ... guesses the token k + 2 places after row p.

A head is one residual block over the final normed state, x + SiLU(W_k x + b_k), read by the model's own output matrix.

Legend: B texts, T tokens, R rows, M guesses of a level, N = leading dimensions, E model dim, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kvasir.speculation.head import Head, Level


@dataclass(frozen=True)
class MedusaShape:
    """Number of heads (``depth``) and tapped layers, always the last alone."""

    dim: int
    layers: tuple[int, ...]
    depth: int = 4


class Medusa(Head):
    shape_class = MedusaShape

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.zeros(shape.depth, shape.dim, shape.dim))  # all heads begin as the model's own
        self.bias = nn.Parameter(torch.zeros(shape.depth, shape.dim))

    @classmethod
    def shape_for(cls, dim: int, num_layers: int) -> MedusaShape:
        return MedusaShape(dim, (num_layers - 1,))

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """[N, E], the final norm's output -> [N, K, E], to be read by the output matrix."""
        inner = torch.einsum("...e,kfe->...kf", x_NE, self.weight) + self.bias
        return x_NE[..., None, :] + F.silu(inner)

    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Keep the zero weights."""

    def unroll(
        self, features_BTLE: torch.Tensor, normed_BTE: torch.Tensor, embedded_BTE: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        yield from self(normed_BTE).unbind(2)

    def unroll_paths(
        self,
        features_RLE: torch.Tensor,
        normed_RE: torch.Tensor,
        positions_R: torch.Tensor,
        num_positions: int,
        levels: Iterable[Level],
    ) -> Iterator[torch.Tensor]:
        """Guess without looking at paths: all guesses of a level and root are alike."""
        guesses_RKE = self(normed_RE)
        for j, level in enumerate(levels):
            yield guesses_RKE[:, j][level.root_M]
