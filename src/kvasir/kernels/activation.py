"""The gated activation of a feed-forward block: activation(gate) * up.

Legend: T rows, F width of the block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}


def gated(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor], exact: bool = False) -> torch.Tensor:
    """gate_up [T, 2F] (gate first) -> [T, F], same dtype.

    ``exact``: a row's bits do not depend on its batch. On a CPU the vectorised and the scalar exp differ in the last bit,
    and where one ends and the other begins depends on the tensor's size and on the threads; so rows go one by one.
    """
    if exact and gate_up.shape[0] > 1:
        return torch.cat([gated(row, activation) for row in gate_up.split(1)])
    width = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((width, width), -1)
    return activation(gate).mul_(up)
