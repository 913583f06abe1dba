"""On a machine with an NVIDIA GPU: the kernels of the quantised caches against their references, and timings beside bf16.

    python tools/gpu_kv.py RESULT.json [--skip-checks]

Llama-8B's heads (32 query, 8 KV, 128 wide), bf16 queries. Everything is timed inside CUDA graphs, over as many layers as
keep the L2 cache from holding the keys. Exit status 1 when a check failed.
"""

# ruff: noqa: B023
from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention.backend import Site  # noqa: E402
from kvasir.attention.backends.triton import TritonBackend  # noqa: E402
from kvasir.bench.result import arm, result  # noqa: E402
from kvasir.kernels import decode_attention, quantized_decode, quantized_qkv  # noqa: E402
from kvasir.kernels.fused_qkv import HeadOps  # noqa: E402
from kvasir.kv.codec import Codec  # noqa: E402
from kvasir.kv.pool import KVPool  # noqa: E402
from kvasir.layers.rope import RopeTable  # noqa: E402
from kvasir.layers.spec import RopeSpec  # noqa: E402
from kvasir.technique import load  # noqa: E402
from kvasir.types import CacheGroup  # noqa: E402
from tests.kernels.check_quantized import check_quantized_decode, check_quantized_qkv  # noqa: E402
from tools.gpu_attention import graph_us  # noqa: E402
from tools.gpu_kernels import DIM, GROUPS, HEADS, SPEC, copy_bandwidth, make_batch  # noqa: E402

DECODES = {"1 x 128": [(127, 1)], "1 x 32k": [(32767, 1)], "8 x 1k": [(1023, 1)] * 8, "64 x 1k": [(1023, 1)] * 64, "16 x 32k": [(32767, 1)] * 16}
CODECS = ("plain", "fp8", "int8", "int4_bdr")
SHAPES = [(64, 1, 3, 20, 10), (64, 1, 3, 40, 10), (64, 1, 3, 10, 8), (64, 1, 4, 20, 8), (32, 1, 3, 24, 12), (32, 1, 4, 24, 12), (64, 2, 3, 14, 7),
          (64, 2, 3, 7, 7), (64, 2, 4, 14, 5), (64, 4, 3, 9, 3), (128, 4, 3, 6, 2), (128, 4, 3, 2, 2), (128, 2, 3, 8, 4)]
CHECKS = {"write": (quantized_qkv.grid, check_quantized_qkv), "decode": (quantized_decode.grid, check_quantized_decode)}
SIZE = {"plain": 16, "fp8": 32, "int8": 32, "int4_bdr": 64}


def check_case(op: str, dtype: torch.dtype, index: int) -> tuple[float, str]:
    cases, check = CHECKS[op]
    case = list(cases())[index]
    try:
        return check(case, dtype, "cuda"), ""
    except Exception as e:  # a failed compile or launch is a result, too
        return float("inf"), f"{op} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}"


def in_parallel() -> list[dict]:
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as processes:
        checking = {processes.submit(check_case, op, dtype, i): (op, dtype) for op, (cases, _) in CHECKS.items()
                    for dtype in (torch.bfloat16, torch.float16) for i in range(len(list(cases())))}
        outcome: dict[tuple, list[tuple[float, str]]] = {}
        for done in as_completed(checking):
            outcome.setdefault(checking[done], []).append(done.result())
    arms = []
    for (op, dtype), found in outcome.items():
        failed = [text for _, text in found if text]
        arms.append(arm(f"{op} grid", {"dtype": str(dtype)}, {"cases": len(found), "failed": len(failed), "worst_error": max(e for e, _ in found)}))
        print(arms[-1]["name"], dtype, arms[-1]["metrics"], *failed[:6], sep="\n  ", flush=True)
    return arms


def make_pool(name: str, spans: list[tuple[int, int]], layers: int) -> tuple[KVPool, object]:
    """Pages of random rows in random order."""
    size, codec = SIZE[name], load("kvasir.kv.codecs", name, Codec)
    counts = [-(-(s + n) // size) for s, n in spans]
    pool = KVPool([CacheGroup("full", tuple(range(layers)), GROUPS, DIM)], codec, [1 + sum(counts)], size, "cuda", torch.bfloat16)
    for layer in range(layers):
        planes = pool.layer(layer).planes
        for side in "kv":
            if name == "plain":
                planes[side].normal_()
            elif name == "fp8":
                planes[side].view(torch.uint8).random_(0, 120)
            else:
                planes[side].random_(0, 256)
            if name != "plain":
                planes[side + "_meta"].uniform_(0.01, 0.02)
    order = (1 + torch.randperm(sum(counts))).to(torch.int32)
    tables = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True)
    return pool, make_batch(spans, tables.contiguous().cuda(), size)


def decode_arms(case: str, spans: list[tuple[int, int]], name: str, tune: bool) -> list[dict]:
    arms, codec = [], load("kvasir.kv.codecs", name, Codec)
    row_bytes = sum(p.width * p.dtype.itemsize for p in codec.planes(DIM, torch.bfloat16))
    kv_bytes = sum(s + n for s, n in spans) * GROUPS * row_bytes
    layers = max(1, min(256, (256 << 20) // kv_bytes))
    pool, batch = make_pool(name, spans, layers)
    caches = [pool.layer(i) for i in range(layers)]
    q = torch.randn(len(spans), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    chosen, site = TritonBackend(), Site("cuda", torch.bfloat16, codec.kernel, SIZE[name], (SPEC,))
    chosen.prepare(site)
    chosen.plan(batch)
    (step,) = batch.scratch.values()

    def built(shape: decode_attention.Shape) -> None:
        for cache in caches:
            quantized_decode.quantized_decode_triton(q, cache.planes, codec.kernel, batch.tables[0], batch.context, batch.row_start, step.rows,
                                                     SPEC.scale, torch.empty_like(q), shape=shape)

    variants = [({}, graph_us(lambda: [chosen.run(q, cache, SPEC, batch) for cache in caches], layers))]
    for shape in [decode_attention.Shape(*numbers) for numbers in SHAPES] if tune and name != "plain" else []:
        variants.append((dataclasses.asdict(shape), graph_us(lambda: built(shape), layers)))
    for config, us in variants:
        if us is not None:
            arms.append(arm(f"decode {case}", {"codec": name, **config}, {"us": round(us, 2), "TB_per_s": round(kv_bytes / us / 1e6, 3)}))
            print(arms[-1]["name"], arms[-1]["config"], arms[-1]["metrics"], flush=True)
    return arms


def write_arms() -> list[dict]:
    """The fused write of 1, 64 and 2048 rows."""
    arms, table = [], RopeTable(RopeSpec(500000.0, DIM), 4096, torch.device("cuda")).table
    for rows in (1, 64, 2048):
        for name in CODECS:
            pool, _ = make_pool(name, [(rows, 1)], 1)
            heads = torch.randn(rows, HEADS + 2 * GROUPS, DIM, device="cuda", dtype=torch.bfloat16)
            positions, slots = torch.arange(rows, device="cuda"), SIZE[name] + torch.arange(rows, device="cuda")
            cache = pool.layer(0)
            us = graph_us(lambda: [cache.codec.write_fused(cache, heads, HeadOps(HEADS, table, positions), slots) for _ in range(20)], 20)
            if us is not None:
                arms.append(arm(f"write {rows} rows", {"codec": name}, {"us": round(us, 2)}))
                print(arms[-1]["name"], name, arms[-1]["metrics"], flush=True)
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    arms = [] if options.skip_checks else in_parallel()
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    for case, spans in DECODES.items():
        for name in CODECS:
            arms += decode_arms(case, spans, name, tune=case in ("16 x 32k", "1 x 128"))
            torch.cuda.empty_cache()
    arms += write_arms()
    best = {a["config"]["codec"]: a["metrics"]["us"] for a in reversed(arms) if a["name"] == "decode 16 x 32k" and len(a["config"]) == 1}
    ratios = {f"decode 16 x 32k, {name} over bf16": round(best["plain"] / us, 3) for name, us in best.items()}
    print(ratios)
    options.output.write_text(json.dumps(result("kv-codec-kernels", arms, ratios=ratios,
                                                limits={"copy_GB_per_s": round(copy_bandwidth() / 1e9), "failed_checks": failed}), indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
