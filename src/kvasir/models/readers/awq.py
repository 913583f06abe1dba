"""AWQ (arXiv 2306.00978): 4-bit codes packed along outputs, with zero points and scales by group of inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir.models.quantisation import Reader, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

ENDS = {"weight": ".qweight", "scale": ".scales", "zero": ".qzeros"}


class AWQ(Reader):
    """Serves 4 bits in the layout ``gemm``, which nearly all files have."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
        if bits != 4:
            self.refuse(f"bits {bits}")
        if version != "gemm":
            self.refuse(f"version '{version}'", "Use a file with version 'gemm'")
        if not config.get("zero_point", True):
            self.refuse("zero_point false")
        self.group = config.get("group_size", config.get("q_group_size", 128))
        self.kept = self.modules("modules_to_not_convert")

    def format_of(self, module: str) -> str | None:
        return None if module in self.kept else f"u4:group={max(0, self.group)},zeros=true"

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        if view.index or view.transposed:
            self.refuse(f"a part of a packed tensor ('{view.name}')")
        found = with_suffix(view, ENDS[plane])
        return View(found.name, transposed=plane == "scale")

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        from kvasir.models.repacked import AWQ_PLACES, awq_codes, zeros_by_group

        if plane == "weight":
            slot = awq_codes(slot)
        return tensor, zeros_by_group(slot, AWQ_PLACES) if plane == "zero" else slot
