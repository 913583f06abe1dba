"""The seam of trained heads: what serving, training and the folder of a drafter need of each kind.

A kind is a file in ``head_kinds`` with one subclass of `Head` and the frozen dataclass of its shape. Every kind guesses
from the row *before* the anchor, the last one computed: its hidden states, with the token after it known.

Legend: B texts, T tokens, R rows, M guesses, K keys, L tapped layers, E model dim, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from kvasir.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Level:
    """Guesses of many drafts, each made the same number of tokens after its root.

    ``root_M``: the committed row that the draft starts from; ``above_M``: place one level up of the guess that this one
    continues; ``embedded_ME``: embeddings of the tokens between the two; ``sees_MK``: which keys a guess sees (bool):
    those of the R committed rows, then those of levels 1, 2, ... up to its own. Level 0 holds the committed rows
    themselves, in their order.
    """

    root_M: torch.Tensor
    above_M: torch.Tensor
    embedded_ME: torch.Tensor
    sees_MK: torch.Tensor


class Head(nn.Module):
    """Weights that guess tokens from the served model's hidden states. Embedding and output matrix are the model's own.

    How a kind is trained is said in ``kvasir_lab.trained_drafters``, by the same name.
    """

    shape_class: ClassVar[type]  # a frozen dataclass with ``dim``, ``layers`` (tapped) and ``depth`` (tokens guessed)

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape

    @property
    def kind(self) -> str:
        """The name that finds this kind."""
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    @abstractmethod
    def shape_for(cls, dim: int, num_layers: int) -> Any:
        """The shape that training gives a head for a model of ``num_layers`` layers of ``dim``."""
        raise NotImplementedError

    @abstractmethod
    def begin_with(self, norm_E: torch.Tensor, embed_VE: torch.Tensor, generator: torch.Generator) -> None:
        """Set the first weights of a training run, from the model's final norm and its embeddings."""
        raise NotImplementedError

    def unroll(
        self, features_BTLE: torch.Tensor, normed_BTE: torch.Tensor, embedded_BTE: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield for k = 0, 1, ... a tensor [B, T, E] whose row p predicts token p + 2 + k, from the tapped layers'
        outputs, the final norm's, and the embeddings of the tokens that follow. Never called where the weights are
        embeddings, which the model itself reads as rows."""
        raise NotImplementedError

    def unroll_paths(
        self,
        features_RLE: torch.Tensor,
        normed_RE: torch.Tensor,
        positions_R: torch.Tensor,
        num_positions: int,
        levels: Iterable[Level],
    ) -> Iterator[torch.Tensor]:
        """Yield for each level a tensor [M, E] whose rows predict the token after their own, as ``unroll`` does along
        one text; here paths may branch. ``num_positions``: a number that no position of a guess reaches. A level may
        depend on what was yielded for the one before."""
        raise NotImplementedError


class Norm(nn.Module):
    """RMS norm, in fp32 whatever the weights are in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.eps_1 = torch.full((1,), eps, device="cpu")  # fewer calls on a CPU, see rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return rms_norm(x.flatten(0, -2), self.weight, self.eps, self.eps_1).view(x.shape)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
