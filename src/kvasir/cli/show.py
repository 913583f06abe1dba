"""``kvasir show MODEL``: its layers, the bytes of its weights and of each token, and what fits into a given memory."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from kvasir.engine.sizing import GIB, gib
from kvasir.models import checkpoint, cost
from kvasir.models.families import build_spec
from kvasir.models.spec import LayerSpec, ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXTS = (1024, 4096, 16384, 32768, 131072)


def describe(model: str, dtype: str, memory_gib: float | None) -> dict[str, Any]:
    path = checkpoint.resolve(model)
    spec = build_spec(checkpoint.read_config(path))
    item = BYTES[dtype]
    weights = cost.weight_bytes(spec, item)
    memory = memory_gib if memory_gib is not None else _memory() / GIB
    pool = max(0.0, 0.9 * memory * GIB - weights)
    fits = {n: int(pool // max(1, cost.kv_bytes(spec, n, item))) for n in CONTEXTS if n <= spec.max_position}
    return {"model": model or "embedded", "path": str(path), "dtype": dtype, "parameters": weights // item, "weight_bytes": weights,
            "kv_bytes_per_token": {g.name: cost.kv_bytes_per_token(spec, item)[g.name] for g in spec.cache_groups()},
            "flops_per_token": cost.flops_per_token(spec, 1), "max_model_len": spec.max_position, "memory_gib": round(memory, 1),
            "sequences_that_fit": fits, "layers": _layers(spec)}


def _layers(spec: ModelSpec) -> list[str]:
    """Runs of equal layers, one line each."""
    lines, at = [], 0
    for text, run in groupby(map(_line, spec.layers)):
        count = len(list(run))
        lines.append(f"{at}-{at + count - 1}: {text}" if count > 1 else f"{at}: {text}")
        at += count
    return lines


def _line(layer: LayerSpec) -> str:
    mixer, ffn = layer.mixer, layer.ffn
    window = f", window {mixer.window}" if mixer.window else ""
    body = f"{mixer.num_heads} query / {mixer.num_kv_heads} KV heads of {mixer.head_dim}{window}"
    experts = getattr(ffn, "num_experts", 0)
    return f"{body}; " + (f"{ffn.top_k} of {experts} experts of {ffn.intermediate_size}" if experts else f"FFN {ffn.intermediate_size}")


def _memory() -> int:
    """Bytes of the first GPU, else of RAM."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info(0)[1]
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run(model: str, dtype: str, memory_gib: float | None, as_json: bool) -> None:
    facts = describe(model, dtype, memory_gib)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", f"{facts['model']} ({facts['parameters'] / 1e6:,.1f}M parameters)")
    table.add_row("weights", f"{gib(facts['weight_bytes'])} in {dtype}")
    for name, size in facts["kv_bytes_per_token"].items():
        table.add_row(f"KV a token ({name})", f"{size:,} bytes")
    table.add_row("FLOPs a token", f"{facts['flops_per_token']:,.3g}")
    table.add_row("context", f"{facts['max_model_len']:,} tokens")
    for line in facts["layers"]:
        table.add_row("layers", line)
    for length, count in facts["sequences_that_fit"].items():
        table.add_row(f"fits in {facts['memory_gib']} GiB", f"{count:,} sequences of {length:,} tokens" if count else f"not one sequence of {length:,} tokens")
    Console().print(table)
