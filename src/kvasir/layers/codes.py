"""Weights as codes with scales: what all formats of codes but ``f8`` have in common.

The planes stay as they are: products of few rows read codes, and prompts a copy of one matrix at a time in the model's
dtype, which is given back. Experts are multiplied as codes up to ``STREAMED_PAIRS``.

Legend: T rows, N outputs, K inputs, O outputs after a gated activation, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from kvasir import tuned
from kvasir.errors import ConfigError
from kvasir.kernels import nibble_gemv
from kvasir.kernels._triton import use_triton
from kvasir.kernels.codes_gemv import Coded, choose, codes_gemv, matrix_of
from kvasir.kernels.codes_moe import SERVED
from kvasir.kernels.gemv import MAX_ROWS
from kvasir.kernels.moe import Experts
from kvasir.kernels.weight_codes import pack_nibbles, round_inputs
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import finish, linear, normed, with_norm
from kvasir.layers.weight_format import MATRIX, Plane, Weight, WeightFormat
from kvasir.layers.weights import Placement

# Pairs of a row and an expert, by expert, up to which codes are multiplied as they are. Beyond, a copy in the model's
# dtype is written and given back, since every tile of pairs would make numbers of the codes again.
STREAMED_PAIRS = tuned.STREAMED_PAIRS.value
# Planes beside that of the codes; HIGH: the upper bits of codes of six.
SCALE, ZERO, TENSOR_SCALE, HIGH, FACTOR = "scale", "zero", "tensor_scale", "high", "factor"
GROUPS = (0, 32, 64, 128)  # inputs of a scale that an ``IntegerFormat`` may have, 0: all


class CodeFormat(WeightFormat):
    """A format of codes. ``group``: inputs of a scale; 0: all. ``block``: inputs that a row has a multiple of.
    ``more``: the plane that the kernels take as ``Coded.more``; empty: there is none."""

    exact = False
    group = block = 0
    more: ClassVar[str] = ""

    def coded(self, weight: Weight) -> Coded:
        """The planes as the kernels take them."""
        planes = weight.planes
        return Coded(self.name, planes[MATRIX], planes[SCALE], planes.get(self.more), self.group, planes.get(HIGH))

    def of_codes(self, codes_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those of codes of four bits, two in a byte."""
        return {MATRIX: pack_nibbles(codes_NK)} if self.code_planes else super().of_codes(codes_NK)

    @property
    def search(self) -> bool:
        """Whether quantising looks for the scales with the least squared error, instead of those of the largest
        weights."""
        return self.config.scale == "search"

    @property
    def rounded(self) -> bool:
        """Whether products round their inputs to 8 bits, in blocks of 32, as the C kernels do."""
        return getattr(self.config, "inputs", "float") == "int8"

    def allocate(
        self, count: int | None, widths: tuple[int, ...], num_inputs: int, place: Placement
    ) -> dict[str, torch.Tensor]:
        if self.rounded and place.device.type == "cuda":
            raise ConfigError(f"{self.name}:inputs=int8 is for CPUs. On a GPU leave it out: products read the codes.")
        return super().allocate(count, widths, num_inputs, place)

    def dequantise(self, weight: Weight) -> torch.Tensor:
        w, dtype = self.coded(weight), weight.place.dtype
        return matrix_of(w, dtype) if use_triton(w.codes) else w.numbers().to(dtype)

    def product(
        self,
        weight: Weight,
        x_TK: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        bias_N: torch.Tensor | None = None,
        activation: str | None = None,
        residual_TO: torch.Tensor | None = None,
        normed_TK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = x_TK.shape[0]
        if weight.streams and rows <= MAX_ROWS:
            product, x_TK = self._few(weight, x_TK, norm, normed_TK, activation is not None)
            return product(x_TK, bias_N=bias_N, activation=activation, residual_TO=residual_TO)
        x_TK = normed(x_TK, norm, normed_TK)
        if self.rounded:
            x_TK = round_inputs(x_TK)
        w_NK = self.dequantise(weight)
        if residual_TO is not None and weight.streams and bias_N is None and activation is None:
            return residual_TO.addmm_(x_TK, w_NK.t())  # the BLAS adds as it stores
        return finish(linear(x_TK, w_NK, bias_N, weight.place.exact), activation, residual_TO, weight.place)

    def sums(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, bias_N: torch.Tensor | None,
        normed_TK: torch.Tensor, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        rows = x_TK.shape[0]
        if not weight.streams or rows > MAX_ROWS:
            return self.product(weight, x_TK, norm=norm, bias_N=bias_N, normed_TK=normed_TK)
        # The config is that of the gated product: other splits would have other bits.
        product, x_TK = self._few(weight, x_TK, norm, normed_TK, True)
        y_TN = x_TK.new_empty((rows, weight.num_outputs), dtype=torch.float32)
        return product(x_TK, bias_N=bias_N, out_TO=y_TN)

    def _few(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, normed_TK: torch.Tensor | None, gated: bool
    ) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """The kernel for few rows that takes these codes, and the rows that it reads."""
        w, rows = self.coded(weight), x_TK.shape[0]
        config = nibble_gemv.choose(rows, weight.num_outputs, w, gated)
        if config is not None:
            return partial(nibble_gemv.nibble_gemv, w=w, config=config), normed(x_TK, norm, normed_TK)
        x_TK, parameters = with_norm(x_TK, norm, normed_TK)
        config = choose(rows, weight.num_outputs, w, gated)
        return partial(codes_gemv, w=w, config=config, norm=parameters), x_TK

    def grouped(self, weight: Weight, pairs: float) -> Experts:
        w = self.coded(weight)
        streamed = weight.streams and pairs <= STREAMED_PAIRS and w.layout in SERVED
        return w if streamed else self.dequantise(weight)

    def groups(self, num_inputs: int) -> int:
        """The groups of a row. Raises ConfigError where the inputs are no multiple of a group."""
        group = self.group or num_inputs
        whole = self.block or group
        if num_inputs % whole or num_inputs % 2:
            raise ConfigError(
                f"the weight format '{self.name}' has groups of {whole} inputs, which {num_inputs} inputs of a matrix "
                "are no multiple of. Use a checkpoint with smaller groups, or with scales by channel."
            )
        return num_inputs // group


class IntegerFormat(CodeFormat):
    """Integers whose groups are an option of the format's Config, ``group``."""

    native = True
    code_planes = (MATRIX,)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.group not in GROUPS:
            choices = ", ".join(map(str, GROUPS))
            raise ConfigError(f"{self.name}: group is {config.group}; there are {choices} (0: by channel)")
        self.group = config.group


def packed(name: str, rows: int, columns: int) -> Plane:
    """A plane of bytes that each hold the codes of several inputs, or some bits of them."""
    return Plane(name, rows, columns, torch.uint8, types=("U8",), random=(0, 256))


def usual(num_inputs: int) -> float:
    """The largest of random weights with variance 1 / inputs, as a plain model's dummy weights have it."""
    return (3.0 / num_inputs) ** 0.5


def compressed(kind: str, bits: int, group: int, ignore: list[str], **weights: Any) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint of compressed-tensors. ``group`` 0: scales by channel."""
    size = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **size, **weights}
    module = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": module},
        "ignore": ignore,
    }


def codes_of(weight: Weight) -> torch.Tensor:
    """The plane of codes."""
    return weight.planes[MATRIX]
