"""GPTQ (arXiv 2210.17323): codes of 4 or 8 bits packed along inputs, with scales and zero points by group of inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvasir.errors import ConfigError
from kvasir.models.compressed_codes import check_index
from kvasir.models.quantisation import UNREAD, Reader, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

ENDS = {"weight": ".qweight", "scale": ".scales", "zero": ".qzeros"}
INDEX, BIAS = ".g_idx", ".bias"  # AutoGPTQ stores a bias of zeros for matrices that have none


class GPTQ(Reader):
    """Serves groups of consecutive inputs: what ``desc_act`` false writes, or true with a sorted ``g_idx``."""

    zeros = (BIAS,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.bits, self.symmetric = config.get("bits", 4), config.get("sym", True)
        if self.bits not in (4, 8):
            self.refuse(f"bits {self.bits}")
        if self.bits == 8 and not self.symmetric:
            self.refuse("8 bits with zero points")
        if config.get("dynamic"):
            self.refuse("'dynamic', bits or groups that differ between modules,")
        layout = config.get("checkpoint_format", "gptq")
        if layout not in ("gptq", "gptq_v2"):
            self.refuse(f"checkpoint_format '{layout}'", "Use a file with checkpoint_format 'gptq'")
        # The first version of the format stores a zero point minus one.
        self.plus = 0 if layout == "gptq_v2" else 1
        self.group = max(0, config.get("group_size", 128))
        self.kept = self.modules("modules_to_not_convert")
        self.unread = (*UNREAD, INDEX, ENDS["zero"]) if self.symmetric else (*UNREAD, INDEX)

    def format_of(self, module: str) -> str | None:
        if module in self.kept:
            return None
        if self.bits == 8:
            return f"i8:group={self.group}"
        return f"u4:group={self.group}" + ("" if self.symmetric else ",zeros=true")

    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        if view.index or view.transposed:
            self.refuse(f"a part of a packed tensor ('{view.name}')")
        return View(with_suffix(view, ENDS[plane]).name, transposed=plane == "scale")

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        from kvasir.models.repacked import in_words, zeros_by_group

        if plane == "weight":
            return tensor, in_words(slot, signed=self.bits == 8)
        return tensor, zeros_by_group(slot, tuple(range(8)), self.plus) if plane == "zero" else slot

    def check(self, tensor: Stored) -> None:
        from kvasir.models.fill import read_tensor

        where = f"{tensor.file}: tensor '{tensor.name}'"
        check_index(tensor)
        if tensor.name.endswith(BIAS) and bool(read_tensor(tensor).any()):
            raise ConfigError(f"{where} is a bias that this model has no place for, and it is not zero")
        if tensor.name.endswith(ENDS["zero"]):
            half = 1 << self.bits - 1  # every zero point of a symmetric file
            word = sum((half - self.plus) << self.bits * i for i in range(32 // self.bits))
            if bool((read_tensor(tensor) != word - (word >> 31 << 32)).any()):
                raise ConfigError(
                    f"{where} holds zero points other than {half}, but config.json says sym true. Set sym to false in "
                    "quantization_config."
                )
