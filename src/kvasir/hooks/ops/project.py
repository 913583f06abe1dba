"""Scale the component along a direction: h + strength * c (v . h) v. With c = -1 it is removed. Lossy by design.

Tensors: ``direction`` [H, D], brought to length 1. Directional ablation (Arditi et al. 2024, arXiv 2406.11717). The
length of h changes; ``rotate`` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvasir.hooks.hook import Op, Steer
from kvasir.hooks.tensors import moving, tensor, unit
from kvasir.kernels import steer


@dataclass(frozen=True)
class Config:
    c: float = -1.0


class Project(Op):
    config: Config

    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer:
        v_HD = unit(tensor(tensors, "direction", heads, width))
        zeros_1H = torch.zeros(1, heads)
        return Steer(steer.DOT, self.config.c, v_HD[None], zeros_1H, heads_H=moving(v_HD))
