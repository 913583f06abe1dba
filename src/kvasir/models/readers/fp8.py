"""Checkpoints of fp8: E4M3 in blocks (DeepSeek, Qwen), or with one scale a tensor (vLLM's own).

With ``weight_block_size`` a matrix has ``weight_scale_inv`` [N / 128, K / 128], which multiplies its codes in spite of
its name, else ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir.models.quantisation import SUFFIX, Reader, fit_scale, scale_of, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

SCALES = (".weight_scale_inv", ".weight_scale")


class FP8(Reader):
    """One format for all modules that are not ignored."""

    activations = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        kind = config.get("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            self.refuse(f"fmt '{kind}'")
        self.block = 0
        if (size := config.get("weight_block_size")) is not None:
            if not isinstance(size, list | tuple) or len(size) != 2 or size[0] != size[1]:
                self.refuse(f"weight_block_size {size}")
            self.block = int(size[0])
        self.ignore = self.modules("modules_to_not_convert", "ignored_layers")

    def format_of(self, module: str) -> str | None:
        if module in self.ignore:
            return None
        return f"f8:scale=block,block={self.block}" if self.block else "f8"

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        if plane == "weight":
            return view
        module = view.name.removesuffix(SUFFIX)
        suffix = next((s for s in SCALES if module + s in names), SCALES[not self.block])
        return scale_of(with_suffix(view, suffix), self.block, whole=True)

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        return fit_scale(tensor, slot) if plane == "scale" else (tensor, slot)
