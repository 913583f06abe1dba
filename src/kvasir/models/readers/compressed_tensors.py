"""Checkpoints of compressed-tensors: float-quantized (E4M3 by tensor, channel or block), by groups of modules.

Activations are quantised row by row, whatever scale the checkpoint has for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir.models.quantisation import Reader, fit_scale, ignored, scale_of, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

SERVED = ("float-quantized", "naive-quantized")
TENSOR, CHANNEL = -1, 0  # what a scale is for, in place of the size of its block


class CompressedTensors(Reader):
    """The formats of ``config_groups``, by what their ``targets`` name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for field in ("sparsity_config", "transform_config"):
            given = config.get(field)
            if isinstance(given, Mapping) and given and given.get("format") != "dense":
                self.refuse(f"{field} ({given.get('format', 'transforms')})")
        self.ignore = list(config.get("ignore") or ())
        self.groups: list[tuple[list[str], int, bool]] = []  # targets, block of scales, whether activations are FP8
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            self.refuse("a checkpoint without config_groups")
        for name, group in groups.items():
            self.groups.append(self._group(name, group, group.get("format") or config.get("format")))
        if all(by_row for *_, by_row in self.groups):
            self.activations = "fp8"

    def _group(self, name: str, group: Mapping[str, Any], kind: Any) -> tuple[list[str], int, bool]:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        if kind not in SERVED:
            self.refuse(f"format '{kind}' of {name}")
        if weights.get("type") != "float" or weights.get("num_bits") != 8:
            self.refuse(f"weights of {weights.get('num_bits')} bits and type '{weights.get('type')}' in {name}")
        if weights.get("symmetric") is False:
            self.refuse(f"weights with zero points in {name}")
        if group.get("output_activations"):
            self.refuse(f"quantised output activations in {name}")
        strategy, block = weights.get("strategy"), TENSOR if weights.get("strategy") == "tensor" else CHANNEL
        if strategy == "block":
            size = weights.get("block_structure")
            size = [int(n) for n in size.split("x")] if isinstance(size, str) else size
            if not isinstance(size, list | tuple) or len(size) != 2 or size[0] != size[1]:
                self.refuse(f"block_structure {size} of {name}")
            block = int(size[0])
        elif strategy not in ("tensor", "channel"):
            self.refuse(f"strategy '{strategy}' of {name}")
        by_row = bool(inputs) and inputs.get("type") == "float" and inputs.get("num_bits") == 8
        if inputs and not by_row:
            self.refuse(f"activations of {inputs.get('num_bits')} bits and type '{inputs.get('type')}' in {name}")
        return list(group.get("targets") or ()), block, by_row

    def format_of(self, module: str) -> str | None:
        block = None if ignored(module, self.ignore) else self._block(module)
        return None if block is None else f"f8:scale=block,block={block}" if block > 0 else "f8"

    def _block(self, module: str) -> int | None:
        """The block of the module's scales; None: no group has it. Names go before classes: "Linear" stands for every
        matrix."""
        for targets, block, _ in self.groups:
            if any(re.match(t[3:], module) if t.startswith("re:") else ignored(module, (t,)) for t in targets):
                return block
        return next((block for targets, block, _ in self.groups if "Linear" in targets), None)

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        if plane == "weight":
            return view
        block = self._block(view.name.removesuffix(".weight"))
        return scale_of(with_suffix(view, ".weight_scale"), max(block or 0, 0), whole=block == TENSOR)

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        return fit_scale(tensor, slot) if plane == "scale" else (tensor, slot)
