"""FP8 weights: codes of E4M3 with a scale for each channel, or for each block of 128 x 128. Lossy.

A product of up to 256 rows streams the codes and computes with exactly the dequantised weights. Products of more rows
dequantise the matrix into scratch memory. With ``--activation-dtype fp8``, products of more than 16 rows (64 where
scales go by blocks) quantise these as well, in the pass that applies the norm, and multiply on FP8 tensor cores. On a
CPU, and in exact mode, a product dequantises a tile of outputs at a time; no copy is kept.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir import tuned
from kvasir.errors import ConfigError
from kvasir.kernels import f8, f8_matmul
from kvasir.kernels.f8 import E4M3, F8, LARGEST
from kvasir.kernels.f8_gemv import LAUNCH_ROWS, choose, f8_gemv
from kvasir.kernels.gemv import Config as Launch
from kvasir.layers.norm import RMSNorm
from kvasir.layers.products import finish, linear, normed
from kvasir.layers.weight_format import MATRIX, Plane, Weight, WeightFormat

SCALE = "scale"
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
# With --activation-dtype fp8: rows of a product up to which they are not quantised where the weights have a scale a
# channel, and up to which the kernel for few rows multiplies them.
ROWS_AS_THEY_ARE, CODED_ROWS = tuned.F8_ROWS.value
TILE_WEIGHTS = 1 << 20  # that are dequantised at a time on a CPU: 4 MiB, about a core's own cache


@dataclass(frozen=True)
class Config:
    """``scale``: one for each output (channel), or for each ``block`` outputs x ``block`` inputs."""

    scale: Literal["channel", "block"] = "channel"
    block: int = 128

    def __post_init__(self) -> None:
        if not 16 <= self.block <= 1024 or self.block & (self.block - 1):
            raise ConfigError(f"f8:block={self.block}: expected a power of two from 16 to 1024; 128 is usual")


class Eight(WeightFormat):
    """One byte a weight."""

    exact = False
    also = ("fp8",)

    @property
    def block(self) -> int:
        """Outputs and inputs of a block of scales; 0: a scale a channel."""
        return self.config.block if self.config.scale == "block" else 0

    def planes(self, widths: tuple[int, ...], num_inputs: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        outputs, bound = sum(widths), (3.0 / num_inputs) ** 0.5
        codes = Plane(MATRIX, outputs, num_inputs, E4M3, types=("F8_E4M3",), random=(-LARGEST, LARGEST))
        numbers = {"types": SCALE_TYPES, "random": (bound / LARGEST, bound / LARGEST)}
        if not self.block:
            return codes, Plane(SCALE, outputs, None, torch.float32, **numbers)
        if any(width % self.block for width in widths[:-1]):
            raise ConfigError(
                f"f8 in blocks of {self.block}: a product of {' + '.join(map(str, widths))} outputs would have blocks "
                "that two of its matrices share. Use a checkpoint with a scale a channel, or the unquantised one with "
                "--weights f8"
            )
        rows, columns = (-(-size // self.block) for size in (outputs, num_inputs))
        return codes, Plane(SCALE, rows, columns, torch.float32, self.block, **numbers)

    def quantise(self, w_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        made = f8.quantise(w_NK, self.block)
        return {MATRIX: made.codes, SCALE: made.scale}

    def stored_as(self, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = planes[SCALE]
        own = {"weight_scale_inv": scale} if self.block else {"weight_scale": scale[:, None]}
        return {MATRIX: planes[MATRIX]} | own

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        if self.block:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.block, self.block],
                "modules_to_not_convert": ignore,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": number | {"strategy": "channel", "dynamic": False},
            "input_activations": number | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }

    def dequantise(self, weight: Weight) -> torch.Tensor:
        return f8.dequantise(self._of(weight), weight.place.dtype)

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
        place, w, rows = weight.place, self._of(weight), x_TK.shape[0]
        if weight.streams and LAUNCH_ROWS < rows <= self._most(weight, x_TK):  # twice: less than dequantising takes
            first, last = self._halves(x_TK, residual_TO)
            how = {"norm": norm, "bias_N": bias_N, "activation": activation}
            parts = [self.product(weight, x, residual_TO=residual, **how) for x, residual in (first, last)]
            return torch.cat(parts) if residual_TO is None else residual_TO
        if weight.streams and rows <= self._most(weight, x_TK):
            x, config, how = self._few(weight, x_TK, norm, normed_TK, activation is not None)
            return f8_gemv(x, w, config, bias_N=bias_N, activation=activation, residual_TO=residual_TO, **how)
        if self._codes_rows(weight, x_TK):
            x, parameters = self._normed(x_TK, norm, normed_TK)
            y_TN = f8_matmul.f8_matmul(x, w, norm=parameters)
            y_TN = y_TN if bias_N is None else y_TN.add_(bias_N)
            return finish(y_TN, activation, residual_TO, place)
        x_TK = normed(x_TK, norm, normed_TK)
        if x_TK.is_cuda:
            w_NK = f8.dequantise(w, x_TK.dtype)
            if residual_TO is not None and bias_N is None and activation is None and not place.exact:
                return residual_TO.addmm_(x_TK, w_NK.t())  # the BLAS adds as it stores
            y_TN = linear(x_TK, w_NK, bias_N, place.exact)
        else:
            y_TN = self._by_tiles(w, x_TK, place.exact)
            y_TN = y_TN if bias_N is None else y_TN.add_(bias_N)
        return finish(y_TN, activation, residual_TO, place)

    def sums(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, bias_N: torch.Tensor | None,
        normed_TK: torch.Tensor, activation: str,
    ) -> torch.Tensor:  # fmt: skip
        w, rows = self._of(weight), x_TK.shape[0]
        if not weight.streams or rows > min(LAUNCH_ROWS, self._most(weight, x_TK)):
            return self.product(weight, x_TK, norm=norm, bias_N=bias_N, normed_TK=normed_TK)
        y_TN = x_TK.new_empty((rows, w.codes.shape[0]), dtype=torch.float32)
        x, config, how = self._few(weight, x_TK, norm, normed_TK, True)
        return f8_gemv(x, w, config, bias_N=bias_N, out_TO=y_TN, **how)

    def grouped(self, weight: Weight, pairs: float) -> torch.Tensor | F8:
        # The kernels of experts take whole blocks, and steps of up to 128 inputs within one.
        sizes = weight.num_outputs, weight.num_inputs
        whole = not self.block or self.block >= 128 and not any(size % self.block for size in sizes)
        return self._of(weight) if weight.streams and whole else self.dequantise(weight)

    def _few(
        self, weight: Weight, x_TK: torch.Tensor, norm: RMSNorm | None, normed_TK: torch.Tensor | None, gated: bool
    ) -> tuple[torch.Tensor, Launch, dict[str, Any]]:
        """The rows, config and options of a product of few rows: of those as they are, or of their codes. With a scale
        for each block of a row, codes gain nothing."""
        w, rows = self._of(weight), x_TK.shape[0]
        coded = not self.block and rows > ROWS_AS_THEY_ARE and self._codes_rows(weight, x_TK)
        config = choose(rows, *w.codes.shape, w.block, gated, coded)
        x, parameters = self._normed(x_TK, norm, normed_TK)
        if coded:
            codes, scale = f8.quantise_rows(x, w.block or x.shape[1], norm=parameters)
            return codes, config, {"x_scale": scale, "dtype": x_TK.dtype}
        if config.block_n < 16:  # the kernel for one row applies the norm itself
            return x, config, {"norm": parameters}
        return x if parameters is None else norm(x), config, {}

    @staticmethod
    def _normed(
        x_TK: torch.Tensor, norm: RMSNorm | None, normed_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """Rows, and the norm that is left to what reads them."""
        if norm is None or normed_TK is not None:
            return x_TK if norm is None else normed_TK, None
        return x_TK, norm.parameters

    def _codes_rows(self, weight: Weight, x_TK: torch.Tensor) -> bool:
        """Whether products of more rows than ``ROWS_AS_THEY_ARE`` quantise them for FP8 tensor cores."""
        fits = f8_matmul.fits(x_TK.dtype, x_TK.device, self._of(weight))
        return weight.streams and weight.place.activations == "fp8" and fits

    def _most(self, weight: Weight, x_TK: torch.Tensor) -> int:
        """Most rows of a product that streams the codes: beyond, the libraries for quantised rows are quicker, and
        others repay a dequantised matrix."""
        return CODED_ROWS if self._codes_rows(weight, x_TK) else 2 * LAUNCH_ROWS

    @staticmethod
    def _halves(x_TK: torch.Tensor, residual_TO: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Rows of two launches, with their parts of the residual."""
        rows = slice(None, LAUNCH_ROWS), slice(LAUNCH_ROWS, None)
        return [(x_TK[part], None if residual_TO is None else residual_TO[part]) for part in rows]

    def _of(self, weight: Weight) -> F8:
        if weight.made is None:
            weight.made = F8(weight.planes[MATRIX], weight.planes[SCALE], self.block)
        return weight.made

    def _by_tiles(self, w: F8, x_TK: torch.Tensor, exact: bool) -> torch.Tensor:
        """x W^T [T, N], a tile of whole blocks of outputs at a time."""
        outputs, inputs = w.codes.shape
        y_TN, step = x_TK.new_empty(x_TK.shape[0], outputs), w.block or 1
        tile = max(1, TILE_WEIGHTS // inputs // step) * step
        for first in range(0, outputs, tile):
            rows = slice(first, first + tile)
            scale = w.scale[first // step : -(-(first + tile) // step)]
            part = f8.dequantise_reference(F8(w.codes[rows], scale, w.block), x_TK.dtype)
            y_TN[:, rows] = linear(x_TK, part, exact=exact)
        return y_TN
