"""Time the engine's attention over pages against the GPU's limits; check a pool past 2^31 elements and the write.

Decodes and prompts at Llama-8B's heads in bf16, as CUDA graphs, over as many layers as keep the L2 cache from holding
the keys. ``share_of_limit``: the time that the memory or the matrix units need at least, over the time taken.
"""

from __future__ import annotations

import argparse

import torch

from kvasir.kernels import paged_attention as paged
from kvasir.kernels import store_kv as store
from kvasir_lab.kernels.frame import (
    ALL_TYPES,
    BF16,
    Grid,
    Report,
    check_grids,
    graph_seconds,
    measure_limits,
    timed,
)
from kvasir_lab.kernels.pages import (
    DIM,
    GROUPS,
    HEADS,
    SIZE,
    SPEC,
    Spans,
    attention_flops,
    backend,
    cold_layers,
    key_bytes,
    make_pool,
    queries,
)
from tests.kernels.check import check_paged_attention, check_store_kv

MOST_LAYERS = 32
SHAPES: dict[str, Spans] = {
    **{f"decode {n} x 1k": [(1023, 1)] * n for n in (1, 8, 64, 256)},
    "decode 16 x 32k": [(32767, 1)] * 16,
    "decode 1 x 32k": [(32767, 1)],
    "verify 8 x 8 x 1k": [(1016, 8)] * 8,
    "prefill 1 x 8k": [(0, 8192)],
    "chunk 2k at 30k": [(30720, 2048)],
    "mixed 64 x 1k + 2k": [(1023, 1)] * 64 + [(0, 2048)],
}
GRIDS = {
    "paged_attention": Grid(paged.grid, check_paged_attention, ALL_TYPES),
    "store_kv": Grid(store.grid, check_store_kv, ALL_TYPES),
}


def check_large_pool(report: Report) -> None:
    """Sequences whose pages all lie past 2^31 elements of a 32-layer pool."""
    spans = [(1000, 1), (37, 300)]
    pool, batch = make_pool(spans, 32, extra=(1 << 31) // (32 * 2 * GROUPS * SIZE * DIM) + 1)
    chosen, cache = backend(), pool.layer(31)
    rows = batch.input_ids.shape[0]
    k, v = torch.randn(2, rows, GROUPS, DIM, device="cuda", dtype=BF16)
    store.store_kv_triton(k, v, cache.planes["k"], cache.planes["v"], batch.slots[0])
    page, offset = batch.slots[0] // SIZE, batch.slots[0] % SIZE
    stored = torch.equal(cache.planes["k"][page, :, offset], k) and torch.equal(cache.planes["v"][page, :, offset], v)
    q = queries(spans)
    chosen.plan(batch)
    out = chosen.run(q, cache, SPEC, batch)
    want, _ = paged.paged_attention_ref(
        q.float(), cache.planes["k"], cache.planes["v"], batch.tables[0], batch.starts, batch.lengths, SPEC.scale
    )
    error = float((out.float() - want).abs().max())
    report.add(
        "pool past 2^31 elements",
        {"elements": pool.pages[0].numel() // 2},
        {"failed": int(not stored or not error < 2e-2), "worst_error": error},
    )


def time_shape(report: Report, name: str, spans: Spans, bandwidth: float, rate: float) -> None:
    layers = cold_layers(spans, MOST_LAYERS)
    pool, batch = make_pool(spans, layers)
    chosen, q = backend(), queries(spans)
    chosen.plan(batch)

    def run() -> None:
        for layer in range(layers):
            chosen.run(q, pool.layer(layer), SPEC, batch)

    graph, eager = graph_seconds(run, 10) / layers, timed(run, 10) / layers
    moved, flops = key_bytes(spans) + 2 * q.nbytes, attention_flops(spans)
    metrics = {
        "us": round(graph * 1e6, 2),
        "us_eager": round(eager * 1e6, 2),
        "GB_per_s": round(moved / graph / 1e9),
        "TFLOP_per_s": round(flops / graph / 1e12, 1),
        "share_of_limit": round(max(moved / bandwidth, flops / rate) / graph, 3),
    }
    if len(spans) == 1 and spans[0][0] == 0:
        q_1HTD = q.transpose(0, 1).unsqueeze(0).contiguous()
        k, v = torch.randn(2, 1, GROUPS, len(q), DIM, device="cuda", dtype=BF16)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        dense = timed(lambda: sdpa(q_1HTD, k, v, is_causal=True, enable_gqa=HEADS > GROUPS), 10)
        metrics["us_torch_sdpa_dense"] = round(dense * 1e6, 2)
    report.add(name, {"layers": layers, "splits": "auto"}, metrics)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_kernels", options.output)
    if not options.skip_checks:
        check_grids(report, __name__, GRIDS)
        check_large_pool(report)
    bandwidth, rate = measure_limits(report)
    for name, spans in SHAPES.items():
        time_shape(report, name, spans, bandwidth, rate)
    return report.end()
