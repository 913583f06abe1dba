"""Products with weights as codes against their references, and timed: a few rows of Llama-8B and gpt-oss-20b, experts.

Few rows: every shape of tile of ``ONE`` and ``FEW`` beside bf16, the fastest first; the best of each format and number
of rows is printed at the end, as lines for ``tuned.CODES_GEMV``. ``--quick`` times the smaller matrices. A format is
left out where the inputs of a matrix are no whole groups.

Experts: one layer of gpt-oss-20b (32 experts, 4 a row, 2880 x 2880) in each layout, as a CUDA graph over several
layers, beside the same layer in bf16 and beside codes that are written out as bf16 for every step.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch

from kvasir.errors import ConfigError
from kvasir.kernels import codes_gemv, codes_moe, gemv, moe, nibble_gemv
from kvasir.kernels.activation import ACTIVATIONS, gated
from kvasir.kernels.codes_gemv import Coded
from kvasir.kernels.gemv import Config
from kvasir.kernels.moe import Tile, Tiling
from kvasir.layers import codes
from kvasir.layers.ffn.moe import FFN
from kvasir.layers.linear import Linear
from kvasir.layers.spec import MoESpec
from kvasir.layers.weight_format import load_format
from kvasir.layers.weights import Placement
from kvasir_lab.kernels.frame import (
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
from tests.kernels.check_codes import CHECKS

GRIDS = {name: Grid(cases, check, {BF16: 1, torch.float32: 1}) for name, (cases, check) in CHECKS.items()}
FORMATS = ("mxfp4", "nvfp4", "u4:group=128", "u4:group=32", "i8")
# Name -> outputs, inputs, and whether the outputs are gate and up, of Llama-8B and of gpt-oss-20b.
MATRICES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "oss qkv": (5120, 2880, False),
    "oss o": (2880, 4096, False),
}
QUICK = ("qkv", "o", "gate_up", "oss qkv")
SPLITS = (1, 2, 4)
ONE = [Config(n, k, w) for n, k, w in ((8, 1024, 4), (4, 1024, 4), (8, 512, 4))] + [
    Config(n, k, warps, stages, splits)
    for n, k, warps, stages in ((32, 128, 2, 4), (32, 256, 2, 3), (64, 128, 4, 4))
    for splits in SPLITS
]
NIBBLES = [
    Config(n, k, warps, stages, splits)
    for n, warps in ((64, 4), (128, 4))
    for k in (128, 256)
    for stages in (3, 5)
    for splits in (1, 2, 4, 8)
]
FEW = {
    16: ((32, 128, 2, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 3)),
    64: ((64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3)),
}
OSS, DIM, LAYERS = (
    MoESpec(num_experts=32, top_k=4, intermediate_size=2880, renormalize=True, activation="clamped_swiglu",
            bias=True, router_bias=True),
    2880,
    3,
)  # fmt: skip
ROWS = (1, 2, 8, 64, 256)
ROW_SHAPES = ((8, 4, 256), (8, 8, 256), (4, 4, 512), (16, 8, 256))
TILES = {
    8: (
        Tile(16, 64, 128, 4, 4),
        Tile(16, 32, 128, 2, 4),
        Tile(16, 32, 128, 2, 6),
        Tile(16, 32, 256, 2, 3),
        Tile(16, 32, 256, 4, 4),
        Tile(16, 16, 256, 2, 4),
        Tile(16, 16, 128, 1, 6),
    ),
    256: (Tile(32, 64, 128, 4, 3), Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 8, 3)),
}
GPU = torch.device("cuda")
Product = Callable[..., torch.Tensor]
# For each format, number of rows and gating, and for each tile: the time of its best split in each matrix, over the
# time of the fastest tile there.
Ranks = defaultdict[tuple[str, int, bool], defaultdict[tuple[int, int, int, int], dict[str, float]]]


def products(w: Coded, rows: int, n: int, is_gated: bool, search: bool) -> list[tuple[Product, Config]]:
    """Candidates that are timed for so many rows: what the engine takes, what each kernel would take, and with
    ``search`` every shape of tile."""
    first = nibble_gemv.choose(rows, n, w, is_gated)
    found: list[tuple[Product, Config]] = [] if first is None else [(nibble_gemv.nibble_gemv, first)]
    found += [(codes_gemv.codes_gemv, codes_gemv.choose(rows, n, w, is_gated))]
    if not search:
        return found
    if first is not None:
        found += [(nibble_gemv.nibble_gemv, config) for config in NIBBLES if nibble_gemv.takes(w, config.block_k)]
    found += [(codes_gemv.codes_gemv, config) for config in configs(rows) if usable(w, config)]
    return list(dict.fromkeys(found))


def configs(rows: int) -> list[Config]:
    """The shapes of tile of ``codes_gemv`` that are timed for so many rows."""
    if rows == 1:
        return ONE
    tiles = next(tiles for most, tiles in FEW.items() if rows <= most)
    return [Config(*tile, splits) for tile in tiles for splits in SPLITS]


def coded(spec: str, n: int, k: int, cold: int = COLD_BYTES) -> list[Coded]:
    """Matrices of random codes that take ``cold`` bytes together: by default more than the L2 cache holds."""
    place = Placement(GPU, BF16, formats=lambda slots: load_format(spec))
    found: list[Coded] = []
    while not found or len(found) * found[0].codes.nbytes < cold:
        weight = Linear(k, {"w": n}, bias=False, place=place).weight
        for slot in weight.slots().values():
            draw(slot.target, slot.random)
        found.append(weight.format.coded(weight))
    return found


def usable(w: Coded, config: Config) -> bool:
    """Whether a block of the config holds whole groups."""
    return not w.group or config.block_k % w.group == 0


def compile_few(spec: str, rows: int, k: int, is_gated: bool, search: bool) -> None:
    """Launch every shape of tile once: what is compiled lies in Triton's cache on disk then."""
    try:
        (w,) = coded(spec, 512, k, 0)
    except ConfigError:
        return
    x = torch.randn(rows, k, dtype=BF16, device=GPU)
    for product, config in products(w, rows, w.codes.shape[0], is_gated, search):
        if product is nibble_gemv.nibble_gemv or config.splits <= 2:
            product(x, w, config, activation="silu" if is_gated else None)


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


def time_few(
    report: Report, spec: str, name: str, all_rows: Iterable[int], bandwidth: float, best: Ranks, search: bool
) -> None:
    """Products of a few rows: every shape of tile, and bf16 as the engine computes it."""
    n, k, is_gated = MATRICES[name]
    activation = "silu" if is_gated else None
    try:
        matrices = coded(spec, n, k)
    except ConfigError as error:
        print(f"{spec} {name}: left out: {error}", flush=True)
        return
    plain = [torch.randn(n, k, device=GPU, dtype=BF16) for _ in range(2 + COLD_BYTES // (2 * n * k))]
    moved = sum(p.nbytes for p in (matrices[0].codes, matrices[0].scales, matrices[0].more) if p is not None)
    for rows in all_rows:
        x = torch.randn(rows, k, dtype=BF16, device=GPU)
        spent: dict[tuple[Product, Config], float] = {}
        tried_out = products(matrices[0], rows, n, is_gated, search)
        for product, config in tried_out:
            calls: list[Callable[[], Any]] = [partial(product, x, w, config, activation=activation) for w in matrices]
            if (found := tried((spec, name, rows, config), partial(each, calls))) is not None:
                spent[product, config] = found
        bf16 = plain_seconds(x, plain, activation)
        ranked = sorted(spent, key=spent.__getitem__)
        for (_, config), seconds in spent.items():
            tile = config.block_n, config.block_k, config.warps, config.stages
            rank = best[spec, rows, is_gated][tile]
            rank[name] = min(seconds / spent[ranked[0]], rank.get(name, float("inf")))
        report.add(
            f"{spec} gemv {name}",
            {"rows": rows, "N": n, "K": k},
            {
                "bf16_us": round(bf16 * 1e6, 2),
                "chosen_us": round(spent.get(tried_out[0], float("nan")) * 1e6, 2),
                "chosen": said(tried_out[0]),
                "times_bf16": round(bf16 / spent[ranked[0]], 2),
                "share_of_limit": round(moved / bandwidth / spent[ranked[0]], 3),
                "own_us": {said(c): round(spent[c] * 1e6, 2) for c in ranked[:5]},
            },
        )
    report.save()


def said(taken: tuple[Product, Config]) -> str:
    """A kernel and its config, as results have them."""
    return f"{taken[0].__name__} {taken[1]}"


def plain_seconds(x: torch.Tensor, matrices: list[torch.Tensor], activation: str | None) -> float:
    """Seconds of a product with a bf16 matrix: of the streaming kernel or of the BLAS, whichever is faster."""

    def blas(w: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, w.t())
        return product if activation is None else gated(product, ACTIVATIONS[activation])

    calls: list[list[Callable[[], Any]]] = [[partial(blas, w) for w in matrices]]
    if (config := gemv.choose(x.shape[0], *matrices[0].shape)) is not None:
        calls.append([partial(gemv.gemv, x, w, config, activation=activation) for w in matrices])
    found = [tried(("bf16", tuple(x.shape)), partial(each, some)) for some in calls]
    return min(seconds for seconds in found if seconds is not None)


def print_best(best: Ranks) -> None:
    """Print the tile with the least time on average over the matrices, compared with each one's best."""
    for (spec, rows, is_gated), tiles in best.items():
        mean = {tile: statistics.mean(times.values()) for tile, times in tiles.items()}
        ranked = sorted(mean, key=mean.__getitem__)[:3]
        found = ", ".join(f"{tile} {mean[tile]:.3f}" for tile in ranked)
        print(f"best {spec} rows {rows}{' gated' if is_gated else ''}: {found}", flush=True)


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


def time_experts(report: Report, spec: str, all_rows: Iterable[int], bandwidth: float) -> None:
    """One layer of experts: as the engine runs it, and with every other tile."""
    try:
        layers = make_layers(spec, LAYERS)
    except ConfigError as error:
        print(f"{spec} experts: left out: {error}", flush=True)
        return
    for rows in all_rows:
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
            metrics["tiles_us"] = time_tiles((spec, rows), rows, run)
            for name, most in (("codes_us", float("inf")), ("written_out_us", -1.0)):
                if (found := tried((spec, rows, name), partial(with_copies, most, run))) is not None:
                    metrics[name] = round(found * 1e6, 2)
        report.add(f"{spec} experts of gpt-oss-20b", {"rows": rows}, metrics)
    report.save()


def time_tiles(what: Any, rows: int, run: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a layer for every shape of tile that is tried, the fastest first."""
    spent = {}
    if rows == 1:
        usual = {is_gated: codes_moe.row_shape(is_gated) for is_gated in (True, False)}
        for is_gated, name in ((True, "gate_up"), (False, "down")):
            for shape in ROW_SHAPES:
                shapes = usual | {is_gated: shape}
                with mock.patch.object(codes_moe, "row_shape", shapes.__getitem__):
                    spent[f"{name} {shape}"] = tried((what, name, shape), partial(graph_seconds, run, 7))
    else:
        tiles = TILES[8 if rows * OSS.top_k <= 8 * OSS.num_experts else 256]
        for tile in tiles:
            with mock.patch.object(moe, "tiling_for", lambda *given, tile=tile: Tiling(tile, tile)):
                spent[str(tuple(tile))] = tried((what, tile), partial(graph_seconds, run, 7))
    known = {name: seconds for name, seconds in spent.items() if seconds is not None}
    return {name: round(known[name] * 1e6 / LAYERS, 2) for name in sorted(known, key=known.__getitem__)}


def compile_experts(spec: str, rows: int) -> None:
    """Run a layer with every tile once."""
    try:
        (layer,) = make_layers(spec, 1)
    except ConfigError:
        return
    x = torch.randn(rows, DIM, device=GPU, dtype=BF16)
    time_tiles((spec, rows), rows, lambda: layer.forward(x))
    layer.forward(x)


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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--chosen", action="store_true", help="time what the engine takes, and no other shape")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-few", action="store_true")
    parser.add_argument("--skip-experts", action="store_true")


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_codes", options.output)
    bandwidth, _ = measure_limits(report)
    names = QUICK if options.quick else tuple(MATRICES)
    kinds = {(k, is_gated) for _, k, is_gated in (MATRICES[name] for name in names)}
    expert_rows = [rows for rows in ROWS if not options.quick or rows in (1, 8, 64)]
    compiling: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for spec in options.formats:
        if not options.skip_few:
            compiling += [
                (compile_few, (spec, rows, *kind, not options.chosen)) for rows in options.rows for kind in kinds
            ]
        if not options.skip_experts:
            compiling += [(compile_experts, (spec, rows)) for rows in expert_rows]
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, compiling)
    print(f"checked and compiled after {report.seconds:.0f} s", flush=True)
    if not options.skip_experts:
        for spec in ("plain", *options.formats):
            time_experts(report, spec, expert_rows, bandwidth)
    if not options.skip_few:
        best: Ranks = defaultdict(lambda: defaultdict(dict))
        for spec in options.formats:
            for name in names:
                time_few(report, spec, name, options.rows, bandwidth, best, not options.chosen)
        print_best(best)
    return report.end()
