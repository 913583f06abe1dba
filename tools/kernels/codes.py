"""Products with weights as codes against their references, and timed: a Llama's few rows, and experts of gpt-oss.

Experts: one layer of gpt-oss-20b (32 experts, 4 a row, 2880 x 2880) in each layout, as a CUDA graph over several
layers, beside the same layer in bf16 and beside codes that are written out as bf16 for every step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from kvasir.kernels import codes_gemv, gemv
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.gemv import Config
from kvasir.layers import codes
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.linear import Linear
from kvasir.layers.spec import MoESpec
from kvasir.layers.weight_format import load_format
from kvasir.layers.weights import Placement
from tests.kernels.check_codes import CHECKS
from tools.kernels.frame import (
    BF16,
    COLD_BYTES,
    Grid,
    Report,
    check_grids,
    each,
    graph_seconds,
    kernel_times,
    measure_limits,
    tried,
)

GRIDS = {name: Grid(cases, check, {BF16: 1, torch.float32: 1}) for name, (cases, check) in CHECKS.items()}
FORMATS = ("mxfp4", "nvfp4", "u4:group=128", "u4:group=32,zeros=true", "i8")
# Name -> outputs and inputs of Llama-8B.
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FEW_ROWS, FEW = (1, 8, 64), [
    Config(n, k, warps, stages, splits)
    for n, k, warps in ((32, 128, 4), (32, 256, 4), (64, 256, 4), (64, 128, 8))
    for stages in (2, 4)
    for splits in (1, 2, 4)
]  # fmt: skip
ONE = [Config(n, k, w) for n in (2, 4, 8) for k in (512, 1024, 2048) for w in (4, 8)]
OSS, DIM, LAYERS = (
    MoESpec(num_experts=32, top_k=4, intermediate_size=2880, renormalize=True, activation="clamped_swiglu",
            bias=True, router_bias=True),
    2880,
    3,
)  # fmt: skip
ROWS = (1, 2, 8, 64, 256, 512, 1024, 2048)
GPU = torch.device("cuda")


def coded(spec: str, n: int, k: int) -> list[Coded]:
    """Matrices of random codes that together do not fit the L2 cache."""
    place = Placement(GPU, BF16, formats=lambda slots: load_format(spec))
    found: list[Coded] = []
    while not found or len(found) * found[0].codes.nbytes < COLD_BYTES:
        weight = Linear(k, {"w": n}, bias=False, place=place).weight
        for slot in weight.slots().values():
            draw(slot.target, slot.random)
        found.append(weight.format.coded(weight))
    return found


def draw(target: torch.Tensor, bounds: tuple[float, float] | None) -> None:
    """Fill a plane with random codes, or with the scale that dummy weights have."""
    if bounds is None:
        target.normal_(std=0.02)
    elif target.dtype == torch.uint8 and bounds[0] != bounds[1]:
        target.random_(int(bounds[0]), int(bounds[1]))
    elif target.dtype == torch.int8:
        target.random_(-127, 128)
    else:
        target.fill_(bounds[0])


def time_few(report: Report, spec: str, name: str, bandwidth: float) -> None:
    """Products of a few rows: every shape of tile, and bf16 as the engine computes it."""
    n, k = MATRICES[name]
    matrices = coded(spec, n, k)
    plain = [torch.randn(n, k, device=GPU, dtype=BF16) for _ in range(2 + COLD_BYTES // (2 * n * k))]
    moved = sum(p.nbytes for p in (matrices[0].codes, matrices[0].scales, matrices[0].more) if p is not None)
    for rows in FEW_ROWS:
        x = torch.randn(rows, k, dtype=BF16, device=GPU)
        chosen, spent = codes_gemv.choose(rows, n, matrices[0]), {}
        for config in dict.fromkeys([chosen, *(ONE if rows == 1 else FEW)]):
            if matrices[0].group and config.block_k % matrices[0].group:
                continue
            calls = [partial(codes_gemv.codes_gemv, x, w, config) for w in matrices]
            if (found := tried((spec, name, rows, config), partial(each, calls))) is not None:
                spent[config] = found
        config = gemv.choose(rows, n, k)
        product = (lambda w, x=x: torch.mm(x, w.t())) if config is None else (
            lambda w, x=x, c=config: gemv.gemv(x, w, c))  # fmt: skip
        bf16 = each([partial(product, w) for w in plain])
        ranked = sorted(spent, key=spent.__getitem__)
        report.add(
            f"{spec} gemv {name}",
            {"rows": rows, "N": n, "K": k},
            {
                "bf16_us": round(bf16 * 1e6, 2),
                "chosen_us": round(spent.get(chosen, float("nan")) * 1e6, 2),
                "chosen": str(chosen),
                "times_bf16": round(bf16 / spent[ranked[0]], 2),
                "share_of_limit": round(moved / bandwidth / spent[ranked[0]], 3),
                "own_us": {str(c): round(spent[c] * 1e6, 2) for c in ranked[:5]},
            },
        )
    report.save()


def make_layers(spec: str, count: int) -> list[FFN]:
    formats = None if spec == "plain" else (lambda slots: load_format(spec))
    layers = []
    for _ in range(count):
        layer = FFN(OSS, DIM, Placement(GPU, BF16, formats=formats))
        for slot in layer.router.slots().values():
            draw(slot.target, slot.random)
        for bias in layer.biases or ():
            bias.normal_()
        for weight in (layer.gate_up, layer.down):
            for name, slot in weight.slots(0).items():
                draw(weight.planes[name.partition("/")[2] or "weight"], slot.random)
        layers.append(layer)
    return layers


def time_experts(report: Report, spec: str, bandwidth: float) -> None:
    layers = make_layers(spec, LAYERS)
    for rows in ROWS:
        x = torch.randn(rows, DIM, device=GPU, dtype=BF16)
        active = sum(int(layer.route(x)[1].unique().numel()) for layer in layers) / len(layers)
        moved = active / OSS.num_experts * (layers[0].gate_up.num_bytes + layers[0].down.num_bytes)

        def run(x: torch.Tensor = x) -> None:
            for layer in layers:
                layer.forward(x)

        seconds = with_copies(None, run)
        metrics = {
            "us": round(seconds * 1e6, 2),
            "active_experts": round(active, 1),
            "share_of_bytes_limit": round(moved / bandwidth / seconds, 3),
            "kernels_us": {name: round(us / LAYERS, 2) for name, us in kernel_times(run, 6).items()},
        }
        if spec != "plain":
            for name, most in (("codes_us", float("inf")), ("written_out_us", -1.0)):
                if (found := tried((spec, rows, name), partial(with_copies, most, run))) is not None:
                    metrics[name] = round(found * 1e6, 2)
        report.add(f"{spec} experts of gpt-oss-20b", {"rows": rows}, metrics)
    report.save()


def with_copies(most: float | None, run: Callable[[], None]) -> float:
    """Seconds of a layer where codes are streamed up to ``most`` pairs an expert; None: as the engine does."""
    usual = codes.STREAMED_PAIRS
    codes.STREAMED_PAIRS = usual if most is None else most
    try:
        return graph_seconds(run, 7) / LAYERS
    finally:
        codes.STREAMED_PAIRS = usual


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-few", action="store_true")
    parser.add_argument("--skip-experts", action="store_true")


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_codes", options.output)
    bandwidth, _ = measure_limits(report)
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, [])
    if not options.skip_experts:
        for spec in ("plain", *options.formats):
            time_experts(report, spec, bandwidth)
    if not options.skip_few:
        for spec in options.formats:
            for name in MATRICES:
                time_few(report, spec, name, bandwidth)
    return report.end()
