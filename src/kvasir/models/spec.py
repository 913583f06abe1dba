"""A model as data: which layers, of what shape. Built from an HF config by the family's module; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec, NormSpec, RopeSpec
from kvasir.types import CacheGroup


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

    def __post_init__(self) -> None:
        assert self.rope.head_dim == self.mixer.head_dim, (
            f"RoPE of {self.rope.head_dim} for heads of {self.mixer.head_dim}"
        )

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
