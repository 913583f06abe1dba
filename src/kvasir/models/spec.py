"""A model as data: its layers and their shapes. The family's module builds it from an HF config; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir.attention.backend import AttentionSpec
from kvasir.layers.spec import FFNSpec, LayerEmbeddingSpec, MixerSpec, NormSpec, RopeSpec
from kvasir.types import CacheGroup


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block of the residual stream.

    ``rope`` None: queries and keys are not rotated. ``norms``: ``pre`` (a norm before mixer and ffn), ``post`` (one
    after each, as in OLMo 2) or ``sandwich`` (both, as in Gemma). ``cache_of``: the earlier layer whose keys and values
    this one reads instead of writing its own. ``residual_scale``: a factor of what mixer and ffn add to the stream.
    ``embedding``: the layer also adds what it makes of its own embedding of the token. ``scaled``: a stored factor
    multiplies the stream after the layer.
    """

    mixer: MixerSpec
    ffn: FFNSpec
    rope: RopeSpec | None
    norm: NormSpec
    norms: Literal["pre", "post", "sandwich"] = "pre"
    cache_of: int | None = None
    residual_scale: float = 1.0
    embedding: LayerEmbeddingSpec | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        heads = self.mixer.attention()
        assert self.rope is None or heads is None or self.rope.head_dim <= heads.head_dim, (
            f"RoPE of {self.rope.head_dim} for heads of {heads.head_dim}"
        )
        assert self.residual_scale == 1 or self.norms == "pre", "a norm after a sublayer would undo the factor"

    @property
    def cache_group(self) -> str:
        """Name of the cache group that the layer belongs to."""
        if self.mixer.state():
            return "state"
        return "full" if self.mixer.window is None else f"window-{self.mixer.window}"

    def matrices(self, hidden: int) -> int:
        """Number of weights in matrices that every row is multiplied with; experts are counted apart."""
        own = self.mixer.matrices(hidden, self.cache_of is None) + self.ffn.matrices(hidden)
        return own if self.embedding is None else own + self.embedding.matrices(hidden)

    def vectors(self, hidden: int) -> int:
        """Number of other weights: norms, biases and scales; those of experts are among them."""
        norms = hidden * ((4 if self.norms == "sandwich" else 2) + (self.embedding is not None))
        return norms + self.scaled + self.mixer.vectors(hidden, self.cache_of is None) + self.ffn.vectors(hidden)


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """A layer behind the last one that predicts one token more (`kvasir.models.mtp`), where a drafter has asked for it.

    ``hidden_first``: the product that joins both inputs takes the hidden state before the embedding. ``own_embed``,
    ``own_head``: the layer has an embedding or an output matrix of its own, which differs from the model's."""

    layer: LayerSpec
    hidden_first: bool = False
    own_embed: bool = False
    own_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model.

    ``embed_scale`` multiplies the embeddings. Logits are ``logit_scale`` * head, then capped at +-``logit_softcap`` by
    a tanh. ``max_position``: number of positions that the model was made for. ``tied``: the head is the embedding
    matrix. ``labels``: the model pools, and has a head for so many classes (0: none) but none for tokens.
    ``base_family``: the family whose tensors a converted model keeps by name (None: it is its own). ``mtp``: the layer
    that predicts a further token, whose place is that after the last layer (None: it is not loaded).
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
    base_family: str | None = None
    mtp: MTPSpec | None = None

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the model, and behind them the one that predicts a further token, if it is loaded."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp.layer)

    @property
    def layer_embedding(self) -> LayerEmbeddingSpec | None:
        """The embeddings of a token for each layer; all layers have them or none."""
        return self.layers[0].embedding if self.layers else None

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that share a page pool, in order of appearance: all layers with full attention, and all
        with the same window; then all with a state."""
        members: dict[str, list[int]] = {}
        for i, layer in enumerate(self.all_layers):
            if layer.cache_of is None and (layer.mixer.cache_row() is not None or layer.mixer.state()):
                members.setdefault(layer.cache_group, []).append(i)
        groups = [self._group(name, members[name]) for name in members]
        return tuple(sorted(groups, key=lambda group: group.kind == "state"))

    def _group(self, name: str, layers: list[int]) -> CacheGroup:
        mixers = [self.all_layers[i].mixer for i in layers]
        if mixers[0].state():
            return CacheGroup(name, tuple(layers), kind="state", states=tuple(m.state() for m in mixers))
        return CacheGroup(name, tuple(layers), tuple(m.cache_row() for m in mixers), mixers[0].window)

    def cache_layer(self, index: int) -> int:
        """The layer whose pages layer ``index`` reads: itself, or the one that it shares them with."""
        while (shared := self.layers[index].cache_of) is not None:
            index = shared
        return index

    def attentions(self) -> dict[AttentionSpec, int]:
        """Every kind of attention that a backend is asked for, and the last layer that has it."""
        found = {layer.mixer.attention(): i for i, layer in enumerate(self.layers)}
        return {spec: i for spec, i in found.items() if spec is not None}
