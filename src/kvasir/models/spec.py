"""A model as data: which layers, of what shape. Built from an HF config by the family's module; needs no torch.

A family is one module in ``models/families``, named as its ``model_type``. It gives ``ARCHITECTURES`` (the class names it
serves), ``build(fields) -> ModelSpec`` and ``stored_name(slot) -> str`` (the checkpoint's name of each of our weight slots).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from kvasir import technique
from kvasir.errors import ConfigError, nearest
from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec, NormSpec, RopeSpec
from kvasir.types import CacheGroup

FAMILIES = "kvasir.models.families"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block of the residual stream. ``norms``: ``pre`` (a norm before mixer and ffn) or ``sandwich`` (and one after each,
    as in Gemma). ``cache_of``: the earlier layer whose keys and values this one reads instead of writing its own."""

    mixer: GQASpec
    ffn: DenseSpec | MoESpec
    rope: RopeSpec
    norm: NormSpec
    norms: Literal["pre", "sandwich"] = "pre"
    cache_of: int | None = None

    @property
    def cache_group(self) -> str:
        return "full" if self.mixer.window is None else f"window-{self.mixer.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """``embed_scale`` multiplies the embeddings; logits are ``logit_scale`` * head, then capped at +-``logit_softcap`` by a
    tanh. ``max_position``: positions the model was made for. ``tied``: the head is the embedding matrix."""

    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers that share a page pool: all with full attention, and all with the same window, in order of appearance."""
        members: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.cache_of is None:
                members.setdefault(layer.cache_group, []).append(i)
        groups = []
        for name, layers in members.items():
            mixers = [self.layers[i].mixer for i in layers]
            shapes = {(m.num_kv_heads, m.head_dim) for m in mixers}
            assert len(shapes) == 1, f"cache group '{name}' mixes the shapes {shapes}"
            groups.append(CacheGroup(name, tuple(layers), *shapes.pop(), mixers[0].window))
        return tuple(groups)


def find_family(model_type: str) -> ModuleType:
    """The family's module. Raises ConfigError with the families that are served."""
    choices = technique.names(FAMILIES)
    if model_type not in choices:
        raise ConfigError(f"config.json: model_type '{model_type}' is not served; served are {', '.join(choices)}.{nearest(model_type, choices)}")
    return importlib.import_module(f"{FAMILIES}.{model_type}")


def build_spec(config: dict[str, Any]) -> ModelSpec:
    """The layers of an HF config (as ``checkpoint.read_config`` returns it). Raises ConfigError naming the field."""
    from kvasir.models.fields import Fields

    fields = Fields(config)
    family = find_family(fields.text("model_type"))
    names = fields.names("architectures", ())
    if names and not set(names) & set(family.ARCHITECTURES):
        raise ConfigError(f"config.json: architectures {', '.join(names)} is not served; of model_type '{config['model_type']}' served is "
                          f"{', '.join(family.ARCHITECTURES)} (text generation)")
    return family.build(fields)
