"""Check and time SonicMoE's parts: fused epilogues against passes of their own, token rounding, and its own package.

One layer without its router (bf16, random routing) at Qwen3-30B-A3B's widths and at the sparse ones of the paper, where
token rounding gains most. All ways take turns in one run:

- fused: the layer as it is served. The gather of rows, the activation and the order of pairs are parts of the products.
- gather apart, then activation apart, then scatter apart: one more of these is a pass of its own each time.
- nearest, up, down: token rounding in the three directions, with the kernels that round; "alone" without them.
- sonic-moe: the package of the paper's authors, with --site or installed. Its routing and its sum are part of the time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import site
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir.kernels import moe, moe_rounding
from kvasir.kernels._triton import cdiv, next_power_of_2
from kvasir.kernels.activation import gated
from kvasir.kernels.moe_rounding import DIRECTIONS, Rounded, Rounding, round_triton, sum_listed_triton
from kvasir.kernels.moe_routing import Routing, route_triton
from kvasir_lab.kernels.frame import BF16, Grid, Report, check_grids, in_turns, measure_limits, tried
from tests.kernels.check import FLOOR
from tests.kernels.check_moe import check_rounding

EVERY = {BF16: 1, torch.float16: 3, torch.float32: 3}


@dataclass(frozen=True)
class Shape:
    """Widths of a layer of experts and the rows to time it with."""

    name: str
    dim: int
    width: int
    experts: int
    top_k: int
    rows: tuple[int, ...]


SHAPES = (
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8, (2048, 4096, 8192)),
    Shape("sparse", 4096, 1024, 256, 8, (16384,)),
)


class Layer:
    """Weights of the experts, rows and logits of one shape, and what both routings make of them."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype = BF16, device: str = "cuda") -> None:
        draw = torch.Generator(device).manual_seed(rows)
        normal = functools.partial(torch.randn, generator=draw, device=device, dtype=dtype)
        self.shape, self.rows = shape, rows
        self.gate_up = normal(shape.experts, 2 * shape.width, shape.dim) * 0.02
        self.down = normal(shape.experts, shape.dim, shape.width) * 0.02
        self.router = normal(shape.experts, shape.dim) * shape.dim**-0.5
        self.x = normal(rows, shape.dim)
        self.logits = self.x @ self.router.T
        self.tiling = moe.tiling_for(rows * shape.top_k, shape.experts, dtype)
        self.routing = self.route()

    def route(self) -> Routing:
        return route_triton(self.logits, self.shape.top_k, True, self.tiling.down.m)

    def round(self, direction: moe_rounding.Direction, routing: Routing) -> Rounded:
        m = self.tiling.down.m
        return round_triton(self.logits, routing.weights, routing.ids, True, Rounding(direction), m)

    def fused(self, rounding: Rounding | None = None) -> torch.Tensor:
        return moe.moe_triton(
            self.x, self.logits, self.gate_up, self.down, self.shape.top_k, True, tiling=self.tiling, rounding=rounding
        )

    def rounded_alone(self, rounded: Rounded) -> torch.Tensor:
        """The products and the sum of pairs that were rounded before."""
        out = torch.empty_like(self.x)
        y = moe._products(
            self.x, self.gate_up, self.down, None, "silu", self.tiling, rounded.gather, rounded.stay, 1, {"PDL": False}
        )
        sum_listed_triton(y, rounded, out, False)
        return out

    def apart(self, activation: bool = False, scatter: bool = False) -> torch.Tensor:
        """The same layer with the gather as a pass of its own, and perhaps the activation and the scatter, too."""
        top_k, shape, routing = self.shape.top_k, self.shape, self.route()
        pairs = self.rows * top_k
        order = routing.order.long()
        own = routing._replace(order=torch.arange(pairs, dtype=torch.int32, device=self.x.device))
        sorted_PE = self.x[order // top_k]
        if activation:
            both = self._product(sorted_PE, self.gate_up, 2 * shape.width, own, self.tiling.down, False)
            inner = gated(both, torch.nn.functional.silu)
        else:
            inner = self._product(sorted_PE, self.gate_up, shape.width, own, self.tiling.gate_up, True)
        y = self._product(inner, self.down, shape.dim, own if scatter else routing, self.tiling.down, False)
        if scatter:
            y = torch.empty_like(y).index_copy_(0, order, y)
        out, block = torch.empty_like(self.x), min(1024, next_power_of_2(shape.dim))
        moe._sum_pairs[(self.rows, cdiv(shape.dim, block))](
            y, routing.weights, out, E=shape.dim, TOP_K=top_k, BLOCK_E=block, RESIDUAL=False, PDL=False, num_warps=4
        )
        return out

    def _product(
        self, a: torch.Tensor, w: torch.Tensor, outputs: int, routing: Routing, tile: moe.Tile, is_gated: bool
    ) -> torch.Tensor:
        """One grouped product of rows in sorted order."""
        out = torch.empty(len(a), outputs, dtype=a.dtype, device=a.device)
        moe._grouped[(cdiv(outputs, tile.n), len(routing.tiles))](
            a, w, w, a, out, routing.order, routing.tiles, routing.num_tiles, a.stride(0), *w.stride(), 0, SCALES=-1,
            N=outputs, D=a.shape[1], TOP_K=1, GATED=is_gated, ACTIVATION="silu", BIAS=False, BLOCK_M=tile.m,
            BLOCK_N=tile.n, BLOCK_D=tile.d, PDL=False, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def plain(layer: Layer, rounded: Rounded) -> torch.Tensor:
    """The sum over the pairs that were listed, one expert after the other, in fp32."""
    out = torch.zeros(layer.x.shape, device=layer.x.device)
    weights = torch.zeros(rounded.at.T.shape, device=layer.x.device)
    for t, count in enumerate(rounded.num_found.tolist()):
        experts = (rounded.at[:, t] >= 0).nonzero().flatten()
        weights[t, experts] = rounded.weights[t, :count]
    for expert in range(layer.shape.experts):
        rows = (rounded.at[expert] >= 0).nonzero().flatten()
        inner = gated(layer.x[rows].float() @ layer.gate_up[expert].float().T, torch.nn.functional.silu)
        out[rows] += weights[rows, expert, None] * (inner @ layer.down[expert].float().T)
    return out


def layer_cases() -> list[tuple[str, int]]:
    return [(direction, rows) for direction in DIRECTIONS for rows in (1100, 4096)]


def check_layer(case: tuple[moe_rounding.Direction, int], dtype: torch.dtype, device: str) -> float:
    """A layer at the model's widths, with 16 experts: pairs as in the reference, up to ties of its own exponentials;
    then the sum over them, and the ways that have passes of their own."""
    direction, rows = case
    layer = Layer(Shape("check", 2048, 768, 16, 2, ()), rows, dtype, device)
    rounded = layer.round(direction, layer.routing)
    routed = layer.routing.weights, layer.routing.ids
    kept, _ = moe_rounding.round_reference(layer.logits.float(), *routed, True, Rounding(direction))
    assert torch.equal((rounded.at >= 0).sum(1), kept.sum(0)), "other counts"
    assert int(((rounded.at.T >= 0) ^ kept).sum()) <= 4, "other pairs"
    want = plain(layer, rounded)
    error = float((layer.fused(Rounding(direction)).float() - want).abs().max())
    assert error <= 4 * FLOOR[dtype] * (1 + float(want.abs().max())), error
    served = layer.fused()
    for options in ({}, {"activation": True}, {"activation": True, "scatter": True}):
        other = float((layer.apart(**options).float() - served.float()).abs().max())
        assert other <= 4 * FLOOR[dtype] * (1 + float(served.float().abs().max())), (options, other)
    return error


GRIDS = {
    "rounding": Grid(moe_rounding.grid, check_rounding, EVERY),
    "layer": Grid(layer_cases, check_layer, {BF16: 1, torch.float16: 3}),
}


# ------------------------------------------------------------------------------------------------------ its own package


def package(layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    """The layer in the authors' package: with top-k, and over the pairs that rounding left. Raises ImportError."""
    functional = importlib.import_module("sonicmoe.functional")
    kinds = importlib.import_module("sonicmoe.enums")
    # Matrices [outputs, inputs, experts], gate before up.
    first, second = layer.gate_up.permute(1, 2, 0), layer.down.permute(1, 2, 0)
    swiglu = kinds.ActivationType.SWIGLU
    rounded = layer.round("nearest", layer.routing)
    rows = rounded.num_found.long()
    at, experts = (rounded.at.T >= 0).nonzero().int().unbind(1)  # by row
    taken = torch.arange(layer.shape.experts, device=rows.device) < rows[:, None]
    scores = rounded.weights[taken]

    def top_k() -> torch.Tensor:
        return functional.moe_TC_softmax_topk_layer(
            layer.x, layer.router, first, None, second, None, layer.shape.top_k, 0, swiglu,
            is_inference_mode_enabled=True, is_softmax_over_topk=True, concat_layout=True,
        )[0]  # fmt: skip

    def nearest() -> torch.Tensor:
        return functional.moe_general_routing_inputs(
            layer.x, scores, at.contiguous(), experts.contiguous(), first, None, second, None, layer.shape.experts, 0,
            swiglu, is_inference_mode_enabled=True, concat_layout=True,
        )[0]  # fmt: skip

    return {"sonic-moe": top_k, "sonic-moe nearest alone": nearest}


def beside(report: Report, layer: Layer) -> dict[str, Callable[[], torch.Tensor]]:
    """The package's ways that run here and agree with ours."""
    try:
        ways = package(layer)
    except ImportError as e:
        report.limits["sonic_moe"] = f"not importable: {e}"[:200]
        return {}
    report.limits["sonic_moe"] = importlib.metadata.version("sonic-moe")
    found = {}
    for name, way in ways.items():
        own = layer.fused(Rounding("nearest") if "nearest" in name else None).float()
        out = tried(name, way)
        error = float("nan") if out is None else float((out.float() - own).abs().max() / own.abs().max())
        report.limits[f"{name}, {layer.shape.name}, {layer.rows} rows: largest difference"] = round(error, 5)
        if out is not None and error < 0.05:
            found[name] = way
    return found


# ------------------------------------------------------------------------------------------------------------- timings


def time_layer(report: Report, shape: Shape, rows: int, rate: float) -> None:
    layer = Layer(shape, rows)
    listed = {direction: layer.round(direction, layer.routing) for direction in DIRECTIONS}
    runs: dict[str, Callable[[], Any]] = {
        "fused": layer.fused,
        "gather apart": layer.apart,
        "gather, activation apart": lambda: layer.apart(activation=True),
        "gather, activation, scatter apart": lambda: layer.apart(activation=True, scatter=True),
        "routing": layer.route,
        "rounding": lambda: layer.round("nearest", layer.routing),
    }
    for direction, rounded in listed.items():
        runs[direction] = functools.partial(layer.fused, Rounding(direction))
        runs[f"{direction} alone"] = functools.partial(layer.rounded_alone, rounded)
    seconds = in_turns({**runs, **beside(report, layer)})
    counts = layer.routing.ids.flatten().bincount(minlength=shape.experts)
    pairs = {"": counts} | {name: (rounded.at >= 0).sum(1) for name, rounded in listed.items()}
    for name, spent in seconds.items():
        per_expert = pairs[next((d for d in DIRECTIONS if d in name), "")]
        metrics: dict[str, Any] = {"us": round(spent * 1e6, 2), "over_fused": round(spent / seconds["fused"], 4)}
        if name not in ("routing", "rounding"):
            number, tile = int(per_expert.sum()), layer.tiling.down.m
            computed = int(((per_expert + tile - 1) // tile * tile).sum())
            flops = 6 * number * shape.width * shape.dim
            metrics |= {
                "pairs": number,
                "rows_of_tiles": computed,
                "empty_share": round(1 - number / computed, 4),
                "TFLOP_per_s": round(flops / spent / 1e12, 1),
                "share_of_matmul_rate": round(flops / spent / rate, 4),
            }
        config = {"rows": rows, "dim": shape.dim, "width": shape.width, "experts": shape.experts, "top_k": shape.top_k}
        report.add(f"{name}, {shape.name}, {rows} rows", config, metrics)
    kept = {name: int((r.num_found == 0).sum()) for name, r in listed.items()}
    report.limits[f"rows without an expert, {shape.name}, {rows} rows"] = kept
    report.save()


def warm(shape: Shape, rows: int) -> None:
    """Compile into Triton's cache on disk, for the process that times."""
    layer = Layer(shape, rows)
    for options in ({}, {"activation": True}, {"activation": True, "scatter": True}):
        layer.apart(**options)
    for direction in DIRECTIONS:
        layer.fused(Rounding(direction))
    layer.fused()
    torch.cuda.synchronize()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument(
        "--site", type=Path, help="folder with the packages that sonic-moe needs, for --no-deps installs"
    )


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    if options.site is not None:
        site.addsitedir(str(options.site))
    report = Report("gpu_sonic", options.output)
    compiling = [(warm, (shape, shape.rows[0])) for shape in SHAPES]
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, compiling)
    _, rate = measure_limits(report)
    for shape in SHAPES:
        for rows in shape.rows:
            time_layer(report, shape, rows, rate)
            torch.cuda.empty_cache()
    return report.end()
