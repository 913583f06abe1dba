"""What a model costs: bytes of weights, bytes of KV per token, operations per token. From the spec alone, without torch.

Used by ``kvasir show`` and by rooflines. Sizes of a number are given in bytes; a multiply-add is two operations.
"""

from __future__ import annotations

from collections import Counter

from kvasir.layers.spec import DenseSpec, GQASpec, MoESpec
from kvasir.models.spec import LayerSpec, ModelSpec


def num_params(spec: ModelSpec) -> int:
    """Stored numbers, a tied head counted once."""
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
    """Numbers in the matrices that one row is multiplied with: its own experts only, the head, not the embedding table."""
    head = spec.vocab_size * spec.hidden_size
    return head + sum(
        _mixer_matrices(layer, spec.hidden_size) + _ffn_matrices(layer.ffn, spec.hidden_size)[1]
        for layer in spec.layers
    )


def routed_bytes(spec: ModelSpec, dtype_bytes: int) -> tuple[tuple[float, float], ...]:
    """Of experts: the share of a layer's that one row leaves alone, and the bytes of all in such layers."""
    found: Counter[float] = Counter()
    for layer in spec.layers:
        if isinstance(layer.ffn, MoESpec):
            experts = 3 * spec.hidden_size * layer.ffn.intermediate_size * layer.ffn.num_experts
            found[1 - layer.ffn.top_k / layer.ffn.num_experts] += experts * dtype_bytes
    return tuple(found.items())


def touched_params(spec: ModelSpec, rows: float) -> float:
    """Numbers of the matrices that a step over ``rows`` rows must read: of a mixture, the experts that rows fall on, by even chance."""
    return active_params(spec) + sum(size * (alone - alone**rows) for alone, size in routed_bytes(spec, 1))


def weight_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    return num_params(spec) * dtype_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int) -> dict[str, int]:
    """Bytes that one token's keys and values take, by cache group, as plainly stored."""
    return {g.name: 2 * g.num_kv_heads * g.head_dim * len(g.layers) * dtype_bytes for g in spec.cache_groups()}


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype_bytes: int) -> int:
    """Bytes that a sequence of ``num_tokens`` holds: a window group keeps its window only (page rounding left out)."""
    sizes = kv_bytes_per_token(spec, dtype_bytes)
    return sum(sizes[g.name] * _seen(g.window, num_tokens) for g in spec.cache_groups())


def flops_per_token(spec: ModelSpec, context: int) -> int:
    """Operations of one row that sees ``context`` positions (itself included), its logits included."""
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
    """Numbers in the mixer's biases, head norms and sinks."""
    m: GQASpec = layer.mixer
    biases = (m.num_heads * m.head_dim + _kv_width(layer) if m.qkv_bias else 0) + (hidden_size if m.o_bias else 0)
    norms = m.head_dim * (2 if layer.cache_of is None else 1) if m.qk_norm is not None else 0
    return biases + norms + (m.num_heads if m.sinks else 0)


def _kv_width(layer: LayerSpec) -> int:
    return 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim if layer.cache_of is None else 0


def _ffn_matrices(spec: DenseSpec | MoESpec, hidden_size: int) -> tuple[int, int]:
    """Numbers stored, and those one row is multiplied with."""
    block = 3 * hidden_size * spec.intermediate_size
    if isinstance(spec, DenseSpec):
        return block, block
    router = spec.num_experts * hidden_size
    return block * spec.num_experts + router, block * spec.top_k + router
