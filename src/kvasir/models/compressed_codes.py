"""Codes as compressed-tensors stores them: ``int-quantized``, ``pack-quantized`` and ``nvfp4-pack-quantized``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvasir.errors import ConfigError
from kvasir.models.quantisation import Reader, with_suffix
from kvasir.models.stored import View

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

KINDS = ("int-quantized", "pack-quantized", "nvfp4-pack-quantized")
INDEX = ".weight_g_idx"
# Tensors that are not read: the shape before packing, scales of activations, and the groups of inputs, which are
# checked to be sorted.
UNREAD = (".weight_shape", ".input_global_scale", ".input_zero_point", INDEX)
ENDS = {"scale": ".weight_scale", "zero": ".weight_zero_point", "tensor_scale": ".weight_global_scale"}


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The layout of one group's modules. ``format``: the weight format, with its options. ``bits`` of a code;
    ``packed``: several share a word."""

    format: str
    bits: int
    packed: bool

    def stored(self, view: View, plane: str) -> View:
        """The tensor that fills a plane of the weight which ``view`` would fill if it were plain."""
        if plane == "weight":
            return with_suffix(view, ".weight_packed") if self.packed else view
        found = with_suffix(view, ENDS[plane])
        if plane == "tensor_scale":
            return View(found.name)
        if plane == "zero" and view.index:
            raise ConfigError(f"'{found.name}' packs outputs, and a part of it is not served")
        return found

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        """The tensor and the slot of the plane, so that their shapes are the same."""
        from kvasir.models.repacked import as_words, divisor, offset_words, zeros_by_output

        if plane == "weight" and self.packed and not self.format.startswith("nvfp4"):
            return tensor, as_words(slot) if self.bits == 4 else offset_words(slot)
        if plane == "zero":
            return tensor, zeros_by_output(slot)
        if plane == "tensor_scale":  # stored so that codes times scales are divided by it
            return replace(tensor, shape=()), divisor(slot)
        if plane == "scale" and tensor.shape in ((), (1,)):  # of the whole tensor
            return replace(tensor, shape=(1,)), replace(slot, repeat=True)
        return tensor, slot


def layout_of(reader: Reader, name: str, group: Mapping[str, Any], kind: str) -> CodeLayout:
    """The layout of the group called ``name`` in ``config_groups``, of a ``kind`` of KINDS. Raises ConfigError for what
    is not served."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if kind == "nvfp4-pack-quantized":
        if bits != 4 or size != 16:
            reader.refuse(f"weights of {bits} bits in groups of {size} in {name}")
        return CodeLayout("nvfp4", 4, True)
    if weights.get("type") != "int":
        reader.refuse(f"weights of type '{weights.get('type')}' in {name}")
    if weights.get("actorder") in ("group", True):
        reader.refuse(f"actorder '{weights['actorder']}' of {name}: groups of scattered inputs")
    if inputs.get("symmetric") is False:
        reader.refuse(f"activations with zero points in {name}")
    if strategy not in ("tensor", "channel", "group"):
        reader.refuse(f"strategy '{strategy}' of {name}")
    options = f"group={size if strategy == 'group' else 0}"
    zeros, packed = weights.get("symmetric") is False, kind == "pack-quantized"
    if bits == 8:
        if zeros:
            reader.refuse(f"weights of 8 bits with zero points in {name}")
        return CodeLayout(f"i8:{options}", 8, packed)
    if bits != 4 or not packed:
        reader.refuse(f"{kind} weights of {bits} bits in {name}")
    return CodeLayout(f"u4:{options}" + (",zeros=true" if zeros else ""), 4, True)


def check_index(tensor: Stored) -> None:
    """Raise ConfigError unless the groups of inputs, if ``tensor`` holds them, are sorted."""
    from kvasir.models.fill import read_tensor

    if not tensor.name.endswith((INDEX, ".g_idx")):
        return
    found = read_tensor(tensor)
    if bool((found[1:] < found[:-1]).any()):
        raise ConfigError(
            f"{tensor.file}: tensor '{tensor.name}' is not sorted: groups of scattered inputs (desc_act) are not "
            "served. Use a file that was made with desc_act false."
        )
