"""Quantise a checkpoint's matrices, and write them as vLLM and transformers read them. Lossy.

The head, the embedding and routers keep their type. One tensor is held at a time. ``--weights`` quantises at loading
instead, which reads the whole checkpoint at every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError
from kvasir.models.families import find_family
from kvasir.models.stored import view_of

if TYPE_CHECKING:
    from kvasir.convert.converter import Tensors
    from kvasir.layers.weight_format import WeightFormat

SUFFIX = ".weight"


@dataclass(frozen=True)
class Config:
    """``format``: the weight format, whose options follow with colons: ``u4:group=32:zeros=true``. ``scale``: its
    option of that name (empty: its default)."""

    format: str = "f8"
    scale: str = ""


class Quantise(Converter):
    """The same model with quantised matrices."""

    exact = False
    result = "the model with quantised weights"

    def check(self, source: Source) -> None:
        import torch

        from kvasir.layers import weight_format
        from kvasir.layers.weight_format import PLAIN, load_format
        from kvasir.layers.weights import Placement
        from kvasir.models.decoder import Decoder
        from kvasir.models.formats import Quantising

        name, *options = self.config.format.split(":")
        options += [f"scale={self.config.scale}"] if self.config.scale else []
        spec = ":".join([name, ",".join(options)] if options else [name])
        self.format: WeightFormat = load_format(spec)
        if self.format.name == PLAIN:
            raise ConfigError("quantise:format=plain changes nothing: name a format such as f8")
        if type(self.format).stored_as is weight_format.WeightFormat.stored_as:
            raise ConfigError(
                f"quantise: checkpoints in {self.format.name} are read and not written. Name another one, e.g. f8."
            )
        place = Placement(torch.device("meta"), torch.float32, formats=Quantising(spec))
        decoder = Decoder(source.spec, place, num_positions=1)
        family = find_family(source.spec.family)
        self.quantised: set[str] = set()
        kept = set()
        for name, slot in decoder.slots().items():
            if "/" in name or not name.endswith(SUFFIX):
                continue
            view = view_of(family.stored(name, source.spec))
            if slot.whole is not None and (view.transposed or any(isinstance(pick, int) for pick in view.index)):
                raise ConfigError(
                    f"quantise: '{view.name}' holds the matrices of all experts, which no served checkpoint stores "
                    f"quantised to {self.format.name}. Serve it with --weights {spec} instead."
                )
            (self.quantised if slot.whole is not None else kept).add(source.own_name(view.name))
        kept = {name for name in kept if "norm" not in name and "embed" not in name}
        self.ignore = sorted({"lm_head", *(name.removesuffix(SUFFIX) for name in kept)})

    def edit_config(self, source: Source) -> dict[str, Any]:
        return source.config | {"quantization_config": self.format.quantization_config(self.ignore)}

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        for name, tensor in tensors:
            if name in self.quantised:
                module = name.removesuffix(SUFFIX)
                for suffix, part in self.format.stored_as(self.format.quantise(tensor)).items():
                    yield f"{module}.{suffix}", part
            else:
                yield name, tensor
