"""Check and time the mixture of experts and the batch-invariant product.

One layer of Qwen3-30B-A3B (bf16, random routing), router included, as a CUDA graph over several layers' weights, so
that neither launches nor the L2 cache flatter it; then the invariant product beside cuBLAS at Llama-8B's matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from kvasir.kernels import matmul, moe
from kvasir.kernels.moe import Tile, Tiling
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.spec import MoESpec
from kvasir.layers.weights import Placement
from kvasir_lab.kernels.frame import (
    BF16,
    COLD_BYTES,
    Grid,
    Report,
    check_grids,
    graph_seconds,
    kernel_times,
    measure_limits,
    timed,
    tried,
)
from tests.kernels.check_moe import check_matmul, check_moe, check_row_bits, draw_case

DIM, SPEC, LAYERS = 2048, MoESpec(num_experts=128, top_k=8, intermediate_size=768, renormalize=True), 3
ROWS = (1, 2, 8, 16, 64, 256, 512, 2048, 8192)
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
EVERY = {BF16: 1, torch.float16: 3, torch.float32: 3}
# Tilings that --sweep tries, by rows.
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
# Tilings of tile copies that --prompts tries: (m, n, d, warps, stages, joined, programs) of gate and up, and of down.
PROMPT_ROWS = (2048, 8192)
PROMPTS = [
    Tiling(Tile(*first[:5], True, *first[5:]), Tile(*second[:5], True, False, second[5]))
    for first, second in (
        ((128, 128, 64, 8, 3, False, 0), (128, 128, 64, 4, 3, 0)),
        ((128, 128, 64, 8, 3, True, 0), (128, 256, 64, 8, 3, 0)),
        ((128, 128, 64, 8, 4, True, 0), (128, 256, 64, 8, 4, 0)),
        ((128, 128, 64, 8, 3, True, 1), (128, 256, 64, 8, 3, 1)),
        ((128, 64, 64, 4, 3, True, 0), (128, 128, 64, 4, 3, 0)),
        ((128, 64, 64, 4, 3, True, 2), (128, 128, 64, 4, 3, 2)),
        ((64, 128, 64, 4, 3, True, 0), (64, 256, 64, 4, 3, 0)),
    )
]


# ------------------------------------------------------------------------------------------------------------ checks


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


def copy_cases() -> list[moe.Case]:
    """The model's widths with every tiling of tile copies, at few and at many pairs an expert."""
    return [
        moe.Case(rows=rows, experts=16, top_k=8, dim=DIM, width=SPEC.intermediate_size, tiling=tiling)
        for tiling in PROMPTS
        for rows in (40, 400)
    ]


GRIDS = {
    "copies": Grid(copy_cases, check_moe, {BF16: 1, torch.float16: 3}),
    "bits": Grid(bit_cases, check_bits, EVERY),
    "qwen": Grid(qwen_cases, check_moe, EVERY),
    "moe": Grid(moe.grid, check_moe, EVERY),
    "matmul": Grid(matmul.grid, check_matmul, EVERY),
}


def warm(rows: int, tiling: Tiling | None) -> None:
    """Compile into Triton's cache on disk, for the process that times."""
    run_layers(make_layers(1), torch.randn(rows, DIM, device="cuda", dtype=BF16), tiling)
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------ timings


def make_layers(count: int) -> list[FFN]:
    layers = []
    for _ in range(count):
        layer = FFN(SPEC, DIM, Placement(torch.device("cuda"), BF16))
        for weight in (layer.router.weight, layer.gate_up, layer.down):
            weight.tensor.normal_(std=0.02)
        layers.append(layer)
    return layers


def run_layers(layers: list[FFN], x_TE: torch.Tensor, tiling: Tiling | None = None) -> None:
    for layer in layers:
        if tiling is None:
            layer.forward(x_TE)
        else:
            moe.moe_triton(
                x_TE,
                layer.router(x_TE),
                layer.gate_up.tensor,
                layer.down.tensor,
                SPEC.top_k,
                SPEC.renormalize,
                tiling=tiling,
            )


def describe(tiling: Tiling) -> str:
    return " ".join(
        "x".join(map(str, tile[:3]))
        + f"w{tile.warps}s{tile.stages}"
        + "c" * tile.copies
        + "j" * tile.joined
        + (f"p{tile.programs}" if tile.programs else "")
        for tile in tiling
    )


def time_rows(
    report: Report, rows: int, layers: list[FFN], bandwidth: float, rate: float, tilings: list[Tiling]
) -> None:
    x = torch.randn(rows, DIM, device="cuda", dtype=BF16)
    active = [int(layer.route(x)[1].unique().numel()) for layer in layers]
    width, weight = SPEC.intermediate_size, 3 * SPEC.intermediate_size * DIM
    moved = 2 * (weight * sum(active) / len(active) + SPEC.num_experts * DIM + rows * DIM * 2)
    flops = 2 * rows * (weight * SPEC.top_k + SPEC.num_experts * DIM)

    def run(tiling: Tiling | None = None) -> None:
        run_layers(layers, x, tiling)

    seconds, eager = graph_seconds(run, 10) / len(layers), timed(run, 10) / len(layers)
    metrics: dict[str, Any] = {
        "us": round(seconds * 1e6, 2),
        "us_eager": round(eager * 1e6, 2),
        "active_experts": active,
        "GB_per_s": round(moved / seconds / 1e9),
        "TFLOP_per_s": round(flops / seconds / 1e12, 1),
        "share_of_limit": round(max(moved / bandwidth, flops / rate) / seconds, 3),
        "kernels_us": {name: round(us / len(layers), 2) for name, us in kernel_times(run, 8).items()},
    }
    for tiling in tilings:
        spent = tried((rows, describe(tiling)), lambda tiling=tiling: graph_seconds(lambda: run(tiling), 5))
        if spent is not None:
            metrics[f"us {describe(tiling)}"] = round(spent / len(layers) * 1e6, 2)
            metrics[f"share_of_limit {describe(tiling)}"] = round(
                max(moved / bandwidth, flops / rate) / spent * len(layers), 3
            )
    chosen = moe.tiling_for(rows * SPEC.top_k, SPEC.num_experts, BF16) if rows > 1 else None
    config = {"width": width, "tiling": describe(chosen) if chosen else "one row"}
    report.add(f"moe layer, {rows} rows", config, metrics)


def time_matmul(report: Report, name: str, outputs: int, inputs: int, bandwidth: float, rate: float) -> None:
    copies = max(1, COLD_BYTES // (2 * outputs * inputs))
    weights = torch.randn(copies, outputs, inputs, device="cuda", dtype=BF16) * inputs**-0.5
    metrics = {}

    def spent(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
        return graph_seconds(lambda: [product(x, w) for w in weights], 5) / copies

    for rows in (1, 8, 64, 512, 8192):
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
        own, blas = spent(matmul.matmul_invariant, x), spent(torch.nn.functional.linear, x)
        limit = max(weights[0].nbytes / bandwidth, 2 * rows * outputs * inputs / rate)
        metrics[f"{rows} rows"] = {
            "us": round(own * 1e6, 2),
            "us_cublas": round(blas * 1e6, 2),
            "ratio": round(blas / own, 3),
            "TFLOP_per_s": round(2e-12 * rows * outputs * inputs / own, 1),
            "share_of_limit": round(limit / own, 3),
        }
    runs, _ = matmul.split_runs(outputs, inputs, matmul.tile_for(BF16))
    report.add(f"invariant product, {name}", {"outputs": outputs, "inputs": inputs, "runs": runs}, metrics)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="time other tilings, too")
    parser.add_argument(
        "--prompts", action="store_true", help="only 2,048 and 8,192 rows, over tilings of tile copies (3 minutes)"
    )


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report, sweep = Report("gpu_moe", options.output), SWEEP if options.sweep else {}
    all_rows = PROMPT_ROWS if options.prompts else ROWS
    if options.prompts:
        sweep = dict.fromkeys(PROMPT_ROWS, PROMPTS)
    compiling = [(warm, (rows, tiling)) for rows in all_rows for tiling in (None, *sweep.get(rows, ()))]
    grids = {"copies": GRIDS["copies"]} if options.prompts else GRIDS
    check_grids(report, __name__, {} if options.skip_checks else grids, compiling)
    bandwidth, rate = measure_limits(report)
    layers = make_layers(LAYERS)
    for rows in all_rows:
        time_rows(report, rows, layers, bandwidth, rate, sweep.get(rows, []))
    del layers
    report.save()
    if options.prompts:
        return report.end()
    for name, shape in MATRICES.items():
        time_matmul(report, name, *shape, bandwidth, rate)
    return report.end()
