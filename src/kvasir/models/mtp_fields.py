"""Names of the tensors of an MTP layer, which predicts a further token: one table of names for each family that
publishes one. Needs no torch.

DeepSeek V3 (arXiv 2412.19437, section 2.2) stores the layer behind the model's last one, and most families after it do
the same. The Qwen family stores it apart, as ``mtp.*``. A family that has such a layer says so by ``MTP``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import ModuleType

from kvasir.errors import ConfigError
from kvasir.models.spec import LayerSpec, ModelSpec, MTPSpec
from kvasir.models.stored import View, view_of

# What the slots of an MTP layer other than those of its decoder layer begin with.
PREFIX = "mtp."
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The modules of a family's MTP layer. ``{n}`` stands for the number of the model's layers.

    ``layer``: what the names of its decoder layer begin with; the rest of each name is that of the model's own layers.
    ``embed_norm``, ``hidden_norm``: norms of the two inputs; ``proj`` [E, 2 E]: the product that joins them; ``norm``:
    the last norm. ``embed``, ``head``: copies of the embedding and of the output matrix ("": none is stored).
    ``hidden_first``: ``proj`` takes the hidden state before the embedding. ``count``: the field of config.json that
    says how many such layers there are."""

    layer: str
    embed_norm: str
    hidden_norm: str
    proj: str
    norm: str
    embed: str = ""
    head: str = ""
    hidden_first: bool = False
    count: str = "num_nextn_predict_layers"

    def at(self, num_layers: int) -> MTPNames:
        """The same names for a model of so many layers."""
        fields = ("layer", "embed_norm", "hidden_norm", "proj", "norm", "embed", "head")
        return replace(self, **{field: getattr(self, field).format(n=num_layers) for field in fields})

    def stored(self, slot: str) -> str:
        """The tensor of one of the slots ``mtp.*``."""
        return getattr(self, slot.removeprefix(PREFIX).removesuffix(WEIGHT)) + WEIGHT

    def owns(self, name: str) -> bool:
        """Whether a tensor is a part of the layer that must be read."""
        if name in (self.embed + WEIGHT, self.head + WEIGHT):
            return False
        alone = (self.embed_norm, self.hidden_norm, self.proj, self.norm)
        return name.startswith(self.layer) or name.rpartition(".")[0] in alone


BEHIND = "model.layers.{n}."
# DeepSeek V3, and all that store the layer as it does.
DEEPSEEK = MTPNames(
    layer=BEHIND,
    embed_norm=BEHIND + "enorm",
    hidden_norm=BEHIND + "hnorm",
    proj=BEHIND + "eh_proj",
    norm=BEHIND + "shared_head.norm",
    embed=BEHIND + "embed_tokens",
    head=BEHIND + "shared_head.head",
)
# Qwen3-Next and Qwen 3.5 to 3.8.
QWEN = MTPNames(
    layer="mtp.layers.0.",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    proj="mtp.fc",
    norm="mtp.norm",
    count="mtp_num_hidden_layers",
)


def names_of(family: ModuleType, num_layers: int) -> MTPNames | None:
    """The names of a family's MTP layer behind so many layers; None: the family publishes none."""
    names: MTPNames | None = getattr(family, "MTP", None)
    return None if names is None else names.at(num_layers)


def finder(find: Callable[[str, ModelSpec], str | View | None], family: ModuleType, spec: ModelSpec):
    """A family's ``stored`` or ``stored_otherwise`` as a function of the slot alone, which knows the slots of an MTP
    layer that is loaded."""
    names, whole = names_of(family, len(spec.layers)), replace(spec, layers=spec.all_layers, mtp=None)
    behind = BEHIND.format(n=len(spec.layers))

    def view(slot: str) -> View | None:
        if slot.startswith(PREFIX):
            return View(names.stored(slot))
        found = find(slot, whole)
        found = None if found is None else view_of(found)
        if spec.mtp is None or found is None or not found.name.startswith(behind):
            return found
        return replace(found, name=names.layer + found.name.removeprefix(behind))

    return view


def layer_of(spec: ModelSpec) -> LayerSpec:
    """The decoder layer of an MTP layer: the attention of the model's last layer that attends, and experts where the
    model has some."""
    attends = next(layer for layer in reversed(spec.layers) if layer.mixer.cache_row() is not None)
    experts = (layer.ffn for layer in reversed(spec.layers) if layer.ffn.kind != "dense")
    return replace(attends, ffn=next(experts, attends.ffn))


def with_mtp(spec: ModelSpec, family: ModuleType, stored: Collection[str] | None) -> ModelSpec:
    """The model with its MTP layer, which shares embedding and output matrix. ``stored``: the checkpoint's tensors by
    the family's names (None: none are read). Raises ConfigError, which says what to do, where there is no such
    layer."""
    count = len(spec.layers)
    names = names_of(family, count)
    if names is None:
        raise ConfigError(
            f"--drafter mtp: no MTP layer is published with models of the family {spec.family}. Use --drafter suffix, "
            "which needs no weights, or train a drafter with `kvasir train drafter`."
        )
    if stored is not None and names.proj + WEIGHT not in stored:
        raise ConfigError(_absent(spec, family, names, stored))
    return replace(spec, mtp=MTPSpec(layer_of(spec), names.hidden_first))


def _absent(spec: ModelSpec, family: ModuleType, names: MTPNames, stored: Collection[str]) -> str:
    """The message for a checkpoint without the layer where it should be."""
    count = len(spec.layers)
    for other in range(count + 8):
        found = names_of(family, other)
        if found.proj != names.proj and found.proj + WEIGHT in stored:
            return (
                f"--drafter mtp: config.json has num_hidden_layers={count}, so that tensor '{names.proj + WEIGHT}' is "
                f"missing, but the checkpoint stores '{found.proj + WEIGHT}'. Set num_hidden_layers to {other}."
            )
    return (
        f"--drafter mtp: this checkpoint stores no MTP layer (tensor '{names.proj + WEIGHT}' is missing). Use a "
        "checkpoint that was published with it, or --drafter suffix, which needs no weights."
    )
