"""Raise a probe's class by the shortest move: editing of response personality (arXiv 2504.10227). Lossy by design.

A linear probe scores classes; where the target's margin is below logit(p), the state moves along the probe's weights
until it has that margin. ``margin``: ``runner_up``: over the best other class, as a softmax has it; ``sigmoid``: over
zero, the published form, which takes a softmax class for a sigmoid.

Tensors: ``weight`` [C, D] (with heads [C, H, D]) and ``bias`` [C] (or [C, H]) of the probe. What differs from the
paper: the margin, by default; rows from the prompt's last on, by the gate, instead of the last row of whatever is
computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvasir.errors import ConfigError
from kvasir.hooks.hook import Op, Steer
from kvasir.hooks.tensors import tensor
from kvasir.kernels import steer


@dataclass(frozen=True)
class Config:
    target: int = 0
    p: float = 0.9
    margin: Literal["runner_up", "sigmoid"] = "runner_up"

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ConfigError(f"probe_shift: p={self.p} is no probability between 0 and 1")


class ProbeShift(Op):
    config: Config

    def steer(self, tensors: Mapping[str, torch.Tensor], heads: int, width: int) -> Steer:
        classes, target = len(tensors["bias"]) if "bias" in tensors else 0, self.config.target
        weights_CHD = tensor(tensors, "weight", classes, heads, width)
        biases_CH = tensor(tensors, "bias", classes, heads)
        if not 0 <= target < classes:
            raise ConfigError(f"probe_shift: target={target}, but the probe has the classes 0 to {classes - 1}")
        if self.config.margin == "sigmoid":
            vectors, biases = weights_CHD[target, None], biases_CH[target, None]
        else:
            others = [i for i in range(classes) if i != target]
            vectors, biases = weights_CHD[target] - weights_CHD[others], biases_CH[target] - biases_CH[others]
        return Steer(steer.SHIFT, 1.0, vectors, biases, math.log(self.config.p / (1 - self.config.p)))
