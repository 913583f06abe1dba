"""Costs of a model, computed from its spec without torch: bytes of weights, bytes of KV and operations per token.

``kvasir show`` and rooflines use it. Sizes of numbers are given in bytes; a multiply-add counts as two operations.
"""

from __future__ import annotations

import math
from collections import Counter

from kvasir.models.spec import ModelSpec


def num_params(spec: ModelSpec) -> int:
    """Number of stored weights; a tied head counts once."""
    total = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2) + spec.hidden_size
    if spec.layer_embedding is not None:
        total += (spec.vocab_size * len(spec.layers) + 1) * spec.layer_embedding.size
    for layer in spec.layers:
        experts, _, size = layer.ffn.routed(spec.hidden_size)
        total += layer.matrices(spec.hidden_size) + layer.vectors(spec.hidden_size) + experts * size
    return total


def active_params(spec: ModelSpec) -> int:
    """Number of weights in the matrices that one row is multiplied with:
    its own experts and the head, but not the embedding table."""
    total = spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        _, used, size = layer.ffn.routed(spec.hidden_size)
        total += layer.matrices(spec.hidden_size) + used * size
    return total


def routed_bytes(spec: ModelSpec, dtype_bytes: float) -> tuple[tuple[float, float], ...]:
    """Layers with experts, grouped by the share of a layer's experts that one row does not use: pairs of that share and
    the bytes of all experts in such layers."""
    found: Counter[float] = Counter()
    for layer in spec.layers:
        experts, used, size = layer.ffn.routed(spec.hidden_size)
        if experts:
            found[1 - used / experts] += experts * size * dtype_bytes
    return tuple(found.items())


def touched_params(spec: ModelSpec, rows: float) -> float:
    """Expected number of weights that a step over ``rows`` rows reads, if
    rows choose experts with equal probability."""
    return active_params(spec) + sum(size * (alone - alone**rows) for alone, size in routed_bytes(spec, 1))


def weight_bytes(spec: ModelSpec, dtype_bytes: float) -> int:
    """Bytes of all weights; ``dtype_bytes`` may be an average that counts scales."""
    return round(num_params(spec) * dtype_bytes)


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int) -> dict[str, int]:
    """Bytes of one token's keys and values by cache group, stored without a codec."""
    return {g.name: sum(row.width for row in g.rows) * dtype_bytes for g in spec.cache_groups()}


def state_bytes(spec: ModelSpec, dtype_bytes: int, matrix_bytes: int = 4) -> int:
    """Bytes of one page of states: what the recurrent layers keep of a sequence, whatever its length. ``matrix_bytes``:
    of a number of their matrices."""
    sizes = {"state": matrix_bytes, "float32": 4, "model": dtype_bytes, "position": 8}
    planes = [plane for g in spec.cache_groups() for planes in g.states for plane in planes]
    return sum(math.prod(plane.shape) * sizes[plane.kind] for plane in planes)


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype_bytes: int) -> int:
    """Bytes of what a sequence keeps: keys, values and states. A window group keeps its window only. Page rounding is
    left out."""
    sizes = kv_bytes_per_token(spec, dtype_bytes)
    return state_bytes(spec, dtype_bytes) + sum(
        sizes[g.name] * _seen(g.window, num_tokens) for g in spec.cache_groups()
    )


def flops_per_token(spec: ModelSpec, context: int) -> int:
    """Operations for one row that sees ``context`` positions (itself included), with its logits."""
    scores = sum(layer.mixer.pair_flops() * _seen(layer.mixer.window, context) for layer in spec.layers)
    return 2 * active_params(spec) + scores


def _seen(window: int | None, num_tokens: int) -> int:
    return num_tokens if window is None else min(window, num_tokens)
