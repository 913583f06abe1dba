"""Add a vector to each head: h + strength * scale * v. Lossy by design; 2 D operations a head.

Tensors: ``direction`` [H, D], used at its own length. The plainest steering vector (Turner et al. 2023, arXiv
2308.10248).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvasir.hooks.hook import Op, Steer
from kvasir.hooks.tensors import moving, tensor
from kvasir.kernels import steer


@dataclass(frozen=True)
class Config:
    scale: float = 1.0


class Add(Op):
    config: Config

    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer:
        v_HD = tensor(tensors, "direction", heads, width)
        zeros_1H = torch.zeros(1, heads)
        return Steer(steer.ADD, self.config.scale, v_HD[None], zeros_1H, heads_H=moving(v_HD))
