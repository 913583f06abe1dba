"""On a machine with an NVIDIA GPU: the mixture of experts and the batch-invariant product, checked and timed.

    python tools/gpu_moe.py RESULT.json [--skip-checks] [--sweep]

One layer of Qwen3-30B-A3B (bf16, random routing), router included, as a CUDA graph over several layers' weights, so that
neither launches nor the L2 cache flatter it; then the invariant product beside cuBLAS at Llama-8B's matrices. ``--sweep``
times other tilings, too. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpu_kernels import copy_bandwidth, graph_seconds, matmul_rate  # noqa: E402

from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.kernels import matmul, moe  # noqa: E402
from kvasir.kernels.moe import Tile, Tiling  # noqa: E402
from kvasir.layers.ffn.moe import FFN  # noqa: E402
from kvasir.layers.spec import MoESpec  # noqa: E402
from kvasir.layers.weights import Placement  # noqa: E402
from tests.kernels.check_moe import check_matmul, check_moe, check_row_bits, draw_case  # noqa: E402

DIM, SPEC, LAYERS = 2048, MoESpec(num_experts=128, top_k=8, intermediate_size=768, renormalize=True), 3
ROWS = (1, 2, 8, 16, 64, 256, 512, 2048, 8192)
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
WORKERS = 14
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SWEEP = {
    1: [moe.TILINGS[1][1]],
    8: [
        Tiling(Tile(16, n, d, warps, stages), Tile(16, 2 * n, down_d, warps, stages))
        for n, d, down_d, warps, stages in (
            (16, 128, 128, 4, 4),
            (32, 64, 64, 4, 6),
            (32, 256, 256, 4, 3),
            (64, 128, 128, 4, 3),
            (32, 128, 128, 8, 4),
            (16, 256, 256, 2, 4),
            (32, 128, 256, 4, 5),
        )
    ],
    64: [
        Tiling(Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 3)),
        Tiling(Tile(32, 32, 128, 4, 3), Tile(32, 64, 128, 4, 3)),
        Tiling(Tile(16, 32, 256, 4, 3), Tile(16, 64, 256, 4, 3)),
    ],
    512: [
        Tiling(Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3)),
        Tiling(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
        Tiling(Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3)),
        Tiling(Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 4, 4)),
        Tiling(Tile(64, 128, 64, 8, 3), Tile(64, 256, 64, 8, 3)),
        moe.TILINGS[-1][1],
    ],
    8192: [
        Tiling(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4)),
        Tiling(Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
        Tiling(Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
        Tiling(Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3)),
        Tiling(Tile(64, 128, 64, 8, 3), Tile(64, 256, 64, 8, 3)),
        Tiling(Tile(128, 128, 32, 8, 4), Tile(128, 128, 32, 4, 5)),
    ],
}


# ------------------------------------------------------------------------------------------------------------ checks


def check_share(op: str, dtype: torch.dtype, share: int) -> tuple[str, str, int, float, list[str]]:
    """Every ``WORKERS``-th case of a grid (float16 and float32: of every third case)."""
    cases, check = {
        "moe": (moe.grid, check_moe),
        "matmul": (matmul.grid, check_matmul),
        "bits": (bit_cases, check_bits),
        "qwen": (qwen_cases, check_moe),
    }[op]
    every = list(cases())
    mine = (every if dtype == torch.bfloat16 else every[::3])[share::WORKERS]
    worst, failed = 0.0, []
    for case in mine:
        try:
            worst = max(worst, (check(case, dtype, "cuda") or {}).get("kernel", 0.0))
        except Exception as e:  # a failed compile or launch is a result, too
            failed.append(f"{op} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}")
    return op, str(dtype), len(mine), worst, failed


def bit_cases() -> list[tuple]:
    return [*MATRICES.values(), "moe"]


def check_bits(case: tuple[int, int] | str, dtype: torch.dtype, device: str) -> None:
    """A row's bits, alone or in a batch: of the invariant product, and of the experts with the fixed tiling."""
    if case != "moe":
        return check_row_bits(case[1], case[0], (1, 8, 100, 129, 700), dtype, device)
    x, logits, gate_up, down = draw_case(moe.Case(rows=300, experts=16, top_k=4, dim=512, width=384), dtype, device)
    whole = moe.moe_triton(x, logits, gate_up, down, 4, True, fixed=True)
    for first, stop in ((0, 1), (7, 8), (7, 40), (100, 300)):
        part = moe.moe_triton(x[first:stop], logits[first:stop], gate_up, down, 4, True, fixed=True)
        assert torch.equal(part, whole[first:stop]), (first, stop)


def qwen_cases() -> list[moe.Case]:
    """The model's own widths, at each of its tilings."""
    return [
        moe.Case(rows=rows, experts=16, top_k=8, dim=DIM, width=SPEC.intermediate_size)
        for rows in (1, 4, 16, 40, 150, 400)
    ]


def warm(rows: int, tiling: Tiling | None) -> str:
    """Compile into Triton's cache on disk, for the process that times."""
    try:
        run_layers(make_layers(1), torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16), tiling)
        torch.cuda.synchronize()
    except Exception as e:
        return f"{rows} {tiling}: {type(e).__name__}: {str(e)[:300]}"
    return ""


# ------------------------------------------------------------------------------------------------------------ timings


def make_layers(count: int) -> list[FFN]:
    layers = []
    for _ in range(count):
        layer = FFN(SPEC, DIM, Placement(torch.device("cuda"), torch.bfloat16))
        for weight in (layer.router.weight_NK, layer.gate_up_XFE, layer.down_XEF):
            weight.normal_(std=0.02)
        layers.append(layer)
    return layers


def run_layers(layers: list[FFN], x_TE: torch.Tensor, tiling: Tiling | None = None) -> None:
    for layer in layers:
        if tiling is None:
            layer.forward(x_TE)
        else:
            moe.moe_triton(
                x_TE, layer.router(x_TE), layer.gate_up_XFE, layer.down_XEF, SPEC.top_k, SPEC.renormalize, tiling=tiling
            )


def kernel_us(run, count: int) -> dict[str, float]:
    """Microseconds on the GPU by kernel, one of ``count`` layers."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    times = sorted(((e.key[:48], e.device_time_total / 3 / count) for e in profile.key_averages()), key=lambda p: -p[1])
    return {name: round(us, 2) for name, us in times[:8]}


def time_rows(rows: int, layers: list[FFN], bandwidth: float, rate: float, tilings: list[Tiling]) -> dict:
    x = torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16)
    active = [int(layer.route(x)[1].unique().numel()) for layer in layers]
    width, weight = SPEC.intermediate_size, 3 * SPEC.intermediate_size * DIM
    moved = 2 * (weight * sum(active) / len(active) + SPEC.num_experts * DIM + rows * DIM * 2)
    flops = 2 * rows * (weight * SPEC.top_k + SPEC.num_experts * DIM)
    seconds, eager = (t / len(layers) for t in graph_seconds(lambda: run_layers(layers, x), 10))
    chosen = moe.tiling_for(rows * SPEC.top_k, SPEC.num_experts, torch.bfloat16) if rows > 1 else None
    metrics = {
        "us": round(seconds * 1e6, 2),
        "us_eager": round(eager * 1e6, 2),
        "active_experts": active,
        "GB_per_s": round(moved / seconds / 1e9),
        "TFLOP_per_s": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(max(moved / bandwidth, flops / rate) / seconds, 3),
        "kernels_us": kernel_us(lambda: run_layers(layers, x), len(layers)),
    }
    for tiling in tilings:
        try:
            metrics[f"us {describe(tiling)}"] = round(
                graph_seconds(lambda t=tiling: run_layers(layers, x, t), 5)[0] / len(layers) * 1e6, 2
            )
        except Exception as e:
            metrics[f"us {describe(tiling)}"] = f"{type(e).__name__}: {str(e)[:120]}"
    print(rows, json.dumps(metrics), flush=True)
    return arm(
        f"moe layer, {rows} rows", {"width": width, "tiling": describe(chosen) if chosen else "one row"}, metrics
    )


def describe(tiling: Tiling) -> str:
    return " ".join("x".join(map(str, tile[:3])) + f"w{tile.warps}s{tile.stages}" for tile in tiling)


def time_matmul(name: str, outputs: int, inputs: int, bandwidth: float, rate: float) -> dict:
    copies = max(1, (256 << 20) // (2 * outputs * inputs))
    weights = torch.randn(copies, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    metrics = {}
    for rows in (1, 8, 64, 512, 8192):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        own, blas = (
            graph_seconds(lambda f=f, x=x: [f(x, w) for w in weights], 5)[0] / copies
            for f in (matmul.matmul_invariant, torch.nn.functional.linear)
        )
        limit = max(weights[0].nbytes / bandwidth, 2 * rows * outputs * inputs / rate)
        metrics[f"{rows} rows"] = {
            "us": round(own * 1e6, 2),
            "us_cublas": round(blas * 1e6, 2),
            "ratio": round(blas / own, 3),
            "TFLOP_per_s": round(2e-12 * rows * outputs * inputs / own, 1),
            "share_of_limit": round(limit / own, 3),
        }
    print(name, json.dumps(metrics), flush=True)
    runs, _ = matmul.split_runs(outputs, inputs, matmul.tile_for(torch.bfloat16))
    return arm(f"invariant product, {name}", {"outputs": outputs, "inputs": inputs, "runs": runs}, metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    arms = []
    sweep = SWEEP if options.sweep else {}
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as processes:
        compiled = [processes.submit(warm, rows, tiling) for rows in ROWS for tiling in (None, *sweep.get(rows, ()))]
        checks = (
            [] if options.skip_checks else [(op, dtype) for op in ("bits", "qwen", "moe", "matmul") for dtype in DTYPES]
        )
        checked = {
            check: [processes.submit(check_share, *check, share) for share in range(WORKERS)] for check in checks
        }
        problems = [p for p in (c.result() for c in compiled) if p]
        for (op, dtype), shares in checked.items():
            _, _, counts, worst, failed = zip(*(s.result() for s in shares))
            lines = [line for part in failed for line in part]
            arms.append(
                arm(
                    f"{op} grid",
                    {"dtype": str(dtype)},
                    {"cases": sum(counts), "failed": len(lines), "worst_error": max(worst)},
                )
            )
            print(arms[-1]["name"], dtype, arms[-1]["metrics"], *lines, sep="\n  ", flush=True)
    print(*problems, sep="\n", flush=True)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    with torch.inference_mode():
        layers = make_layers(LAYERS)
        arms += [time_rows(rows, layers, bandwidth, rate, sweep.get(rows, [])) for rows in ROWS]
        del layers
        arms += [time_matmul(name, *shape, bandwidth, rate) for name, shape in MATRICES.items()]
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    limits = {"copy_GB_per_s": round(bandwidth / 1e9), "bf16_TFLOP_per_s": round(rate / 1e12), "failed_checks": failed}
    options.output.write_text(as_json(result("gpu_moe", arms, limits=limits)))
    print(limits)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
