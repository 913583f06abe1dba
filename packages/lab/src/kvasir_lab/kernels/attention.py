"""Check the attention kernels over plain pages, and time the ways to build each.

Decodes, prompts and chunks at Llama-8B's heads in bf16, as CUDA graphs, over as many layers as keep the L2 cache from
holding the keys. "as chosen" and "exact" are what the engine runs, the other arms are other shapes of the kernels.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvasir.attention.backends.triton import TritonBackend
from kvasir.kernels import decode_attention as decode
from kvasir.kernels import dense_attention as dense
from kvasir.kernels import paged_attention as paged
from kvasir.kv.pool import KVPool
from kvasir.types import StepBatch
from kvasir_lab.kernels.frame import (
    ALL_TYPES,
    BF16,
    Grid,
    Report,
    check_grids,
    graph_seconds,
    measure_limits,
    tried,
)
from kvasir_lab.kernels.pages import (
    DIM,
    GROUPS,
    HEADS,
    SIZE,
    SPEC,
    Spans,
    attention_flops,
    attention_inputs,
    backend,
    cold_layers,
    key_bytes,
    make_pool,
    queries,
)
from tests.kernels.check import check_decode_attention, check_dense_attention, check_paged_attention

MOST_LAYERS = 256
MIXED = [(int(32767 * (i / 31) ** 3), 1) for i in range(32)]  # 1 .. 32k, most of them short
DECODES: dict[str, Spans] = {
    "1 x 128": [(127, 1)],
    "1 x 32k": [(32767, 1)],
    "8 x 1k": [(1023, 1)] * 8,
    "64 x 1k": [(1023, 1)] * 64,
    "256 x 1k": [(1023, 1)] * 256,
    "16 x 32k": [(32767, 1)] * 16,
    "32 mixed to 32k": MIXED,
}
PREFILLS: dict[str, Spans] = {
    "1 x 1k": [(0, 1024)],
    "1 x 8k": [(0, 8192)],
    "4 x 8k": [(0, 8192)] * 4,
    "2k at 30k": [(30720, 2048)],
}
DECODE_SHAPES = [
    decode.Shape(*shape)
    for shape in (  # the first ones differ in how work is cut only
        (64, 4, 3, 12, 3),
        (64, 4, 3, 3, 3),
        (64, 4, 3, 6, 3),
        (64, 4, 3, 24, 3),
        (64, 4, 3, 12, 6),
        (64, 4, 2, 12, 4),
        (64, 4, 4, 12, 2),
        (64, 2, 3, 12, 3),
        (32, 2, 4, 12, 4),
        (32, 4, 4, 12, 3),
        (128, 4, 2, 12, 2),
        (128, 8, 3, 12, 1),
        (128, 8, 2, 12, 2),
    )
]
DENSE_SHAPES = [
    dense.Shape(*shape)
    for shape in (
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 4, 3),
        (128, 64, 4, 2),
    )
]
GRIDS = {
    "decode": Grid(decode.grid, check_decode_attention, ALL_TYPES),
    "dense": Grid(dense.grid, check_dense_attention, {torch.bfloat16: 1, torch.float16: 1}),
    "paged": Grid(paged.grid, check_paged_attention, ALL_TYPES),
}


# -------------------------------------------------------------------------------------------------------------- checks


def compile_decode(shape: decode.Shape, count: int) -> None:
    """Into Triton's cache on disk, so that timing does not wait for it."""
    spans = [(40, 1)] * count
    pool, batch = make_pool(spans, 1)
    prepared = backend()
    prepared.plan(batch)
    run_decode(queries(spans), pool, batch, shape)


def compile_dense(shape: dense.Shape) -> None:
    """Into Triton's cache on disk."""
    pool, batch = make_pool([(0, 256)], 1)
    long = dense.plan_long(batch.starts, batch.lengths, [0], HEADS // GROUPS, "cuda", shape)
    q = queries([(0, 256)])
    dense.dense_attention_triton(*attention_inputs(q, pool, 0, batch), long, SPEC.scale, torch.empty_like(q))


def to_compile() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Kernels that are timed later. Shapes that differ only in how work is cut share a kernel."""
    decodes = [
        (compile_decode, (shape, count)) for shape in DECODE_SHAPES for count in (1, 64, 256) if shape.programs == 12
    ]
    return [*decodes, *((compile_dense, (shape,)) for shape in DENSE_SHAPES)]


def check_replays(report: Report) -> None:
    """A captured step, replayed with other contexts: the bits of eager launches, each of many times.

    The program that arrives last merges, so a mistake in the order would show here.
    """
    spans = [(9000, 1)] * 12
    pool, batch = make_pool(spans, 1)
    chosen, q = backend(), queries(spans)
    chosen.plan(batch)
    chosen.run(q, pool.layer(0), SPEC, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chosen.run(q, pool.layer(0), SPEC, batch)
    failed, worst, draw = 0, 0.0, torch.Generator().manual_seed(1)
    for trial in range(20):
        contexts = torch.randint(0, 9001 if trial % 2 else 40, (len(spans),), generator=draw, dtype=torch.int32)
        batch.context.copy_(contexts)
        want = chosen.run(q, pool.layer(0), SPEC, batch)
        cache = pool.layer(0).planes
        right, _ = paged.paged_attention_ref(
            q.float(), cache["k"], cache["v"], batch.tables[0], contexts.tolist(), [1] * len(spans), SPEC.scale
        )
        worst = max(worst, float((want.float() - right).abs().max()))
        for _ in range(50):
            graph.replay()
            failed += int(not torch.equal(out, want))
    report.add(
        "replays of a captured step",
        {"replays": 1000},
        {"failed": failed + int(not worst < 2e-2), "worst_error": worst},
    )


def check_exact(report: Report) -> None:
    """Exact mode: a row has the same bits alone, in company, in a whole prompt and in its chunks."""
    chosen = backend(exact=True)
    pool, batch = make_pool([(0, 3000), (2500, 1)], 1)
    q = torch.randn(3001, HEADS, DIM, dtype=BF16, device="cuda")
    q[3000] = q[2500]
    chosen.plan(batch)
    # Both spans read the first one's pages, so that the second is the first one's row 2500 as a decode.
    batch.tables[0][1] = batch.tables[0][0]
    whole = chosen.run(q, pool.layer(0), SPEC, batch)
    failed = int(not torch.equal(whole[3000], whole[2500]))
    for start, length in ((0, 700), (700, 1), (701, 299), (1000, 2000)):
        context, row_start = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([start], [0, length]))
        alone = dataclasses.replace(
            batch,
            starts=[start],
            lengths=[length],
            scratch={},
            tables=(batch.tables[0][:1, : -(-(start + length) // SIZE)],),
            context=context,
            row_start=row_start,
            input_ids=batch.input_ids[:length],
            positions=batch.positions[start : start + length],
        )
        chosen.plan(alone)
        failed += int(
            not torch.equal(
                chosen.run(q[start : start + length], pool.layer(0), SPEC, alone), whole[start : start + length]
            )
        )
    report.add("exact mode: same bits", {"comparisons": 5}, {"failed": failed})


# ------------------------------------------------------------------------------------------------------------- timings


def run_decode(q: torch.Tensor, pool: KVPool, batch: StepBatch, shape: decode.Shape, layers: int = 1) -> None:
    (step,) = batch.scratch.values()
    for layer in range(layers):
        decode.decode_attention_triton(
            *attention_inputs(q, pool, layer, batch), step.rows, SPEC.scale, torch.empty_like(q), shape=shape
        )


def run_general(q: torch.Tensor, pool: KVPool, batch: StepBatch, tiles: list[Any], layers: int) -> None:
    """The kernel that takes every span, whatever its length."""
    for layer in range(layers):
        paged.paged_attention_triton(*attention_inputs(q, pool, layer, batch), tiles, SPEC.scale, torch.empty_like(q))


def run_backend(chosen: TritonBackend, q: torch.Tensor, pool: KVPool, batch: StepBatch, layers: int) -> None:
    for layer in range(layers):
        chosen.run(q, pool.layer(layer), SPEC, batch)


class Variants:
    """Arms of one case. ``describe(us)``: the metrics of a layer that takes ``us`` microseconds."""

    def __init__(self, report: Report, case: str, layers: int, describe: Callable[[float], dict[str, Any]]) -> None:
        self.report, self.case, self.layers, self.describe = report, case, layers, describe

    def add(self, variant: str, run: Callable[[], Any], config: dict[str, Any] | None = None) -> None:
        """Time ``run``, which does all layers. One that does not run is left out."""
        found = tried((self.case, variant, config), lambda: graph_seconds(run, 5))
        if found is not None:
            metrics = self.describe(found / self.layers * 1e6)
            self.report.add(self.case, {"variant": variant, "layers": self.layers, **(config or {})}, metrics)


def decode_arms(report: Report, name: str, spans: Spans) -> None:
    layers = cold_layers(spans, MOST_LAYERS)
    pool, batch = make_pool(spans, layers)
    q = queries(spans)
    moved = key_bytes(spans) + 2 * q.nbytes
    arms = Variants(
        report, f"decode {name}", layers, lambda us: {"us": round(us, 2), "TB_per_s": round(moved / us / 1e6, 3)}
    )
    for exact in (True, False):  # the last plan is the one that the shapes below use
        chosen = backend(exact)
        chosen.plan(batch)
        arms.add("exact" if exact else "as chosen", lambda: run_backend(chosen, q, pool, batch, layers))
    for shape in DECODE_SHAPES:
        arms.add("decode", lambda: run_decode(q, pool, batch, shape, layers), dataclasses.asdict(shape))
    tiles = paged.plan_tiles(batch.starts, batch.lengths, HEADS, GROUPS, BF16, "cuda")
    arms.add("general", lambda: run_general(q, pool, batch, tiles, layers))


def layout_arms(report: Report, spans: Spans) -> None:
    """Time 16 x 32k in a pool of 32 layers, as the engine has it: layers of a page side by side, pages 2 MiB apart."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 34 * key_bytes(spans):
        print("the pool of 32 layers does not fit", flush=True)
        return
    pool, batch = make_pool(spans, 32)
    q, chosen, read = queries(spans), backend(), range(0, 32, 4)
    chosen.plan(batch)
    (step,) = batch.scratch.values()

    def built(shape: decode.Shape | None) -> None:
        for layer in read:
            inputs = attention_inputs(q, pool, layer, batch)
            decode.decode_attention_triton(*inputs, step.rows, SPEC.scale, torch.empty_like(q), shape=shape)

    moved = key_bytes(spans)
    arms = Variants(
        report,
        "decode 16 x 32k, pages of 32 layers",
        len(read),
        lambda us: {"us": round(us, 2), "TB_per_s": round(moved / us / 1e6, 3)},
    )
    arms.add("as chosen", lambda: built(None))
    for shape in DECODE_SHAPES:
        arms.add("decode", lambda: built(shape), dataclasses.asdict(shape))


def prefill_arms(report: Report, name: str, spans: Spans) -> None:
    pool, batch = make_pool(spans, 1)
    q, flops, group = queries(spans), attention_flops(spans), HEADS // GROUPS
    arms = Variants(
        report, f"prefill {name}", 1, lambda us: {"us": round(us, 1), "TFLOP_per_s": round(flops / us / 1e6, 1)}
    )
    for exact in (False, True):
        chosen = backend(exact)
        chosen.plan(batch)
        arms.add("exact" if exact else "as chosen", lambda: run_backend(chosen, q, pool, batch, 1))
    inputs, every = attention_inputs(q, pool, 0, batch), list(range(len(spans)))
    for shape in DENSE_SHAPES:
        # The plan copies tiles to the device, which a graph may not: it is made outside.
        long = dense.plan_long(batch.starts, batch.lengths, every, group, "cuda", shape)
        arms.add(
            "dense",
            lambda: dense.dense_attention_triton(*inputs, long, SPEC.scale, torch.empty_like(q)),
            dataclasses.asdict(shape),
        )
    long = dense.plan_long(batch.starts, batch.lengths, every, group, "cuda", dense.Shape.of(128))
    k, v = torch.empty(2, GROUPS * long.slots, DIM, device="cuda", dtype=BF16)
    arms.add("the copy alone", lambda: dense.gather_pages(*inputs[1:], long, 0, GROUPS, k, v))
    tiles = paged.plan_tiles(batch.starts, batch.lengths, HEADS, GROUPS, BF16, "cuda")
    arms.add("general", lambda: run_general(q, pool, batch, tiles, 1))
    for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        arms.add(f"torch {kind.name} over dense keys", dense_keys(kind, spans))


def dense_keys(kind: SDPBackend, spans: Spans) -> Callable[[], None]:
    """Torch's attention. The context is apart from the chunk, as in a backend; the copy and the merge are left out."""
    start, length = spans[0]
    q_B = torch.randn(len(spans), HEADS, length, DIM, device="cuda", dtype=BF16)
    k_B = torch.randn(len(spans), GROUPS, length, DIM, device="cuda", dtype=BF16)
    context_B = torch.randn(len(spans), GROUPS, start, DIM, device="cuda", dtype=BF16) if start else None

    def run() -> None:
        with sdpa_kernel([kind]):
            scaled_dot_product_attention(q_B, k_B, k_B, is_causal=True, enable_gqa=True)
            if context_B is not None:
                scaled_dot_product_attention(q_B, context_B, context_B, enable_gqa=True)

    return run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_attention", options.output)
    if not options.skip_checks:
        check_grids(report, __name__, GRIDS, to_compile())
        check_replays(report)
        check_exact(report)
    measure_limits(report)
    for name, spans in DECODES.items():
        decode_arms(report, name, spans)
        report.save()
    for name, spans in PREFILLS.items():
        prefill_arms(report, name, spans)
        report.save()
    layout_arms(report, DECODES["16 x 32k"])
    return report.end()
