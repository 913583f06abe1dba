"""``kvasir show MODEL``: layers, bytes of the weights and of a token's KV by codec, and what fits into which memory."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvasir.config import CacheConfig, SchedulerConfig
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.start.sizing import GIB, available_memory, cpu_budget, gib, plan_pool, sequences_in, token_bytes
from kvasir.engine.start.tier_choice import in_tiers
from kvasir.errors import ConfigError
from kvasir.models import checkpoint, cost
from kvasir.models.families import build_spec
from kvasir.models.quantisation import reader_of
from kvasir.models.spec import LayerSpec, ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Types where none is asked for: what ``kvasir serve`` chooses on a CPU and on a GPU.
ON_CPU, ON_GPU = "float32", "bfloat16"
CONTEXTS = (1024, 4096, 16384, 32768, 131072)
# Memory of common GPUs in GiB, as their drivers report it.
GPUS = {"24 GiB (RTX 4090, L4)": 24.0, "45 GiB (L40S)": 45.0, "80 GiB (A100, H100)": 80.0, "140 GiB (H200)": 140.0}
# Context length, in tokens, that the table of codecs is for.
SHOWN_CONTEXT = 16384
SHARE = CacheConfig().gpu_memory_utilization


@dataclass(frozen=True)
class Place:
    """Memory that a model may be served with: ``size`` bytes of a GPU, or of the KV pool of a CPU. ``dtype``: of
    weights and KV there; ``weights``: bytes of all weights in it."""

    name: str
    size: float
    dtype: str
    weights: int
    on_cpu: bool = False


def describe(
    model: str,
    dtype: str | None,
    memory_gib: float | None,
    weights: str = "auto",
    state_dtype: str = "float32",
    cpu_cache_bytes: int = CacheConfig().cpu_cache_bytes,
) -> dict[str, Any]:
    """Facts about a model as plain data, in ``dtype``, or in the type that the first place has by itself.

    ``fits``: place -> context length -> number of sequences of that length that fit in addition to the weights.
    ``codecs``: bytes of a token's keys and values with each codec, or the reason why it cannot serve this model.
    ``advice``: the commands to go on with, each with what it is for, in the first of the places.
    """
    path = checkpoint.resolve(model)
    config = checkpoint.read_config(path)
    spec = build_spec(config)
    places = _places(config, spec, dtype, memory_gib, weights, cpu_cache_bytes)
    here = places[0]
    item = BYTES[here.dtype]
    sizes = cost.kv_bytes_per_token(spec, item)
    codecs = _codecs(spec, state_dtype, places)
    fits = {place.name: _fits(spec, place, CacheConfig().kv_codec, state_dtype) for place in places}
    usual = f" --dtype {dtype}" if dtype not in (None, ON_CPU if here.on_cpu else ON_GPU) else ""
    usual += f" --weights {weights}" if weights != "auto" else ""
    usual += f" --state-dtype {state_dtype}" if state_dtype != "float32" else ""
    return {
        "model": model or "embedded",
        "path": str(path),
        "family": spec.family,
        "dtype": here.dtype,
        "parameters": cost.num_params(spec),
        "active_parameters": cost.active_params(spec),
        "weight_bytes": here.weights,
        "quantised": here.weights < cost.weight_bytes(spec, item),
        "vocab_size": spec.vocab_size,
        "cache_groups": [
            {"name": g.name, "layers": len(g.layers), "window": g.window, "kv_bytes_per_token": sizes[g.name]}
            for g in spec.cache_groups()
            if g.kind == "pages"
        ],
        "state_bytes": cost.state_bytes(spec, item, BYTES[state_dtype]),
        "flops_per_token": cost.flops_per_token(spec, 1),
        "max_model_len": spec.max_position,
        "layers": [*_layers(spec), *_mtp(path, spec)],
        "memory_share": SHARE,
        "cpu_cache_bytes": int(here.size) if here.on_cpu else None,
        "dtypes": {place.name: place.dtype for place in places},
        "fits": fits,
        "codecs": codecs,
        "tiers": in_tiers(spec.cache_groups(), item, here.on_cpu),
        "advice": _advice(spec, model, usual, state_dtype, here, cpu_cache_bytes, fits[here.name], codecs),
    }


def _places(
    config: dict[str, Any],
    spec: ModelSpec,
    dtype: str | None,
    memory_gib: float | None,
    weights: str,
    cpu_cache_bytes: int,
) -> list[Place]:
    """This machine and common GPUs, or memory of the size asked for."""
    import torch

    def gpu(name: str, size: float) -> Place:
        kind = dtype or ON_GPU
        return Place(name, size, kind, _weight_bytes(config, spec, kind, weights))

    if memory_gib is not None:
        return [gpu(f"{memory_gib:g} GiB", memory_gib * GIB)]
    common = [gpu(name, gibs * GIB) for name, gibs in GPUS.items()]
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info(0)[1]
        return [gpu(f"{memory / GIB:.0f} GiB (this GPU)", memory), *common]
    kind = dtype or ON_CPU
    taken = _weight_bytes(config, spec, kind, weights)
    pool = cpu_budget(cpu_cache_bytes, taken)
    return [Place(f"{gib(pool)} (KV pool of this CPU)", pool, kind, taken, on_cpu=True), *common]


def _advice(
    spec: ModelSpec,
    model: str,
    usual: str,
    state_dtype: str,
    here: Place,
    cpu_cache_bytes: int,
    fits: dict[int, int],
    codecs: dict[str, Any],
) -> list[str]:
    """The commands that serve the model in a place: as it is, else with a smaller cache or a shorter context."""
    serve = (f"kvasir serve {shlex.quote(model)}" if model else "kvasir serve") + usual
    larger = []
    if here.on_cpu:
        if here.weights > (free := available_memory()):
            return [f"nothing fits: the weights alone need {gib(here.weights)} of {gib(free)} of free RAM"]
        most = cpu_budget(free, here.weights) // GIB * GIB
        found = _fits(spec, replace(here, size=most), CacheConfig().kv_codec, state_dtype) if most > here.size else fits
        if found[longest := max(found)] > fits[longest]:
            larger = [
                f"{serve} --cpu-cache-bytes {most}: {found[longest]:,} sequences of the whole context at once, with "
                "half of the RAM that is free now"
            ]
        if cpu_cache_bytes != CacheConfig().cpu_cache_bytes:
            serve += f" --cpu-cache-bytes {cpu_cache_bytes}"
    elif here.weights > SHARE * here.size:
        return [f"nothing fits: the weights alone need {gib(here.weights)} of {SHARE:.0%} of {here.name}"]
    longest = max(fits)
    if fits[longest]:
        return [f"{serve}: {fits[longest]:,} sequences of the whole context at once", *larger]
    found = [
        f"{serve} --kv-codec {name}: {codec['fits'][here.name][longest]:,} sequences of the whole context at once"
        for name, codec in codecs.items()
        if "cannot" not in codec and codec["fits"][here.name][longest]
    ]
    if shorter := [length for length, count in fits.items() if count]:
        found.append(f"{serve} --max-model-len {max(shorter)}: a shorter context, with the cache as it is")
    return [*found, *larger] or [f"{serve} --fit: the longest context that fits, below {min(fits):,} tokens"]


def _weight_bytes(config: dict[str, Any], spec: ModelSpec, dtype: str, weights: str) -> int:
    """Bytes of all weights, as the checkpoint stores them or in the format asked for."""
    if weights == "auto" and reader_of(config) is None:
        return cost.weight_bytes(spec, BYTES[dtype])
    import torch

    from kvasir.models.loader import weight_bytes

    return weight_bytes(config, getattr(torch, dtype), weights)


def _fits(spec: ModelSpec, place: Place, codec: str, state_dtype: str) -> dict[int, int]:
    """Number of sequences that fit, by context length. On a CPU they are those of the pool that ``kvasir serve`` makes;
    for a GPU, rounding to whole pages is left out. Raises ConfigError for a codec that does not fit the heads."""
    lengths = sorted({n for n in CONTEXTS if n < spec.max_position} | {spec.max_position})
    if place.on_cpu:
        return _in_pool(spec, place, codec, state_dtype, lengths)
    item = BYTES[place.dtype]
    sizes, states = token_bytes(spec.cache_groups(), codec, item), cost.state_bytes(spec, item, BYTES[state_dtype])
    pool = SHARE * place.size - place.weights
    kept = {n: states + sum(sizes[g.name] * min(n, g.window or n) for g in spec.cache_groups()) for n in lengths}
    return {n: max(0, int(pool // size)) for n, size in kept.items()}


def _in_pool(spec: ModelSpec, place: Place, name: str, state_dtype: str, lengths: list[int]) -> dict[int, int]:
    """Number of sequences that the engine's pool on this CPU holds, by context length."""
    import torch

    from kvasir.engine.start.build import CPU_ROWS
    from kvasir.engine.start.codec_choice import choose_codec
    from kvasir.kv.pool import KVPool

    dtype = getattr(torch, place.dtype)
    codec = choose_codec(name, dtype)
    slots = codec.page_slots
    groups = [replace(g, state_dtype=state_dtype) if g.kind == "state" else g for g in spec.cache_groups()]
    page_bytes = [KVPool.page_bytes_of(g, codec, slots, dtype) for g in groups]
    plan = plan_pool(
        groups,
        page_bytes,
        int(place.size),
        page_slots=slots,
        max_rows=CPU_ROWS,
        max_num_seqs=SchedulerConfig().max_num_seqs,
        max_model_len=spec.max_position,
        state_interval=pages_for(CacheConfig().state_interval, slots) * slots,
    )
    return {n: sequences_in(plan, groups, n, page_slots=slots, max_rows=CPU_ROWS) for n in lengths}


def _codecs(spec: ModelSpec, state_dtype: str, places: list[Place]) -> dict[str, Any]:
    from kvasir.kv.codec import CODECS
    from kvasir.technique import of_all

    return dict(
        sorted(
            of_all(CODECS, lambda name: (name, _codec(spec, name, state_dtype, places))),
            key=lambda found: found[0] != CacheConfig().kv_codec,
        )
    )


def _codec(spec: ModelSpec, name: str, state_dtype: str, places: list[Place]) -> dict[str, Any]:
    """Bytes per token of a codec with default options, scales included, or the reason why it cannot serve the model."""
    item = BYTES[places[0].dtype]
    try:
        sizes = token_bytes(spec.cache_groups(), name, item)
        fits = {place.name: _fits(spec, place, name, state_dtype) for place in places}
    except ConfigError as e:
        return {"cannot": str(e)}
    total, plain = sum(sizes.values()), sum(cost.kv_bytes_per_token(spec, item).values())
    return {"kv_bytes_per_token": total, "ratio": plain / total, "fits": fits}


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


def _mtp(path: Path, spec: ModelSpec) -> list[str]:
    """A line for the MTP layer that a checkpoint brings and a drafter may use; none: it brings none, or no weights."""
    from kvasir.models.loader import brings_mtp
    from kvasir.models.mtp_fields import layer_of

    try:
        return [f"{len(spec.layers)}: {_line(layer_of(spec))}; MTP, for --drafter mtp"] if brings_mtp(path) else []
    except ConfigError:
        return []


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


def run(as_json: bool, *args: Any) -> None:
    """Print what ``describe`` finds, as tables or as JSON."""
    facts = describe(*args)
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
    kind = "quantised" if facts["quantised"] else f"in {facts['dtype']}"
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
    for i, line in enumerate(facts["tiers"]):
        table.add_row("" if i else "tiers", line)
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
    pool = facts["cpu_cache_bytes"]
    gpu_dtype = list(facts["dtypes"].values())[-1]
    console.print(
        "\nSequences that fit in addition to the weights, by context length"
        + (
            f", in the pool that `kvasir serve` makes here (--cpu-cache-bytes), and for GPUs, in {gpu_dtype},"
            if pool is not None
            else ","
        )
        + f" in {SHARE:.0%} of the memory (without a step's own needs):"
    )
    console.print(fits)
    console.print(f"\nThe same for sequences of {context:,} tokens, by storage format of keys and values:")
    console.print(codecs)
    for name, found in facts["codecs"].items():
        if "cannot" in found:
            console.print(f"{name}: {found['cannot']}", highlight=False, markup=False)
    console.print(f"\nTo serve it {'on this CPU' if pool is not None else 'with ' + next(iter(facts['fits']))}:")
    for line in facts["advice"]:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
