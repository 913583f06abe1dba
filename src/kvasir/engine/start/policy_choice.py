"""Which KV policies run, and what cannot run with them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvasir.errors import ConfigError
from kvasir.kv.codec import Codec
from kvasir.kv.policy import Stack, load
from kvasir.types import CacheGroup, Pooling


def choose_policy(
    spec: str, codec: Codec, groups: tuple[CacheGroup, ...], max_rows: int, pooling: Pooling | None
) -> tuple[Stack | None, tuple[CacheGroup, ...]]:
    """The stack of this spec (None: nothing is forgotten), and the cache groups of a model that has ``groups`` without
    it.

    Sets what ``codec`` stores beside each token. ``max_rows``: row budget of a step. ``pooling``: the model embeds or
    scores. Raises ConfigError for what cannot work, with the nearest choice that does."""
    stack = load(spec)
    if stack is None:
        return None, groups
    full = [group for group in groups if group.kind == "pages" and group.window is None]
    _check_stack(stack, max_rows)
    _check_model(stack, full, pooling)
    if stack.observers or stack.by_head:
        _check_codec(stack, codec, full)
    codec.beside = stack.planes
    return stack, _apart(groups) if stack.by_layer else groups


def _apart(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    """A cache group for each layer without a window, so that layers may keep different numbers of tokens."""
    found: list[CacheGroup] = []
    for group in groups:
        if group.kind == "state" or group.window is not None:
            found.append(group)
        else:
            parts = zip(group.layers, group.rows)
            found += [
                replace(group, name=f"{group.name}.{layer}", layers=(layer,), rows=(row,)) for layer, row in parts
            ]
    return tuple(found)


def _names(stack: Stack) -> str:
    return "+".join(policy.name for policy in stack.policies)


def _check_stack(stack: Stack, max_rows: int) -> None:
    if stack.rows > max_rows:
        raise ConfigError(
            f"kv_policy={_names(stack)} computes the last {stack.rows} rows of a prompt in one step, which has "
            f"{max_rows}. Use --max-num-batched-tokens {stack.rows} or more"
        )
    if stack.by_layer and len(stack.policies) > 1:
        raise ConfigError(
            f"kv_policy={_names(stack)}: the layers of {next(p.name for p in stack.policies if p.by_layer)} keep "
            "different numbers of tokens, and the other policy counts the same for all. Use snapkv with it"
        )


def _check_model(stack: Stack, full: list[CacheGroup], pooling: Pooling | None) -> None:
    """Refuse models that have nothing to forget, or one row for all heads of a token."""
    if pooling is not None:
        raise ConfigError(f"kv_policy={_names(stack)}: a model that embeds or scores has no answers. Leave it out")
    if not full:
        raise ConfigError(f"kv_policy={_names(stack)}: all layers of this model have windows already. Leave it out")
    if stack.by_head and any(row.latent for group in full for row in group.rows):
        raise ConfigError(
            f"kv_policy={_names(stack)} keeps other tokens for each KV head, and this model caches one latent for all "
            "heads. Use kv_policy=sink_window"
        )


def _check_codec(stack: Stack, codec: Codec, full: list[CacheGroup]) -> None:
    """Refuse codecs whose keys are in another basis than the queries, and those with numbers for all heads of a
    token."""
    nearest = "Use --kv-codec plain, int8 or fp8"
    for layer, row in [pair for group in full for pair in zip(group.layers, group.rows)]:
        if codec.layer(layer) is not codec or codec.turns or codec.rotation("k", row.key_dim) is not None:
            raise ConfigError(
                f"kv_policy={_names(stack)} compares keys with queries, and codec '{codec.name}' keeps keys in another "
                f"basis. {nearest}"
            )
        if stack.by_head and any(plane.shared for plane in codec.planes(row, torch.float32)):
            raise ConfigError(
                f"kv_policy={_names(stack)} moves the heads of a token apart, and codec '{codec.name}' stores numbers "
                f"for all of them together. {nearest}"
            )
