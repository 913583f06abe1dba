"""Rotations of the head dim, in which a codec may cache keys or values: outliers spread over the elements that share a
scale.

Legend: D head dim.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.kernels.quantize import hadamard
from kvasir.kernels.quantized_qkv import Basis


class Rotation:
    """R = diag(signs) H: an orthonormal rotation of the head dim.

    ``signs``: fixed random signs also spread a row's constant offset, which the bare Hadamard matrix would gather in
    one element. R is then no longer its own inverse.
    """

    def __init__(self, order: int, dim: int, signs: bool) -> None:
        if order < 2 or order & (order - 1) or dim % order:
            raise ConfigError(
                f"a rotation of order {order} does not fit heads of {dim}: it must be a power of two that divides the "
                f"head dim, such as {dim & -dim}"
            )
        self.order = order
        flips = np.random.Generator(np.random.Philox(dim)).integers(0, 2, dim) if signs else np.zeros(dim, np.int64)
        self.signs_D = torch.from_numpy(1.0 - 2.0 * flips).float()
        self._bases: dict[tuple, Basis] = {}
        self._inverse: dict[torch.device, torch.Tensor] = {}

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x R, fp32."""
        return hadamard(x.float() * self.signs_D.to(x.device), self.order)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """x R^T, fp32."""
        return hadamard(x, self.order) * self.signs_D.to(x.device)

    def undo_product(self, x: torch.Tensor) -> torch.Tensor:
        """``undo`` as one matrix product, for a GPU, where a row's order of summation need not be fixed."""
        if x.device not in self._inverse:
            self._inverse[x.device] = self.matrix_DD.T.contiguous().to(x.device)
        return x.float() @ self._inverse[x.device]

    @cached_property
    def matrix_DD(self) -> torch.Tensor:
        """R itself, fp32."""
        return self.apply(torch.eye(len(self.signs_D)))

    @cached_property
    def factors_D(self) -> torch.Tensor:
        """Factors of a row before its sums and differences: fp32 signs over the root of the order."""
        return self.signs_D * self.order**-0.5

    def basis(self, dtype: torch.dtype, device: torch.device, values: bool) -> Basis:
        """R as the kernels take it, made once a device."""
        key = dtype, device, values
        if key not in self._bases:
            dim, order = len(self.signs_D), self.order
            parts: Literal["same", "cross", "whole"] = (
                "cross" if order == dim else "same" if dim // 2 % order == 0 else "whole"
            )
            width = dim if parts == "whole" else dim // 2
            block = min(order, width)
            matrix = (hadamard(torch.eye(width), block) * block**0.5).round()
            self._bases[key] = Basis(matrix.to(device, dtype), self.signs_D.to(device, dtype), parts, order, values)
        return self._bases[key]


def largest_order(dim: int) -> int:
    """Largest power of two that divides ``dim``."""
    return 1 << int(math.log2(dim & -dim))
