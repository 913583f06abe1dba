"""``kvasir show MODEL``: layers, bytes of the weights and of a token's KV by codec, and what fits into which memory."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from kvasir.config import CacheConfig
from kvasir.engine.sizing import GIB, gib, token_bytes
from kvasir.errors import ConfigError
from kvasir.models import checkpoint, cost
from kvasir.models.families import build_spec
from kvasir.models.quantisation import reader_of
from kvasir.models.spec import LayerSpec, ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXTS = (1024, 4096, 16384, 32768, 131072)
# Memory of common GPUs in GiB, as their drivers report it.
GPUS = {"24 GiB (RTX 4090, L4)": 24.0, "45 GiB (L40S)": 45.0, "80 GiB (A100, H100)": 80.0, "140 GiB (H200)": 140.0}
# Context length, in tokens, that the table of codecs is for.
SHOWN_CONTEXT = 16384
SHARE = CacheConfig().gpu_memory_utilization


def describe(
    model: str, dtype: str, memory_gib: float | None, weights: str = "auto", state_dtype: str = "float32"
) -> dict[str, Any]:
    """Facts about a model as plain data.

    ``fits``: place -> context length -> number of sequences of that length that fit in addition to the weights.
    ``codecs``: bytes of a token's keys and values with each codec, or the reason why it cannot serve this model.
    ``advice``: the commands to go on with, each with what it is for, in the first of the places.
    """
    path = checkpoint.resolve(model)
    config = checkpoint.read_config(path)
    spec, item = build_spec(config), BYTES[dtype]
    size = _weight_bytes(config, spec, dtype, weights)
    sizes, states = cost.kv_bytes_per_token(spec, item), cost.state_bytes(spec, item, BYTES[state_dtype])
    places = {_here(): _memory() / GIB, **GPUS} if memory_gib is None else {f"{memory_gib:g} GiB": memory_gib}
    fits = {place: _fits(spec, gibs * GIB, states, size, sizes) for place, gibs in places.items()}
    codecs = _codecs(spec, item, states, size, places)
    here = next(iter(places))
    return {
        "model": model or "embedded",
        "path": str(path),
        "family": spec.family,
        "dtype": dtype,
        "parameters": cost.num_params(spec),
        "active_parameters": cost.active_params(spec),
        "weight_bytes": size,
        "quantised": size < cost.weight_bytes(spec, item),
        "vocab_size": spec.vocab_size,
        "cache_groups": [
            {"name": g.name, "layers": len(g.layers), "window": g.window, "kv_bytes_per_token": sizes[g.name]}
            for g in spec.cache_groups()
            if g.kind == "pages"
        ],
        "state_bytes": states,
        "flops_per_token": cost.flops_per_token(spec, 1),
        "max_model_len": spec.max_position,
        "layers": _layers(spec),
        "memory_share": SHARE,
        "fits": fits,
        "codecs": codecs,
        "advice": _advice(model, dtype, weights, state_dtype, here, places[here], size, fits[here], codecs),
    }


def _advice(
    model: str,
    dtype: str,
    weights: str,
    state_dtype: str,
    place: str,
    gibs: float,
    size: int,
    fits: dict[int, int],
    codecs: dict[str, Any],
) -> list[str]:
    """The commands that serve the model in a place: as it is, else with a smaller cache or a shorter context."""
    serve = f"kvasir serve {shlex.quote(model)}" if model else "kvasir serve"
    usual = f" --dtype {dtype}" if dtype != "bfloat16" else ""
    usual += f" --weights {weights}" if weights != "auto" else ""
    usual += f" --state-dtype {state_dtype}" if state_dtype != "float32" else ""
    longest = max(fits)
    if fits[longest]:
        return [f"{serve}{usual}: {fits[longest]:,} sequences of the whole context at once"]
    if size > SHARE * gibs * GIB:
        return [f"nothing fits: the weights alone need {gib(size)} of {SHARE:.0%} of {place}"]
    found = [
        f"{serve}{usual} --kv-codec {name}: {codec['fits'][place][longest]:,} sequences of the whole context at once"
        for name, codec in codecs.items()
        if "cannot" not in codec and codec["fits"][place][longest]
    ]
    if shorter := [length for length, count in fits.items() if count]:
        found.append(f"{serve}{usual} --max-model-len {max(shorter)}: a shorter context, with the cache as it is")
    return found or [f"{serve}{usual} --fit: the longest context that fits, below {min(fits):,} tokens"]


def _weight_bytes(config: dict[str, Any], spec: ModelSpec, dtype: str, weights: str) -> int:
    """Bytes of all weights, as the checkpoint stores them or in the format asked for."""
    if weights == "auto" and reader_of(config) is None:
        return cost.weight_bytes(spec, BYTES[dtype])
    import torch

    from kvasir.models.loader import weight_bytes

    return weight_bytes(config, getattr(torch, dtype), weights)


def _fits(spec: ModelSpec, memory: float, states: int, weights: int, sizes: Mapping[str, float]) -> dict[int, int]:
    """Number of sequences that fit, by context length. ``states``: bytes of a sequence's state. ``sizes``: bytes per
    token, by cache group. Rounding to whole pages is left out."""
    pool = SHARE * memory - weights
    lengths = sorted({n for n in CONTEXTS if n < spec.max_position} | {spec.max_position})
    kept = {n: states + sum(sizes[g.name] * min(n, g.window or n) for g in spec.cache_groups()) for n in lengths}
    return {n: max(0, int(pool // size)) for n, size in kept.items()}


def _codecs(spec: ModelSpec, item: int, states: int, weights: int, places: Mapping[str, float]) -> dict[str, Any]:
    from kvasir.kv.codec import CODECS
    from kvasir.technique import of_all

    return dict(
        sorted(
            of_all(CODECS, lambda name: (name, _codec(spec, name, item, states, weights, places))),
            key=lambda found: found[0] != CacheConfig().kv_codec,
        )
    )


def _codec(
    spec: ModelSpec, name: str, item: int, states: int, weights: int, places: Mapping[str, float]
) -> dict[str, Any]:
    """Bytes per token of a codec with default options, scales included, or the reason why it cannot serve the model."""
    try:
        sizes = token_bytes(spec.cache_groups(), name, item)
    except ConfigError as e:
        return {"cannot": str(e)}
    total, plain = sum(sizes.values()), sum(cost.kv_bytes_per_token(spec, item).values())
    return {
        "kv_bytes_per_token": total,
        "ratio": plain / total,
        "fits": {place: _fits(spec, size * GIB, states, weights, sizes) for place, size in places.items()},
    }


def _layers(spec: ModelSpec) -> list[str]:
    """One line for each run of equal layers, or for each kind of layer
    where kinds alternate (say every sixth layer)."""
    lines, at = [], 0
    for text, run in groupby(map(_line, spec.layers)):
        count = len(list(run))
        lines.append(f"{at}-{at + count - 1}: {text}" if count > 1 else f"{at}: {text}")
        at += count
    kinds: dict[str, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        kinds.setdefault(_line(layer), []).append(i)
    if len(lines) <= len(kinds):
        return lines
    total = len(spec.layers)
    return [
        f"{len(where)} of {total} ({', '.join(map(str, where[:4]))}{', ...' if len(where) > 4 else ''}): {text}"
        for text, where in kinds.items()
    ]


def _line(layer: LayerSpec) -> str:
    mixer, ffn = layer.mixer, layer.ffn
    window = f", window {mixer.window:,}" if mixer.window else ""
    heads = mixer.attention()
    if heads is None:
        body = mixer.kind
    elif heads.latent is not None:
        body = f"{heads.num_heads} heads over a latent of {heads.value_dim} + {heads.head_dim - heads.value_dim}"
    else:
        body = f"{heads.num_heads} query / {heads.num_kv_heads} KV heads of {heads.head_dim}"
    return f"{body}{window}; {ffn.summary()}"


def _here() -> str:
    import torch

    return f"{_memory() / GIB:.0f} GiB (this {'GPU' if torch.cuda.is_available() else 'RAM'})"


def _memory() -> int:
    """Bytes of the first GPU's memory, or of RAM if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info(0)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run(
    model: str,
    dtype: str,
    memory_gib: float | None,
    as_json: bool,
    weights: str = "auto",
    state_dtype: str = "float32",
) -> None:
    """Print what ``describe`` finds, as tables or as JSON."""
    facts = describe(model, dtype, memory_gib, weights, state_dtype)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    active = facts["active_parameters"]
    sparse = f", {active / 1e6:,.1f}M active per token" if any("experts" in line for line in facts["layers"]) else ""
    table.add_row(
        "model", f"{facts['model']} ({facts['family']}, {facts['parameters'] / 1e6:,.1f}M parameters{sparse})"
    )
    kind = "quantised" if facts["quantised"] else f"in {dtype}"
    table.add_row("weights", f"{gib(facts['weight_bytes'])} {kind}")
    for group in facts["cache_groups"]:
        kept = f", for the last {group['window']:,} tokens only" if group["window"] else ""
        table.add_row(
            f"KV ({group['name']})", f"{group['kv_bytes_per_token']:,} bytes a token in {group['layers']} layers{kept}"
        )
    if facts["state_bytes"]:
        table.add_row("states", f"{gib(facts['state_bytes'])} a sequence, whatever its length")
    table.add_row("work", f"{facts['flops_per_token']:.3g} FLOP a token, growing with the context")
    table.add_row("context", f"{facts['max_model_len']:,} tokens")
    for i, line in enumerate(facts["layers"]):
        table.add_row("" if i else "layers", line)
    fits = Table("\ncontext", box=None, pad_edge=False)
    for place in facts["fits"]:
        fits.add_column(place.replace(" (", "\n("), justify="right")
    for length in next(iter(facts["fits"].values())):
        fits.add_row(
            f"{length:,}",
            *[f"{by_length[length]:,}" if by_length[length] else "none" for by_length in facts["fits"].values()],
        )
    lengths = list(next(iter(facts["fits"].values())))
    context = max((n for n in lengths if n <= SHOWN_CONTEXT), default=lengths[0])
    codecs = Table("\n--kv-codec", box=None, pad_edge=False)
    for head in ("bytes\na token", "times\nfewer", *(place.replace(" (", "\n(") for place in facts["fits"])):
        codecs.add_column(head, justify="right")
    for name, found in facts["codecs"].items():
        if "cannot" not in found:
            counts = [
                f"{by_length[context]:,}" if by_length[context] else "none" for by_length in found["fits"].values()
            ]
            codecs.add_row(name, f"{found['kv_bytes_per_token']:,.0f}", f"{found['ratio']:.2f}x", *counts)
    console = Console()
    console.print(table)
    console.print(
        f"\nSequences that fit in addition to the weights, by context length, in {SHARE:.0%} of the memory (without a "
        "step's own needs):"
    )
    console.print(fits)
    console.print(f"\nThe same for sequences of {context:,} tokens, by storage format of keys and values:")
    console.print(codecs)
    for name, found in facts["codecs"].items():
        if "cannot" in found:
            console.print(f"{name}: {found['cannot']}", highlight=False, markup=False)
    console.print(f"\nTo serve it with {next(iter(facts['fits']))}:")
    for line in facts["advice"]:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
