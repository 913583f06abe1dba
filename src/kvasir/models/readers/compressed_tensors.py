"""Checkpoints of compressed-tensors: float-quantized (E4M3 by tensor, channel or block), by groups of modules.

Served: ``float-quantized``, whose activations are quantised row by row, whatever scale the checkpoint has for them, and
the codes of ``compressed_codes.py``, whose activations stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir.models.compressed_codes import KINDS, UNREAD, CodeLayout, check_index, layout_of
from kvasir.models.patterns import ModuleList
from kvasir.models.quantisation import UNREAD as ACTIVATIONS
from kvasir.models.quantisation import Reader, fit_scale, scale_of, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

SERVED = ("float-quantized", "naive-quantized")
TENSOR, CHANNEL = -1, 0  # what a scale is for, in place of the size of its block


class CompressedTensors(Reader):
    """The formats of ``config_groups``, by what their ``targets`` name."""

    unread = (*ACTIVATIONS, *UNREAD)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for field in ("sparsity_config", "transform_config"):
            given = config.get(field)
            if isinstance(given, Mapping) and given and given.get("format") != "dense":
                self.refuse(f"{field} ({given.get('format', 'transforms')})")
        self.ignore = self.modules("ignore")
        # Targets, codes or the block of scales of E4M3, and whether activations are FP8.
        self.groups: list[tuple[ModuleList, CodeLayout | int, bool]] = []
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            self.refuse("a checkpoint without config_groups")
        for name, group in groups.items():
            self.groups.append(self._group(name, group, group.get("format") or config.get("format")))
        if all(by_row for *_, by_row in self.groups):
            self.activations = "fp8"

    def _group(self, name: str, group: Mapping[str, Any], kind: Any) -> tuple[ModuleList, CodeLayout | int, bool]:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        where = f"config.json: quantization_config.config_groups.{name}.targets"
        targets = ModuleList(group.get("targets"), where)
        if kind in KINDS:
            return targets, layout_of(self, name, group, kind), False
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
        return targets, block, by_row

    def format_of(self, module: str) -> str | None:
        layout = None if module in self.ignore else self._layout(module)
        if isinstance(layout, CodeLayout):
            return layout.format
        return None if layout is None else f"f8:scale=block,block={layout}" if layout > 0 else "f8"

    def _layout(self, module: str) -> CodeLayout | int | None:
        """The module's codes, or the block of its scales, or what a scale is for; None: no group has it. Names go
        before classes: "Linear" stands for every matrix."""
        for targets, layout, _ in self.groups:
            if module in targets:
                return layout
        return next((layout for targets, layout, _ in self.groups if "Linear" in targets.names), None)

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        layout = self._layout(view.name.removesuffix(".weight"))
        if isinstance(layout, CodeLayout):
            return layout.stored(view, plane)
        if plane == "weight":
            return view
        return scale_of(with_suffix(view, ".weight_scale"), max(layout or 0, 0), whole=layout == TENSOR)

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        layout = self._layout(tensor.name.rpartition(".")[0])
        if isinstance(layout, CodeLayout):
            return layout.fit(plane, tensor, slot)
        return fit_scale(tensor, slot) if plane == "scale" else (tensor, slot)

    def check(self, tensor: Stored) -> None:
        check_index(tensor)
