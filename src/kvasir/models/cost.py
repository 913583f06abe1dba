"""Costs of a model, computed from its spec without torch: bytes of weights, bytes of KV and operations per token.

``kvasir show`` and rooflines use it. Sizes of numbers are given in bytes; a multiply-add counts as two operations.
"""

from __future__ import annotations

from collections import Counter

from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec
from kvasir.models.spec import LayerSpec, ModelSpec


def num_params(spec: ModelSpec) -> int:
    """Number of stored weights; a tied head counts once."""
    total = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2) + spec.hidden_size
    for layer in spec.layers:
        total += _mixer_matrices(layer, spec.hidden_size) + _mixer_vectors(layer, spec.hidden_size)
        total += _ffn_matrices(layer.ffn, spec.hidden_size)[0] + spec.hidden_size * (
            4 if layer.norms == "sandwich" else 2
        )
        if isinstance(layer.ffn, DenseSpec) and layer.ffn.bias:
            total += 2 * layer.ffn.intermediate_size + spec.hidden_size
    return total


def active_params(spec: ModelSpec) -> int:
    """Number of weights in the matrices that one row is multiplied with:
    its own experts and the head, but not the embedding table."""
    head = spec.vocab_size * spec.hidden_size
    return head + sum(
        _mixer_matrices(layer, spec.hidden_size) + _ffn_matrices(layer.ffn, spec.hidden_size)[1]
        for layer in spec.layers
    )


def routed_bytes(spec: ModelSpec, dtype_bytes: int) -> tuple[tuple[float, float], ...]:
    """Layers with experts, grouped by the share of a layer's experts that one row does not use: pairs of that share and
    the bytes of all experts in such layers."""
    found: Counter[float] = Counter()
    for layer in spec.layers:
        if isinstance(layer.ffn, MoESpec):
            experts = 3 * spec.hidden_size * layer.ffn.intermediate_size * layer.ffn.num_experts
            found[1 - layer.ffn.top_k / layer.ffn.num_experts] += experts * dtype_bytes
    return tuple(found.items())


def touched_params(spec: ModelSpec, rows: float) -> float:
    """Expected number of weights that a step over ``rows`` rows reads, if
    rows choose experts with equal probability."""
    return active_params(spec) + sum(size * (alone - alone**rows) for alone, size in routed_bytes(spec, 1))


def weight_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    """Bytes of all weights."""
    return num_params(spec) * dtype_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int) -> dict[str, int]:
    """Bytes of one token's keys and values by cache group, stored without a codec."""
    return {g.name: 2 * g.num_kv_heads * g.head_dim * len(g.layers) * dtype_bytes for g in spec.cache_groups()}


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype_bytes: int) -> int:
    """Bytes of the keys and values of a sequence; a window group keeps its window only. Page rounding is left out."""
    sizes = kv_bytes_per_token(spec, dtype_bytes)
    return sum(sizes[g.name] * _seen(g.window, num_tokens) for g in spec.cache_groups())


def flops_per_token(spec: ModelSpec, context: int) -> int:
    """Operations for one row that sees ``context`` positions (itself included), with its logits."""
    scores = sum(
        4 * layer.mixer.num_heads * layer.mixer.head_dim * _seen(layer.mixer.window, context) for layer in spec.layers
    )
    return 2 * active_params(spec) + scores


def _seen(window: int | None, num_tokens: int) -> int:
    return num_tokens if window is None else min(window, num_tokens)


def _mixer_matrices(layer: LayerSpec, hidden_size: int) -> int:
    m: GQASpec = layer.mixer
    return (2 * m.num_heads * m.head_dim + _kv_width(layer)) * hidden_size


def _mixer_vectors(layer: LayerSpec, hidden_size: int) -> int:
    """Number of weights in the mixer's biases, head norms and sinks."""
    m: GQASpec = layer.mixer
    biases = (m.num_heads * m.head_dim + _kv_width(layer) if m.qkv_bias else 0) + (hidden_size if m.o_bias else 0)
    norms = m.head_dim * (2 if layer.cache_of is None else 1) if m.qk_norm is not None else 0
    return biases + norms + (m.num_heads if m.sinks else 0)


def _kv_width(layer: LayerSpec) -> int:
    return 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim if layer.cache_of is None else 0


def _ffn_matrices(spec: DenseSpec | MoESpec, hidden_size: int) -> tuple[int, int]:
    """Number of stored weights, and of those that one row is multiplied with."""
    block = 3 * hidden_size * spec.intermediate_size
    if isinstance(spec, DenseSpec):
        return block, block
    router = spec.num_experts * hidden_size
    return block * spec.num_experts + router, block * spec.top_k + router
