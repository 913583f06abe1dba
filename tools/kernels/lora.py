"""Check and time the kernels of low-rank adapters beside the products that they add to.

The four products of a layer of an 8B model (bf16, rank 16), each as a CUDA graph over several layers' weights, so that
neither launches nor the L2 cache flatter it. ``share`` is the adapters' time over that of the product alone.
"""

from __future__ import annotations

import argparse

import torch

from kvasir.kernels import lora
from kvasir.layers.linear import Linear
from kvasir.layers.weights import Placement
from tests.kernels.check_lora import check_lora, check_row_bits
from tools.kernels.frame import BF16, COLD_BYTES, Grid, Report, check_grids, graph_seconds

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


GRIDS = {"lora": Grid(lora.grid, check_lora, EVERY), "bits": Grid(bit_cases, bits, EVERY)}


def time_step(report: Report, rows: int, adapters: int) -> None:
    place = Placement(torch.device("cuda"), BF16)
    slots = (1 + torch.arange(rows, device="cuda") % adapters).int()
    metrics, whole = {}, [0.0, 0.0]
    for name, (width, widths) in PARTS.items():
        copies = max(1, COLD_BYTES // (2 * width * sum(widths)))
        products = []
        for _ in range(copies):
            product = Linear(width, dict(zip("abc", widths)), bias=False, place=place)
            product.weight_NK.normal_(0, width**-0.5)
            product.use_adapters(adapters, RANK)
            pairs = product.low_rank.pairs
            pairs.a_SCK.normal_(0, width**-0.5)
            pairs.b_SNR.normal_()
            pairs.ranks_S.fill_(RANK)
            products.append(product)
        x = torch.randn(rows, width, device="cuda", dtype=BF16)
        y = torch.randn(rows, sum(widths), device="cuda", dtype=BF16)
        by_slot = lora.sort_rows(slots, adapters)

        def plain() -> None:
            for product in products:
                product(x)

        def added() -> None:
            for product in products:
                pairs = product.low_rank.pairs
                if rows <= lora.MAX_ROWS:
                    lora.lora_rows(x, y, pairs, slots)
                else:
                    lora.lora_tiles(x, y, pairs, by_slot)

        alone, extra = (graph_seconds(work, 5) / copies for work in (plain, added))
        whole = [whole[0] + alone, whole[1] + extra]
        metrics[name] = {
            "us": round(alone * 1e6, 2),
            "us_adapters": round(extra * 1e6, 2),
            "share": round(extra / alone, 3),
        }
        del products, product, pairs
        torch.cuda.empty_cache()
    metrics["layer"] = {
        "us": round(whole[0] * 1e6, 2),
        "us_adapters": round(whole[1] * 1e6, 2),
        "share": round(whole[1] / whole[0], 3),
    }
    report.add(f"adapters, {rows} rows over {adapters}", {"rank": RANK}, metrics)
    print(rows, adapters, metrics, flush=True)


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
