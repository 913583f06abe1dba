"""A model as data: its layers and their shapes. The family's module builds it from an HF config; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec, NormSpec, RopeSpec
from kvasir.types import CacheGroup


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block of the residual stream.

    ``norms``: ``pre`` (a norm before mixer and ffn) or ``sandwich`` (also one after each, as in Gemma). ``cache_of``:
    the earlier layer whose keys and values this one reads instead of writing its own.
    """

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
        """Name of the cache group that the layer belongs to."""
        return "full" if self.mixer.window is None else f"window-{self.mixer.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model.

    ``embed_scale`` multiplies the embeddings. Logits are ``logit_scale`` * head, then capped at +-``logit_softcap`` by
    a tanh. ``max_position``: number of positions that the model was made for. ``tied``: the head is the embedding
    matrix. ``labels``: the model pools, and has a head for so many classes (0: none) but none for tokens.
    """

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
    labels: int | None = None

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that share a page pool, in order of appearance: all layers with full attention, and all
        with the same window."""
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
