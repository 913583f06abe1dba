"""FP8 products against their references, and timed: few rows by shape of tile beside bf16, and prompts.

``--rows`` chooses the numbers of rows of the first part. It prints, for every matrix of Llama-8B and number of rows,
the shapes of ``kernels.f8_gemv`` with the fastest first, and what ``choose`` takes today. The norm before a product
is a kernel of its own and not in these times; bf16's includes it.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from kvasir.kernels import f8, f8_gemv, f8_matmul, gemv
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.f8 import F8
from kvasir.kernels.gemv import Config
from kvasir.kernels.norm import rms_norm
from kvasir_lab.kernels.frame import BF16, COLD_BYTES, Grid, Report, check_grids, each, measure_limits, tried
from tests.kernels.check_f8 import CHECKS

GRIDS = {
    name: Grid(cases, check, {BF16: 1} if name == "f8 matmul" else {BF16: 1, torch.float32: 1})
    for name, (cases, check) in CHECKS.items()
}
# Name -> outputs, inputs, and what is fused, of Llama-8B.
MATRICES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qkv": (6144, 4096, {"norm": True}),
    "o": (4096, 4096, {"residual": True}),
    "gate_up": (28672, 4096, {"norm": True, "activation": "silu"}),
    "down": (4096, 14336, {"residual": True}),
}
FEW = [
    Config(n, k, warps, stages, splits)
    for n, warps in ((64, 4), (128, 8))
    for k in (128, 256)
    for stages in (3, 5)
    for splits in (1, 2, 4, 8)
]
PROMPT_ROWS = (128, 512, 2048, 8192, 16384)
TILES = [f8_matmul.Tile(m, n, w, s) for m, n, w in ((64, 128, 4), (128, 128, 8), (128, 128, 4)) for s in (3, 4, 5)]


def made(n: int, k: int, block: int, cold: int = COLD_BYTES) -> list[F8]:
    """Codes of one shape that take ``cold`` bytes together."""
    found = []
    for _ in range(max(3, -(-cold // (n * k)))):
        shape = (-(-n // block), -(-k // block)) if block else (n,)
        codes = (torch.randn(n, k, device="cuda", dtype=BF16) * 32).to(f8.E4M3)
        found.append(F8(codes, torch.rand(shape, device="cuda"), block))
    return found


def time_few(report: Report, name: str, block: int, all_rows: list[int], search: bool) -> None:
    """Products of a few rows with one matrix: every shape of tile, and bf16 as the engine computes it today. From 17
    rows on also of rows that are codes, whose quantisation is timed apart. Without ``search`` only the shape that is
    taken."""
    n, k, fused = MATRICES[name]
    weights = made(n, k, block)
    plain = [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(max(2, len(weights) // 2))]
    for rows in all_rows:
        bf16 = few_seconds(rows, plain, gemv.choose(rows, n, k), fused)
        for coded in (False, True) if rows > 16 else (False,):
            chosen = f8_gemv.choose(rows, n, k, block, "activation" in fused, coded)
            spent = {}
            for config in dict.fromkeys([chosen, *(FEW if search else [])]):
                if block and config.block_k > block:
                    continue
                measure = partial(few_seconds, rows, weights, config, fused, coded)
                if (found := tried((name, rows, config), measure)) is not None:
                    spent[config] = found
            ranked = sorted(spent, key=spent.__getitem__)
            report.add(
                f"f8 gemv {name}",
                {"rows": rows, "N": n, "K": k, "block": block, "coded": coded},
                {
                    "bf16_us": round(bf16 * 1e6, 2),
                    "chosen_us": round(spent.get(chosen, float("nan")) * 1e6, 2),
                    "chosen": str(chosen),
                    "TB_per_s": round(n * k / spent[ranked[0]] / 1e12, 2),
                    "times_bf16": round(bf16 / spent[ranked[0]], 2),
                    "own_us": {str(c): round(spent[c] * 1e6, 2) for c in ranked[:6]},
                    **(row_times(rows, k, block) if coded else {}),
                },
            )
    report.save()


def few_seconds(
    rows: int,
    weights: list[F8] | list[torch.Tensor],
    config: Config | None,
    fused: dict[str, Any],
    coded: bool = False,
) -> float:
    """Seconds of one product with what the engine fuses; ``config`` None: by the BLAS, and then what follows."""
    first = weights[0]
    n, k = first.codes.shape if isinstance(first, F8) else first.shape
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    residual = torch.zeros(rows, n, dtype=BF16, device="cuda") if "residual" in fused else None
    activation = fused.get("activation")
    if config is None:
        if residual is not None:
            return each([partial(residual.addmm_, x, w.t()) for w in weights])
        if activation is not None:
            act = ACTIVATIONS[activation]
            return each([lambda w=w: gated(torch.mm(x, w.t()), act) for w in weights])
        return each([partial(torch.mm, x, w.t()) for w in weights])
    options = {"activation": activation, "residual_TO": residual}
    if not isinstance(first, F8):
        if "norm" in fused:
            options["norm"] = torch.ones(k, dtype=BF16, device="cuda"), 1e-5
        return each([partial(gemv.gemv, x, w, config, **options) for w in weights])
    if coded:
        x, options["x_scale"] = f8.quantise_rows(x, first.block or k)
        options["dtype"] = BF16
    return each([partial(f8_gemv.f8_gemv, x, w, config, **options) for w in weights])


def row_times(rows: int, k: int, block: int) -> dict[str, float]:
    """Microseconds of quantising rows, of doing so with their norm, and of the norm alone."""
    x, scale = torch.randn(rows, k, dtype=BF16, device="cuda"), torch.ones(k, dtype=BF16, device="cuda")
    group, norm = block or k, (scale, 1e-5)
    runs = {
        "rows_us": partial(f8.quantise_rows, x, group),
        "normed_rows_us": partial(f8.quantise_rows, x, group, norm=norm),
        "norm_us": partial(rms_norm, x, *norm),
    }
    return {name: round(each([run] * 8) * 1e6, 2) for name, run in runs.items()}


def time_prompts(report: Report, name: str, block: int) -> None:
    """Products of many rows: quantised rows on FP8 tensor cores, bf16, and the matrix dequantised before."""
    n, k, _ = MATRICES[name]
    plain, w = torch.randn(n, k, device="cuda", dtype=BF16), made(n, k, block, 1)[0]
    for rows in PROMPT_ROWS:
        x = torch.randn(rows, k, dtype=BF16, device="cuda")
        own = {}
        for tile in [None, *TILES] if block else [None]:
            spent = tried((name, tile), partial(each, [partial(f8_matmul.f8_matmul, x, w, tile)] * 3))
            if spent is not None:
                own[str(tile)] = spent
        best = min(own, key=own.__getitem__)
        bf16 = each([partial(torch.mm, x, plain.t())] * 3)
        times = {
            "bf16_us": bf16,
            "dequantise_us": each([partial(f8.dequantise, w, BF16)] * 3),
            "rows_us": each([partial(f8.quantise_rows, x, block or k)] * 3),
            "own_us": own[best],
        }
        report.add(
            f"f8 prompt {name}",
            {"rows": rows, "N": n, "K": k, "block": block},
            {key: round(spent * 1e6, 1) for key, spent in times.items()}
            | {
                "best": best,
                "times_bf16": round(bf16 / own[best], 2),
                "TFLOP_per_s": round(2 * rows * n * k / own[best] / 1e12),
            },
        )
    report.save()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--chosen", action="store_true", help="time what the engine takes, and no other shape")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-few", action="store_true")
    parser.add_argument("--skip-prompts", action="store_true")


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_f8", options.output)
    measure_limits(report)
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, [])
    for block in (128, 0):
        for name in MATRICES:
            if not options.skip_few:
                time_few(report, name, block, options.rows, not options.chosen)
            if not options.skip_prompts:
                time_prompts(report, name, block)
    return report.end()
