"""The seam of readers: what ``quantization_config`` says about a checkpoint's weights.

A reader is one module in `kvasir/models/readers/`, named as its ``quant_method``. It refuses what is not served by
name, says in which weight format (`kvasir.layers.weight_format`) a module's matrix is kept, and which stored tensor
fills each plane of it. Needs no torch; the formats themselves do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.models import advice
from kvasir.models.patterns import ModuleList
from kvasir.models.stored import View
from kvasir.technique import Technique

if TYPE_CHECKING:
    from kvasir.layers.weights import Slot
    from kvasir.models.fill import Stored

READERS = "kvasir.models.readers"
SUFFIX = ".weight"
# Tensors of activations and of the KV cache, which are not read: activations get scales of their own, row by row.
UNREAD = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")


class Reader(Technique):
    """The reader of one ``quant_method``. ``config``: the contents of ``quantization_config``; a reader raises
    ConfigError from ``__init__`` for what is not served, and ignores nothing that changes the result.

    ``unread``: ends of names of tensors that are not read, and are logged. ``zeros``: ends of names of tensors that are
    not read where the model has no place for them, and must hold zeros. ``activations``: what the checkpoint was made
    for."""

    affects_kv = True
    unread: ClassVar[tuple[str, ...]] = UNREAD
    zeros: ClassVar[tuple[str, ...]] = ()
    activations: Literal["bf16", "fp8"] = "bf16"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = config

    @abstractmethod
    def format_of(self, module: str) -> str | None:
        """The weight format, with its options, of the module of this name in the checkpoint (``model.layers.0.mlp.
        up_proj``); None: its weight is not quantised."""

    @abstractmethod
    def stored(self, view: View, plane: str, names: Collection[str]) -> View:
        """The part of a stored tensor that fills a plane of the weight which ``view`` would fill if it were plain.
        ``names``: those of all stored tensors."""

    def fit(self, plane: str, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        """A stored tensor and the slot of the plane that it fills, so that their shapes are the same."""
        return tensor, slot

    def fit_plain(self, tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
        """The same for a slot of plain weights."""
        return tensor, slot

    def check(self, tensor: Stored) -> None:
        """Look into a tensor that is not read. Raises ConfigError where its content changes the result."""

    def modules(self, *fields: str, globs: bool = False) -> ModuleList:
        """The modules that the lists in ``fields`` name together. ``globs``: also by wildcards. Raises ConfigError."""
        where = f"config.json: quantization_config.{fields[0]}"
        given = [self.given.get(field) or [] for field in fields]
        if not all(isinstance(entries, (list, tuple)) for entries in given):
            raise ConfigError(f"{where} is not a list of names of modules")
        return ModuleList([entry for entries in given for entry in entries], where, globs)

    def refuse(self, what: str, instead: str = "") -> None:
        """Raise ConfigError that says what of this checkpoint is not served."""
        instead = instead or advice.dequantize(self.name)
        method = self.name.replace("_", "-")
        raise ConfigError(
            f"config.json: quantization_config (quant_method '{method}'): {what} is not served. {instead}"
        )


def reader_of(config: Mapping[str, Any]) -> Reader | None:
    """The reader of a checkpoint, by its config.json; None: its weights are plain. Raises ConfigError for a method, or
    a part of one, that is not served."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        given = part.get("quantization_config") or part.get("compression_config")
        if not given:
            continue
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
        if isinstance(given, Mapping) and (given.get("load_in_4bit") or given.get("load_in_8bit")):
            method = given.get("quant_method", "bitsandbytes")
        name = str(method).replace("-", "_")
        if not isinstance(given, Mapping) or name not in technique.names(READERS):
            raise ConfigError(
                f"config.json: quantization_config (quant_method '{method}') is not served; served are "
                f"{', '.join(technique.names(READERS))}. {advice.dequantize(str(method))}"
            )
        return technique.find(READERS, name, Reader)[0](given)
    return None


def with_suffix(view: View, suffix: str) -> View:
    """The same part of another tensor of the module: ``.weight`` becomes ``suffix``."""
    return replace(view, name=view.name.removesuffix(SUFFIX) + suffix)


def scale_of(view: View, block: int, whole: bool = False) -> View:
    """The scales of a part of a matrix: of its rows, or with a ``block`` of whole blocks of its rows and columns.
    ``whole``: one scale for all of the matrix, which every part of it reads."""
    if not block:
        count = sum(isinstance(pick, int) for pick in view.index[:1])
        return replace(view, index=view.index[: count if whole else count + 1], transposed=False)
    return replace(view, index=tuple(pick if isinstance(pick, int) else _blocks(pick, block) for pick in view.index))


def _blocks(rows: slice, block: int) -> slice:
    """The blocks of some consecutive rows that begin with a block."""
    start, stop, step = rows.start or 0, rows.stop, rows.step or 1
    if start % block or step != 1 or (stop or 0) % block:
        raise ConfigError(f"rows {start} to {stop} of a fused tensor are not whole blocks of {block}")
    return slice(start // block, None if stop is None else stop // block)


def fit_scale(tensor: Stored, slot: Slot) -> tuple[Stored, Slot]:
    """A tensor of scales with the slot that it fills. Scales of channels may be stored as [N, 1], and one scale of a
    whole tensor fills all its channels."""
    shape = tensor.shape
    if slot.target.dim() == 1 and math.prod(shape) == 1:
        return replace(tensor, shape=()), replace(slot, repeat=True)
    if slot.target.dim() == 1 and len(shape) > 1 and shape[-1] == 1:
        return replace(tensor, shape=shape[:-1]), slot
    return tensor, slot
