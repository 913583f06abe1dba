"""On a machine with an NVIDIA GPU: every attention kernel against its reference, and timings of the ways to build each.

    python tools/gpu_attention.py RESULT.json [--skip-checks]

Llama-8B's heads (32 query, 8 KV, 128 wide), bf16. Everything is timed inside CUDA graphs, over as many layers as keep the
L2 cache from holding the keys. Exit status 1 when a check failed.
"""

# ruff: noqa: B023  closures over loop variables are called before the loop goes on
from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention.backend import Site  # noqa: E402
from kvasir.attention.backends.triton import TritonBackend  # noqa: E402
from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.kernels import decode_attention as decode  # noqa: E402
from kvasir.kernels import dense_attention as dense  # noqa: E402
from kvasir.kernels import paged_attention as paged  # noqa: E402
from tests.kernels.check import check_decode_attention, check_dense_attention, check_paged_attention  # noqa: E402
from tools.gpu_kernels import DIM, GROUPS, HEADS, SIZE, SPEC, copy_bandwidth, graph_of, make_pool, matmul_rate, timed  # noqa: E402

MIXED = [(int(32767 * (i / 31) ** 3), 1) for i in range(32)]  # 1 .. 32k, most of them short
DECODES = {
    "1 x 128": [(127, 1)],
    "1 x 32k": [(32767, 1)],
    "8 x 1k": [(1023, 1)] * 8,
    "64 x 1k": [(1023, 1)] * 64,
    "256 x 1k": [(1023, 1)] * 256,
    "16 x 32k": [(32767, 1)] * 16,
    "32 mixed to 32k": MIXED,
}
PREFILLS = {"1 x 1k": [(0, 1024)], "1 x 8k": [(0, 8192)], "4 x 8k": [(0, 8192)] * 4, "2k at 30k": [(30720, 2048)]}
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
CHECKS = {
    "decode": (decode.grid, check_decode_attention),
    "dense": (dense.grid, check_dense_attention),
    "paged": (paged.grid, check_paged_attention),
}


# ------------------------------------------------------------------------------------------------------- checks, in parallel


def check_case(op: str, dtype: torch.dtype, index: int) -> tuple[float, str]:
    """The error of one case of a grid, and what failed."""
    cases, check = CHECKS[op]
    case = list(cases())[index]
    try:
        return check(case, dtype, "cuda")["kernel"], ""
    except Exception as e:  # a failed compile or launch is a result, too
        return float("inf"), f"{op} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}"


def compile_decode(shape: decode.Shape, count: int) -> None:
    """Into Triton's cache on disk, so that timing does not wait for it."""
    pool, batch = make_pool([(40, 1)] * count, 1)
    prepared = backend()
    prepared.plan(batch)
    run_decode(torch.zeros(count, HEADS, DIM, dtype=torch.bfloat16, device="cuda"), pool, prepared, batch, shape)


def compile_dense(shape: dense.Shape) -> None:
    pool, batch = make_pool([(0, 256)], 1)
    run_dense(torch.zeros(256, HEADS, DIM, dtype=torch.bfloat16, device="cuda"), pool, batch, shape)


def in_parallel() -> list[dict]:
    """All grids, and the compiling of what is timed later."""
    with ProcessPoolExecutor(
        min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as processes:
        compiling = [
            processes.submit(compile_decode, shape, count)
            for shape in DECODE_SHAPES
            for count in (1, 64, 256)
            if shape.programs == 12
        ] + [processes.submit(compile_dense, shape) for shape in DENSE_SHAPES]
        checking = {
            processes.submit(check_case, op, dtype, i): (op, dtype)
            for op, (cases, _) in CHECKS.items()
            for dtype in (torch.bfloat16, torch.float16, *([] if op == "dense" else [torch.float32]))
            for i in range(len(list(cases())))
        }
        return gathered(checking, compiling)


def gathered(checking: dict[Future, tuple[str, torch.dtype]], compiling: list[Future]) -> list[dict]:
    """Wait for the cases of grids (``check_case``) and for what is compiled. An arm of each grid and type; printed, too."""
    outcome: dict[tuple, list[tuple[float, str]]] = {}
    for done in as_completed(checking):
        outcome.setdefault(checking[done], []).append(done.result())
    for done in compiling:
        if done.exception() is not None:
            print("does not run:", str(done.exception())[:300], flush=True)
    arms = []
    for (op, dtype), found in outcome.items():
        failed = [text for _, text in found if text]
        arms.append(
            arm(
                f"{op} grid",
                {"dtype": str(dtype)},
                {
                    "cases": len(found),
                    "failed": len(failed),
                    "worst_error": max((e for e, text in found if not text), default=None),
                },
            )
        )
        print(arms[-1]["name"], dtype, arms[-1]["metrics"], *failed[:6], sep="\n  ", flush=True)
    return arms


def check_replays() -> dict:
    """A captured step is replayed with other contexts and must give what eager launches give, bit for bit, each of many times:
    the merge by the program that arrives last is where an ordering mistake would show."""
    spans = [(9000, 1)] * 12
    pool, batch = make_pool(spans, 1)
    chosen, q = backend(), torch.randn(len(spans), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
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
    return arm(
        "replays of a captured step",
        {"replays": 1000},
        {"failed": failed + int(not worst < 2e-2), "worst_error": worst},
    )


def check_exact() -> dict:
    """Bits of rows alone, in company, whole and in chunks."""
    chosen = backend(exact=True)
    pool, batch = make_pool([(0, 3000), (2500, 1)], 1)
    q = torch.randn(3001, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
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
    return arm("exact mode: same bits", {"comparisons": 5}, {"failed": failed})


# ------------------------------------------------------------------------------------------------------------------- timings


def backend(exact: bool = False) -> TritonBackend:
    chosen, site = TritonBackend(), Site("cuda", torch.bfloat16, "plain", SIZE, (SPEC,), exact)
    assert not chosen.why_not(site), chosen.why_not(site)
    chosen.prepare(site)
    return chosen


def common(q: torch.Tensor, pool, layer: int, batch) -> tuple:
    planes = pool.layer(layer).planes
    return q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start


def run_decode(q: torch.Tensor, pool, prepared: TritonBackend, batch, shape: decode.Shape, layers: int = 1) -> None:
    (step,) = batch.scratch.values()
    for layer in range(layers):
        decode.decode_attention_triton(
            *common(q, pool, layer, batch), step.rows, SPEC.scale, torch.empty_like(q), shape=shape
        )


def run_dense(q: torch.Tensor, pool, batch, shape: dense.Shape, layers: int = 1) -> None:
    long = dense.plan_long(batch.starts, batch.lengths, list(range(len(batch.lengths))), HEADS // GROUPS, "cuda", shape)
    for layer in range(layers):
        dense.dense_attention_triton(*common(q, pool, layer, batch), long, SPEC.scale, torch.empty_like(q))


def run_general(q: torch.Tensor, pool, batch, tiles: list, layers: int) -> None:
    for layer in range(layers):
        paged.paged_attention_triton(*common(q, pool, layer, batch), tiles, SPEC.scale, torch.empty_like(q))


def graph_us(run, layers: int) -> float | None:
    """Microseconds a layer of ``run()``, replayed as a CUDA graph. None: it does not run."""
    try:
        return timed(graph_of(run).replay, 5) / layers * 1e6
    except Exception as e:
        print("does not run:", type(e).__name__, str(e)[:200], flush=True)
        return None


def decode_arms(name: str, spans: list[tuple[int, int]]) -> list[dict]:
    keys = sum(s + n for s, n in spans)
    kv_bytes = 2 * keys * GROUPS * DIM * 2
    layers = max(1, min(256, (256 << 20) // kv_bytes))
    pool, batch = make_pool(spans, layers)
    q = torch.randn(len(spans), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    arms = []

    def add(variant: str, config: dict, us: float | None) -> None:
        if us is not None:
            metrics = {"us": round(us, 2), "TB_per_s": round((kv_bytes + 2 * q.nbytes) / us / 1e6, 3)}
            arms.append(arm(f"decode {name}", {"variant": variant, "layers": layers, **config}, metrics))
            print(f"decode {name}", variant, config, metrics, flush=True)

    def engine(exact: bool) -> None:
        chosen = backend(exact)
        chosen.plan(batch)
        add(
            "exact" if exact else "as chosen",
            {},
            graph_us(lambda: [chosen.run(q, pool.layer(i), SPEC, batch) for i in range(layers)], layers),
        )

    engine(exact=True)
    engine(exact=False)
    for shape in DECODE_SHAPES:
        add(
            "decode",
            dataclasses.asdict(shape),
            graph_us(lambda: run_decode(q, pool, None, batch, shape, layers), layers),
        )
    tiles = paged.plan_tiles(batch.starts, batch.lengths, HEADS, GROUPS, torch.bfloat16, "cuda")
    add("general", {}, graph_us(lambda: run_general(q, pool, batch, tiles, layers), layers))
    return arms


def layout_arms(spans: list[tuple[int, int]]) -> list[dict]:
    """16 x 32k in a pool of 32 layers, as the engine lays it out: a page's layers side by side, its next page 2 MiB away."""
    kv_bytes = 2 * sum(s + n for s, n in spans) * GROUPS * DIM * 2
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 34 * kv_bytes:
        return []
    pool, batch = make_pool(spans, 32)
    q, chosen = torch.randn(len(spans), HEADS, DIM, device="cuda", dtype=torch.bfloat16), backend()
    chosen.plan(batch)
    rows, arms = next(iter(batch.scratch.values())).rows, []

    def built(shape: decode.Shape | None) -> None:
        for layer in range(0, 32, 4):
            decode.decode_attention_triton(
                *common(q, pool, layer, batch), rows, SPEC.scale, torch.empty_like(q), shape=shape
            )

    for shape in (None, *DECODE_SHAPES):
        us = graph_us(lambda: built(shape), 8)
        if us is not None:
            config = {"variant": "as chosen"} if shape is None else {"variant": "decode", **dataclasses.asdict(shape)}
            arms.append(
                arm(
                    "decode 16 x 32k, pages of 32 layers",
                    config,
                    {"us": round(us, 2), "TB_per_s": round(kv_bytes / us / 1e6, 3)},
                )
            )
            print(arms[-1], flush=True)
    return arms


def prefill_arms(name: str, spans: list[tuple[int, int]]) -> list[dict]:
    rows = sum(n for _, n in spans)
    flops = 4 * HEADS * DIM * sum(n * s + n * (n + 1) // 2 for s, n in spans)
    pool, batch = make_pool(spans, 1)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    arms = []

    def add(variant: str, config: dict, us: float | None) -> None:
        if us is not None:
            metrics = {"us": round(us, 1), "TFLOP_per_s": round(flops / us / 1e6, 1)}
            arms.append(arm(f"prefill {name}", {"variant": variant, **config}, metrics))
            print(f"prefill {name}", variant, config, metrics, flush=True)

    for exact in (False, True):
        chosen = backend(exact)
        chosen.plan(batch)
        add("exact" if exact else "as chosen", {}, graph_us(lambda: chosen.run(q, pool.layer(0), SPEC, batch), 1))
    for shape in DENSE_SHAPES:
        # The plan copies tiles to the device, which a graph may not: it is made outside.
        long = dense.plan_long(batch.starts, batch.lengths, list(range(len(spans))), HEADS // GROUPS, "cuda", shape)
        add(
            "dense",
            dataclasses.asdict(shape),
            graph_us(
                lambda: dense.dense_attention_triton(*common(q, pool, 0, batch), long, SPEC.scale, torch.empty_like(q)),
                1,
            ),
        )
    long = dense.plan_long(batch.starts, batch.lengths, list(range(len(spans))), HEADS // GROUPS, "cuda", dense.Shape.of(DIM))
    k, v = torch.empty(2, GROUPS * long.slots, DIM, device="cuda", dtype=torch.bfloat16)
    add(
        "the copy alone",
        {},
        graph_us(lambda: dense.gather_pages(*common(q, pool, 0, batch)[1:], long, 0, GROUPS, k, v), 1),
    )
    tiles = paged.plan_tiles(batch.starts, batch.lengths, HEADS, GROUPS, torch.bfloat16, "cuda")
    add("general", {}, graph_us(lambda: run_general(q, pool, batch, tiles, 1), 1))
    start, length = spans[0]
    q_B = torch.randn(len(spans), HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    k_B = torch.randn(len(spans), GROUPS, length, DIM, device="cuda", dtype=torch.bfloat16)
    context_B = torch.randn(len(spans), GROUPS, start, DIM, device="cuda", dtype=torch.bfloat16) if start else None
    for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def sdpa(
            kind=kind,
        ) -> None:  # the context apart from the chunk, as a backend would have to; without the copy and the merge
            with sdpa_kernel([kind]):
                scaled_dot_product_attention(q_B, k_B, k_B, is_causal=True, enable_gqa=True)
                if context_B is not None:
                    scaled_dot_product_attention(q_B, context_B, context_B, enable_gqa=True)

        add(f"torch {kind.name} over dense keys", {}, graph_us(sdpa, 1))
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    began, arms = time.monotonic(), []
    if not options.skip_checks:
        arms += in_parallel()
        for check in (check_replays, check_exact):
            arms.append(check())
            print(arms[-1], flush=True)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    limits = {"copy_GB_per_s": round(bandwidth / 1e9), "bf16_TFLOP_per_s": round(rate / 1e12), "failed_checks": failed}
    work = [lambda n=n, s=s: decode_arms(n, s) for n, s in DECODES.items()] + [
        lambda n=n, s=s: prefill_arms(n, s) for n, s in PREFILLS.items()
    ]
    for part in [*work, lambda: layout_arms(DECODES["16 x 32k"])]:
        arms += part()
        # After every part, so that a time limit costs the rest only.
        options.output.write_text(as_json(result("gpu_attention", arms, limits=limits)))
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    print(limits)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
