"""Weights as codes with scales: what the formats ``i8``, ``u4``, ``mxfp4`` and ``nvfp4`` have in common.

The planes stay as they are: products of few rows read codes, and prompts a copy of one matrix at a time in the model's
dtype, which is given back.

Legend: T rows, N outputs, K inputs, O outputs after a gated activation, G groups.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvasir.errors import ConfigError
from kvasir.layers.weight_format import MATRIX, Weight, WeightFormat

SCALE, ZERO, TENSOR_SCALE = "scale", "zero", "tensor_scale"  # planes beside that of the codes


class CodeFormat(WeightFormat):
    """A format of codes. ``group``: inputs of a scale; 0: all."""

    group = 0

    @abstractmethod
    def numbers(self, weight: Weight) -> torch.Tensor:
        """The matrix fp32 [..., N, K], exactly as its codes and scales say."""

    @abstractmethod
    def quantise(self, w_NK: torch.Tensor, search: bool = False) -> dict[str, torch.Tensor]:
        """The planes of a matrix. ``search``: scales with the least squared error instead of those of the largest
        weights."""

    def dequantise(self, weight: Weight) -> torch.Tensor:
        return self.numbers(weight).to(weight.place.dtype)

    def groups(self, num_inputs: int) -> int:
        """The groups of a row. Raises ConfigError where the inputs are no multiple of a group."""
        group = self.group or num_inputs
        if num_inputs % group or num_inputs % 2:
            raise ConfigError(
                f"the weight format '{self.name}' has groups of {group} inputs, which {num_inputs} inputs of a matrix "
                "are no multiple of. Use a checkpoint with smaller groups, or with scales by channel."
            )
        return num_inputs // group


def codes_of(weight: Weight) -> torch.Tensor:
    """The plane of codes."""
    return weight.planes[MATRIX]
