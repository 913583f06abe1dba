"""Check the kernel that writes quantised keys and values, and time it in several shapes, beside the write in bf16."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from unittest import mock

import torch

from kvasir.kernels import quantized_qkv
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir_lab.kernels.frame import BF16, Grid, Report, check_grids
from kvasir_lab.kernels.kv_world import CODECS, SIZE, Variant, World, in_turns
from kvasir_lab.kernels.pages import DIM, GROUPS, HEADS
from tests.kernels.check_quantized import check_quantized_qkv

WRITTEN = (1, 8, 64, 256, 2048)  # rows
GRIDS = {"write": Grid(quantized_qkv.grid, check_quantized_qkv, {torch.bfloat16: 1, torch.float16: 2})}
WRITES = {  # heads, blocks, width, stages, warps
    "turned": [
        (8, 4, 16, 2, 1),
        (16, 4, 16, 2, 1),
        (4, 4, 16, 2, 1),
        (8, 2, 32, 1, 1),
        (8, 4, 16, 2, 2),
        (16, 4, 16, 2, 4),
        (16, 1, 64, 0, 4),
        (16, 1, 64, 0, 8),
    ],
    "plain codes": [(16, 1, 64, 0, 4), (8, 1, 64, 0, 1), (4, 1, 64, 0, 1), (8, 1, 64, 0, 2), (16, 1, 64, 0, 8)],
}


def write_once(
    world: World, heads: torch.Tensor, ops: HeadOps, slots: torch.Tensor, numbers: tuple | None, layer: int
) -> torch.Tensor:
    cache = world.caches[layer]
    if numbers is None:
        return cache.codec.write_fused(cache, heads, ops, slots)
    with mock.patch.object(quantized_qkv.Shape, "of", lambda *_: quantized_qkv.Shape(*numbers)):
        return cache.codec.write_fused(cache, heads, ops, slots)


def written(rows: int) -> list[Variant]:
    """Variants of the fused write of ``rows`` rows into every codec's pages."""
    table, variants = RopeTable(RopeSpec(500000.0, DIM), 4096, torch.device("cuda")).table, []
    for name in (*CODECS, "int4"):
        world = World(name, [(rows, 1)], 20)
        heads = torch.randn(rows, HEADS + 2 * GROUPS, DIM, device="cuda", dtype=BF16)
        positions, slots = torch.arange(rows, device="cuda"), SIZE[name] + torch.arange(rows, device="cuda")
        kinds = {"plain": [], "int4_bdr": WRITES["turned"]}.get(name, WRITES["plain codes"])
        for numbers in (None, *kinds):
            config = {"variant": "as chosen"} if numbers is None else dataclasses.asdict(quantized_qkv.Shape(*numbers))
            run = functools.partial(write_once, world, heads, HeadOps(HEADS, table, positions), slots, numbers)
            variants.append(Variant(world, config, run, checked=False))
    return variants


def compile_write(place: int) -> None:
    """Into Triton's cache on disk."""
    written(2)[place].run(0)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("kv-codec-kernels", options.output)
    compiling = [(compile_write, (place,)) for place in range(len(written(1)))]
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, compiling)
    for rows in WRITTEN:
        in_turns(report, f"write {rows} rows", written(rows))
        report.save()
    return report.end()
