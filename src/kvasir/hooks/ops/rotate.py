"""Turn heads away from a direction and keep their length: CREST (arXiv 2512.24574). Lossy by design.

h' = |h| / |y| y with y = h + strength * c g (v . h) v. With c = -1 no component along v is left; c = -2 reflects it;
the released code has c = -4. ``gate`` g: ``all``: 1; ``threshold``: 1 where a linear probe says that the state precedes
a needless check; ``soft``: the probability that the probe gives it.

Tensors: ``direction`` [H, D], brought to length 1; for the probe ``probe`` [H, D] and ``bias`` [H]; ``heads`` [H]
(optional): other than 0 where a head was chosen. What differs from the paper: all heads of a layer turn at once, which
is the same thing where each has a vector of its own, as at the site ``head_out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvasir.hooks.hook import Op, Steer
from kvasir.hooks.tensors import moving, tensor, unit
from kvasir.kernels import steer


@dataclass(frozen=True)
class Config:
    c: float = -1.0
    gate: Literal["all", "threshold", "soft"] = "all"


class Rotate(Op):
    config: Config

    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer:
        v_HD = unit(tensor(tensors, "direction", heads, width))
        heads_H = moving(v_HD)
        if "heads" in tensors:
            heads_H = heads_H & (tensor(tensors, "heads", heads) != 0)
        mode, vectors, biases = steer.DOT | steer.NORM, [v_HD], [torch.zeros(heads)]
        if self.config.gate != "all":
            mode |= steer.THRESHOLD if self.config.gate == "threshold" else steer.SOFT
            vectors.append(tensor(tensors, "probe", heads, width))
            biases.append(tensor(tensors, "bias", heads))
        return Steer(mode, self.config.c, torch.stack(vectors), torch.stack(biases), heads_H=heads_H)
