"""NVIDIA's Model Optimizer: FP8 with a scale a tensor, and NVFP4, whose tensor scale is a factor.

(Compressed-tensors stores a divisor.) Older files say so in hf_quant_config.json, which ``checkpoint.read_config``
reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir.models.patterns import ModuleList
from kvasir.models.quantisation import Reader, fit_scale, scale_of, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

ENDS = {"weight": ".weight", "scale": ".weight_scale", "tensor_scale": ".weight_scale_2"}


class ModelOpt(Reader):
    """Serves ``quant_algo`` FP8 and NVFP4, whose activations stay in 16 bits."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        given = config.get("quantization") or config  # hf_quant_config.json nests it
        algorithm = str(given.get("quant_algo", "")).upper()
        if algorithm not in ("FP8", "NVFP4"):
            self.refuse(f"quant_algo '{algorithm}'")
        self.wide = algorithm == "FP8"
        if self.wide:
            self.activations = "fp8"
        elif (group := given.get("group_size", 16)) != 16:
            self.refuse(f"group_size {group}")
        field = "exclude_modules" if given.get("exclude_modules") else "ignore"
        self.kept = ModuleList(given.get(field) or (), f"config.json: quantization_config.{field}", globs=True)

    def format_of(self, module: str) -> str | None:
        return None if module in self.kept else "f8" if self.wide else "nvfp4"

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        found = with_suffix(view, ENDS[plane])
        if self.wide and plane == "scale":
            return scale_of(found, 0, whole=True)
        return View(found.name) if plane == "tensor_scale" else found

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        if self.wide and plane == "scale":
            return fit_scale(tensor, slot)
        if plane == "tensor_scale":
            return replace(tensor, shape=()), replace(slot, repeat=True)
        return tensor, slot
