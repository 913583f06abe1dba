"""The parts of a layer as plain data, read by front ends, sizing and cost without torch.

A ``kind`` names the module that computes the part: ``GQASpec.kind = "gqa"`` is ``kvasir.layers.mixers.gqa``. Each part
says itself what it costs and keeps (`MixerSpec`, `FFNSpec`), so that sizing and costs know no kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from kvasir.attention.backend import AttentionSpec, LatentHeads
from kvasir.types import CacheRow, StatePlane

Activation = Literal["silu", "gelu", "gelu_tanh"]
# Those of experts. clamped_swiglu is gpt-oss's: (up + 1) * gate * sigmoid(1.702 gate), both clamped at 7 before.
ExpertActivation = Activation | Literal["clamped_swiglu"]


class MixerSpec(Protocol):
    """The part of a layer that mixes positions."""

    @property
    def kind(self) -> str: ...

    @property
    def window(self) -> int | None:
        """Number of last positions that a row sees, itself included; None: all."""

    def cache_row(self) -> CacheRow | None:
        """A token's share of the pages; None: the mixer keeps nothing there."""

    def state(self) -> tuple[StatePlane, ...]:
        """The state that the mixer keeps of a sequence, whatever its length; empty: none."""

    def attention(self) -> AttentionSpec | None:
        """The attention that a backend is asked for; None: the mixer computes its own, or has none."""

    def matrices(self, hidden: int, writes: bool = True) -> int:
        """Number of weights in matrices. ``hidden``: the model's width; ``writes`` False: the layer reads another
        layer's cache."""

    def vectors(self, hidden: int, writes: bool = True) -> int:
        """Number of other weights: biases, norms, sinks."""

    def pair_flops(self) -> int:
        """Operations for a row and one position that it sees."""


class FFNSpec(Protocol):
    """The part of a layer that works on each row alone."""

    @property
    def kind(self) -> str: ...

    def matrices(self, hidden: int) -> int:
        """Number of weights in matrices that every row is multiplied with. ``hidden``: the model's width."""

    def vectors(self, hidden: int) -> int:
        """Number of other weights."""

    def routed(self, hidden: int) -> tuple[int, int, int]:
        """Number of experts, those that one row uses, and the weights in one expert's matrices; (0, 0, 0): none."""

    def summary(self) -> str:
        """A few words for ``kvasir show``."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm. The scale is ``offset`` + the stored weight (Gemma stores it around zero: offset 1)."""

    eps: float = 1e-6
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first ``head_dim`` dimensions of a head, usually all; the first half of them is paired
    with the second half.

    Fields after ``theta`` belong to one kind each. linear: factor. llama3: factor, low/high_freq_factor,
    original_max_position. yarn: factor, betas, truncate, attention_factor (multiplies cos and sin),
    original_max_position. longrope: short/long_factors (one for each pair), attention_factor, original_max_position.
    proportional: the first ``num_pairs`` pairs rotate with the frequencies of the whole head (divided by factor), the
    others not at all.
    """

    theta: float
    head_dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    num_pairs: int = 0


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor of a row's queries that grows with its position: 1 + beta * ln(1 + floor((position + offset) /
    length))."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class GQASpec:
    """Grouped-query attention.

    ``qk_norm``: norm of every query and key head before RoPE; ``flat_norm``: it is one norm over all query heads and
    one over all key heads. ``value_norm``: norm of every value head, without a
    weight. ``keys_are_values``: one projection gives both, the values before norm and RoPE of the keys. ``gated``: the
    projection of a query head also gives a gate, the head's second half there, and the head's result is multiplied by
    its sigmoid. ``query_scale``: see `QueryScale`; it follows RoPE.
    """

    kind: ClassVar[str] = "gqa"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qk_norm: NormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    value_norm: NormSpec | None = None
    keys_are_values: bool = False
    gated: bool = False
    query_scale: QueryScale | None = None
    flat_norm: bool = False

    def widths(self, writes: bool = True) -> dict[str, int]:
        """Outputs of the projections; ``writes`` False: those of a layer that reads another layer's cache."""
        sides = ("k",) if self.keys_are_values else ("k", "v")
        heads = {"q": self.num_heads * (2 if self.gated else 1)} | dict.fromkeys(
            sides if writes else (), self.num_kv_heads
        )
        return {name: count * self.head_dim for name, count in heads.items()}

    def attention(self) -> AttentionSpec:
        """The attention that a backend is asked for."""
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.window, self.softcap, self.sinks
        )

    def cache_row(self) -> CacheRow:
        return CacheRow(self.num_kv_heads, self.head_dim, self.head_dim)

    def state(self) -> tuple[StatePlane, ...]:
        return ()

    def matrices(self, hidden: int, writes: bool = True) -> int:
        return (self.num_heads * self.head_dim + sum(self.widths(writes).values())) * hidden

    def vectors(self, hidden: int, writes: bool = True) -> int:
        biases = sum(self.widths(writes).values()) if self.qkv_bias else 0
        norms = 0
        if self.qk_norm is not None:
            counts = (self.num_heads, self.num_kv_heads) if self.flat_norm else (1, 1)
            norms = self.head_dim * sum(counts if writes else counts[:1])
        return biases + (hidden if self.o_bias else 0) + norms + (self.num_heads if self.sinks else 0)

    def pair_flops(self) -> int:
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentWriter:
    """Ordinary keys and values that a latent is made of, where the norm of the keys keeps it from being one product of
    the row: ``num_kv_heads`` keys of ``head_dim``, normed, and as many values are computed first, and stored matrices
    make the latent of both and the rotary key of the keys. Queries are normed likewise, and a head's rotary
    query is a product of its query."""

    num_kv_heads: int
    head_dim: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share a cached latent of ``rank`` elements
    and a rotary key of ``rope_dim`` (0: no RoPE).

    A head's key is ``nope_dim`` elements that it makes of the latent and the rotary key; its value is ``value_dim``
    elements made of the latent. ``q_rank``: width between the two products that make queries (None: one product).
    ``interleaved``: stored weights have the two elements of a rotary pair side by side. ``norm``: of the latent, and
    between those products (None: neither has one). ``biases``: the products among q, q_a,
    kv_a and o that have biases. ``query_scale``: see `QueryScale`; it follows RoPE. ``writer``: see `LatentWriter`.
    ``softcap``: as in `AttentionSpec`. Layers of a model may differ in ``rank``.
    """

    kind: ClassVar[str] = "mla"
    window: ClassVar[int | None] = None
    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    q_rank: int | None = None
    norm: NormSpec | None = None
    biases: tuple[str, ...] = ()
    query_scale: QueryScale | None = None
    writer: LatentWriter | None = None
    interleaved: bool = True
    softcap: float | None = None

    def __post_init__(self) -> None:
        if (writer := self.writer) is not None:
            assert self.q_rank is None and not self.biases, "a writer has one product for queries, and no biases"
            assert writer.head_dim == self.nope_dim, "a head's whole query reads the latent"

    @property
    def qk_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Elements of a cached row."""
        return self.rank + self.rope_dim

    def attention(self) -> AttentionSpec:
        """The attention that a backend is asked for: all heads read one row, in the latent's basis."""
        heads = LatentHeads(self.nope_dim, self.value_dim)
        return AttentionSpec(
            self.num_heads, 1, self.row_dim, self.scale, softcap=self.softcap, value_dim=self.rank, latent=heads
        )

    def cache_row(self) -> CacheRow:
        return CacheRow(1, self.row_dim, 0, latent=self.rank)

    def entries(self) -> dict[str, int]:
        """Outputs of the products of the row itself."""
        if (writer := self.writer) is not None:
            side = writer.num_kv_heads * writer.head_dim
            return {"q": self.num_heads * self.nope_dim, "k": side, "v": side}
        query = {"q": self.num_heads * self.qk_dim} if self.q_rank is None else {"q_a": self.q_rank}
        return {**query, "kv_a": self.row_dim}

    def state(self) -> tuple[StatePlane, ...]:
        return ()

    def matrices(self, hidden: int, writes: bool = True) -> int:
        heads = self.num_heads
        up = heads * self.rank * (self.nope_dim + self.value_dim)
        found = (sum(self.entries().values()) + heads * self.value_dim) * hidden + up
        if self.q_rank is not None:
            found += self.q_rank * heads * self.qk_dim
        if (writer := self.writer) is not None:
            side = writer.num_kv_heads * writer.head_dim
            found += 2 * side * self.rank + (side + heads * self.nope_dim) * self.rope_dim
        return found

    def vectors(self, hidden: int, writes: bool = True) -> int:
        widths = self.entries() | {"o": hidden}
        norms = 0 if self.norm is None else self.rank + (self.q_rank or 0)
        return sum(widths[name] for name in self.biases) + norms + (2 * self.nope_dim if self.writer else 0)

    def pair_flops(self) -> int:
        """Operations of the form that takes fewer: in the latent's basis, or over keys and values made of it, whose
        making counts with the row's matrices."""
        return 2 * self.num_heads * (min(2 * self.rank, self.nope_dim + self.value_dim) + self.rope_dim)


# Rows of a span up to which a recurrent layer defers its commit: their inputs go to look-ahead slots, and the next step
# folds those that were accepted into the state. Longer spans write another page.
LOOK_AHEAD = 16


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a matrix of ``key_dim`` by ``value_dim`` for each head of
    values. Each of ``num_key_heads`` gives query and key to as many heads of values as the other. A causal convolution
    over ``taps`` rows comes before, and a gated RMS norm with ``norm.eps`` after."""

    kind: ClassVar[str] = "gated_delta"
    window: ClassVar[int | None] = None
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    norm: NormSpec
    taps: int = 4

    def __post_init__(self) -> None:
        assert self.num_value_heads % self.num_key_heads == 0, "key heads have equally many heads of values"

    @property
    def mixed(self) -> int:
        """Elements of a row that the convolution reads: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Elements of a row of values, and of its gate after the recurrence."""
        return self.num_value_heads * self.value_dim

    def cache_row(self) -> None:
        return None

    def state(self) -> tuple[StatePlane, ...]:
        """The state of one sequence: the matrices, the rows that the convolution still sees, the position that both
        have reached, and the inputs (mixed row and two gates a head) of rows after it."""
        return (
            StatePlane("matrix", (self.num_value_heads, self.key_dim, self.value_dim), "state"),
            StatePlane("tail", (self.taps - 1, self.mixed), "model"),
            StatePlane("ahead", (LOOK_AHEAD, self.mixed + 2 * self.num_value_heads), "model"),
            StatePlane("position", (1,), "position"),
        )

    def attention(self) -> None:
        return None

    def matrices(self, hidden: int, writes: bool = True) -> int:
        return (self.mixed + 2 * self.values + 2 * self.num_value_heads) * hidden

    def vectors(self, hidden: int, writes: bool = True) -> int:
        return self.mixed * self.taps + 2 * self.num_value_heads + self.value_dim

    def pair_flops(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(activation(gate(x)) * up(x)). ``intermediate_size``: the width F."""

    kind: ClassVar[str] = "dense"
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def matrices(self, hidden: int) -> int:
        return 3 * hidden * self.intermediate_size

    def vectors(self, hidden: int) -> int:
        return 2 * self.intermediate_size + hidden if self.bias else 0

    def routed(self, hidden: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def summary(self) -> str:
        return f"FFN {self.intermediate_size}"


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A router picks ``top_k`` dense blocks of ``intermediate_size`` per row.

    Experts are scored by ``scoring`` of the router's logits; softmax goes over all experts. ``renormalize``: the picked
    weights are scaled to sum to one, which after softmax is a softmax over the picked logits. ``weight_scale``: a
    factor of the weights after that.

    ``correction``: a stored bias of the scores, which counts for the choice and not for the weights. With ``groups`` of
    experts, only those of the ``top_groups`` groups may be picked whose two best scores sum to most.

    ``router_bias``, ``bias``: the products of router and experts have biases. ``shared_size``: width of an expert that
    every row uses (0: none); ``shared_gate``: its result is multiplied by the sigmoid of a product of the row.
    ``expert_scale``: a stored factor of each expert's weight, after all others. ``group_best``: scores of a group that
    are summed, if not two.
    """

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    activation: ExpertActivation = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weight_scale: float = 1.0
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    router_bias: bool = False
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    expert_scale: bool = False
    group_best: int = 2

    @property
    def by_softmax(self) -> bool:
        """Whether the softmax of the router's logits alone decides experts and weights."""
        plain = not self.correction and not self.expert_scale and self.groups == 1 and self.weight_scale == 1
        return self.scoring == "softmax" and plain

    def matrices(self, hidden: int) -> int:
        router = self.num_experts + (1 if self.shared_gate else 0)
        return (router + 3 * self.shared_size) * hidden

    def vectors(self, hidden: int) -> int:
        experts = self.num_experts * (2 * self.intermediate_size + hidden) if self.bias else 0
        return experts + self.num_experts * (self.router_bias + self.correction + self.expert_scale)

    def routed(self, hidden: int) -> tuple[int, int, int]:
        return self.num_experts, self.top_k, 3 * hidden * self.intermediate_size

    def summary(self) -> str:
        shared = f" and one of {self.shared_size}" if self.shared_size else ""
        return f"{self.top_k} of {self.num_experts} experts of {self.intermediate_size}{shared}"


@dataclass(frozen=True, slots=True)
class DenseAndExpertsSpec:
    """norm(dense(norm(h))) + norm(experts(norm(h))), in layers with sandwiched norms. The router reads norm(h) /
    sqrt(model dim); ``norm`` is the kind of these norms, which stand beside those of the layer."""

    kind: ClassVar[str] = "dense_and_experts"
    dense: DenseSpec
    experts: MoESpec
    norm: NormSpec

    def matrices(self, hidden: int) -> int:
        return self.dense.matrices(hidden) + self.experts.matrices(hidden)

    def vectors(self, hidden: int) -> int:
        return self.dense.vectors(hidden) + self.experts.vectors(hidden) + 4 * hidden

    def routed(self, hidden: int) -> tuple[int, int, int]:
        return self.experts.routed(hidden)

    def summary(self) -> str:
        return f"{self.dense.summary()} and {self.experts.summary()}"


@dataclass(frozen=True, slots=True)
class LayerEmbeddingSpec:
    """Embeddings of a token for each layer, ``size`` numbers a layer (`kvasir.layers.layer_embedding`)."""

    size: int
    activation: Activation
    norm: NormSpec

    def matrices(self, hidden: int) -> int:
        """Number of weights in a layer's matrices and in its share of the projection that all layers have."""
        return 3 * hidden * self.size
