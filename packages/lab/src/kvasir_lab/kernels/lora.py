"""Check and time the kernels of low-rank adapters with the products that they add to.

The four products of a layer of an 8B model (bf16, rank 16), each as a CUDA graph over several layers' weights, so that
neither launches nor the L2 cache flatter it. ``share`` is the time that adapters add over that of the product alone.
"""

from __future__ import annotations

import argparse

import torch

from kvasir.kernels import lora
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement
from kvasir.types import StepBatch
from kvasir_lab.kernels.frame import BF16, COLD_BYTES, Grid, Report, check_grids, graph_seconds
from tests.kernels.check_lora import FUSED, check_fused, check_gated, check_lora, check_row_bits, check_sorting

PARTS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
RANK = 16
# Rows of a step, and adapters that they are spread over.
STEPS = ((1, 1), (8, 8), (64, 8), (64, 64), (256, 8), (2048, 2), (8192, 8))
EVERY = {BF16: 1, torch.float16: 3, torch.float32: 1}


def bits(case: lora.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    check_row_bits(case, dtype, device)
    return {}


def bit_cases() -> list[lora.Case]:
    return [lora.Case((2, 0, 1, 1, 2) * 5, 4096, (4096, 1024, 1024)), lora.Case((1, 2, 0), 14336, (4096,))]


def fused(entry: tuple, dtype: torch.dtype, device: str) -> dict[str, float]:
    return {"error": check_fused(entry, dtype, device)}


def gated(case: lora.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    if len(case.slots) <= lora.MAX_ROWS:
        check_sorting(case, dtype, device)
    return {"error": check_gated(case, dtype, device)}


def gated_cases() -> list[lora.Case]:
    return [lora.Case(slots, 320, (256, 256)) for slots in ((2, 0, 1, 1, 2), (1, 0, 2) * 45, (0, 0))]


GRIDS = {
    "lora": Grid(lora.grid, check_lora, EVERY),
    "bits": Grid(bit_cases, bits, EVERY),
    "fused": Grid(lambda: FUSED, fused, EVERY),
    "gated": Grid(gated_cases, gated, EVERY),
}


def make_products(width: int, widths: tuple[int, ...], adapters: int) -> list[Linear]:
    """Products of one shape whose weights together do not fit the L2 cache, each with its adapters."""
    place, products = Placement(torch.device("cuda"), BF16), []
    for _ in range(max(1, COLD_BYTES // (2 * width * sum(widths)))):
        product = Linear(width, dict(zip("abc", widths)), bias=False, place=place)
        product.weight.tensor.normal_(0, width**-0.5)
        product.use_adapters(adapters, RANK)
        pairs = product.low_rank.pairs
        pairs.a_SCK.normal_(0, width**-0.5)
        pairs.b_SNR.normal_()
        pairs.ranks_S.fill_(RANK)
        products.append(product)
    return products


def time_product(name: str, rows: int, adapters: int, width: int, widths: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of one product as a step runs it, with norm, activation or residual, and of what its adapters add."""
    products, place = make_products(width, widths, adapters), Placement(torch.device("cuda"), BF16)
    norm = RMSNorm(width, NormSpec(1e-6), place)
    norm.weight.fill_(1.0)
    none = torch.zeros(0)
    slots = (1 + torch.arange(rows, device="cuda") % adapters).int()
    batch = StepBatch(none, none, none, none, (), (), none, [], [], variants=slots)
    x, y = (torch.randn(rows, size, device="cuda", dtype=BF16) for size in (width, sum(widths)))
    kinds = {"qkv": {"norm": norm}, "gate_up": {"norm": norm, "activation": "silu"}}
    also = kinds.get(name, {"residual_TN": y})

    def seconds(batch: StepBatch | None) -> float:
        def run() -> None:
            for product in products:
                product(x, **also, batch=batch)

        return graph_seconds(run, 5) / len(products)

    alone = seconds(None)
    return alone, seconds(batch) - alone


def time_step(report: Report, rows: int, adapters: int) -> None:
    spent = {name: time_product(name, rows, adapters, *shape) for name, shape in PARTS.items()}
    torch.cuda.empty_cache()
    spent["layer"] = sum(alone for alone, _ in spent.values()), sum(extra for _, extra in spent.values())
    metrics = {
        name: {"us": round(alone * 1e6, 2), "us_adapters": round(extra * 1e6, 2), "share": round(extra / alone, 3)}
        for name, (alone, extra) in spent.items()
    }
    report.add(f"adapters, {rows} rows over {adapters}", {"rank": RANK}, metrics)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_lora", options.output)
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, [])
    for rows, adapters in STEPS:
        time_step(report, rows, adapters)
    return report.end()
