"""MXFP4 as gpt-oss stores it: the experts' matrices in blocks of 32 inputs, everything else in bf16."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from kvasir.models.quantisation import Reader
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
ENDS = {"weight": "_blocks", "scale": "_scales"}


class MXFP4(Reader):
    """Serves all experts of a layer in one tensor, outputs before inputs."""

    def format_of(self, module: str) -> str | None:
        return self.name if module.endswith(EXPERTS) else None

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        index = (view.index[0], *view.index[2:]) if view.transposed else view.index  # bf16 files have inputs first
        return View(view.name + ENDS[plane], index)

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        if plane == "weight" and len(tensor.shape) == 4:  # experts, outputs, blocks, bytes of a block
            count, rows, blocks, size = tensor.shape
            return replace(tensor, shape=(count, rows, blocks * size)), slot
        return tensor, slot
