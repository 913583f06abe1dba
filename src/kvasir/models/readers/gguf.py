"""GGUF (llama.cpp): Q8_0, Q5_0, Q4_0, Q4_K and Q6_K blocks, and plain numbers.

``models/gguf_folder.py`` writes its config. A stored row is a row of blocks, and each plane is filled by some bytes of
every block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir.models.gguf_file import BLOCKS, PAIRED
from kvasir.models.quantisation import Reader
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

# Formats that hold the blocks of a type exactly.
FORMATS = {"Q8_0": "i8:group=32", "Q5_0": "i8:group=32", "Q4_0": "u4:group=32", "Q4_K": "q4_k", "Q6_K": "q6_k"}


class GGUF(Reader):
    """``types``: that of each module's blocks; modules without one are plain. ``paired``: rows of q and k are stored as
    llama.cpp rotates them, the halves of a head in turn."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.types: Mapping[str, str] = config.get("types") or {}
        self.paired: Mapping[str, int] = config.get("paired") or {}
        for module, kind in self.types.items():
            if kind not in FORMATS:
                self.refuse(f"{kind} ('{module}')", f"Use a file of {', '.join(FORMATS)}: Q8_0, Q4_0 or Q4_K_M")

    def format_of(self, module: str) -> str | None:
        return FORMATS.get(self.types.get(module, ""))

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        module = view.name.removesuffix(".weight")
        rows = 3 if self.paired and module.endswith(PAIRED) else 1  # dimensions; see ``gguf_file.tensors``
        return View(view.name, (*[slice(None)] * (rows + 1), BLOCKS[self.types[module]].planes[plane]))

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        from kvasir.models.gguf_blocks import part_of

        return tensor, part_of(plane, self._kind(tensor), tensor.shape, self._turned(tensor, slot))

    def fit_plain(self, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        from kvasir.models.gguf_blocks import numbers_of

        slot, kind = self._turned(tensor, slot), self._kind(tensor)
        return tensor, slot if kind is None else numbers_of(kind, tensor.shape, slot)

    def _kind(self, tensor: Stored) -> str | None:
        return self.types.get(tensor.name.removesuffix(".weight"))

    def _turned(self, tensor: Stored, slot: Slot) -> Slot:
        """The slot with its rows in the order of the file: heads, halves in turn."""
        if not self.paired or not tensor.name.rpartition(".")[0].endswith(PAIRED):
            return slot
        heads, half, _ = tensor.shape[:3]
        if slot.target.shape[0] != 2 * heads * half:  # told with the shapes
            return slot
        return replace(slot, target=slot.target.unflatten(0, (heads, 2, half)).transpose(1, 2))
