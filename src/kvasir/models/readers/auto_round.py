"""AutoRound (arXiv 2309.05516): codes of 4 or 8 bits by group of inputs, packed as AutoGPTQ or AutoAWQ pack them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir import technique
from kvasir.models.quantisation import READERS, Reader
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

PREFIX = "auto_round:"


class AutoRound(Reader):
    """``packing_format`` says which other reader's layout it is; ``extra_config`` may leave modules unquantised."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        given = str(config.get("packing_format"))
        packing = given.removeprefix(PREFIX).removeprefix("auto_")
        if packing not in ("gptq", "awq") or not given.startswith(PREFIX):
            self.refuse(f"packing_format '{given}'", "Use a file packed as auto_gptq or auto_awq")
        if (kind := config.get("data_type", "int")) != "int":
            self.refuse(f"data_type '{kind}'")
        extra, bits = config.get("extra_config") or {}, config.get("bits", 4)
        for module, changes in extra.items():
            if changes.get("bits", bits) < 16 and any(config.get(key) != value for key, value in changes.items()):
                self.refuse(f"extra_config of '{module}', which differs from other modules,")
        plain = [module for module, changes in extra.items() if changes.get("bits", bits) >= 16]
        inner = {"bits": bits, "group_size": config.get("group_size", 128), "sym": config.get("sym", True)}
        self._inner = technique.find(READERS, packing, Reader)[0](inner | {"modules_to_not_convert": plain})
        self.unread, self.zeros = self._inner.unread, self._inner.zeros

    def format_of(self, module: str) -> str | None:
        return self._inner.format_of(module)

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        return self._inner.stored(view, plane, names)

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        return self._inner.fit(plane, tensor, slot)

    def check(self, tensor: Stored) -> None:
        self._inner.check(tensor)
