"""Time rows of drafts in a captured step: kernel by kernel, row by row, and told apart on the device.

bf16 and int4_bdr pages; the last way over bf16 in several shapes. About a minute, most of it compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch

from kvasir.kernels.paged_attention import TogetherShape, paged_together_triton
from kvasir.types import StepBatch, Together
from kvasir_lab.kernels.frame import Report
from kvasir_lab.kernels.kv_world import ROWS, Variant, World, in_turns, worlds
from kvasir_lab.kernels.pages import SPEC, Spans

# Shapes of the kernel that tells spans apart on the device, over bf16 pages.
TOGETHER = [
    (64, 64, 4, 3, 1, 4),
    (64, 64, 4, 2, 2, 4),
    (64, 32, 4, 4, 2, 4),
    (64, 32, 4, 3, 3, 6),
    (32, 64, 2, 3, 3, 6),
    (32, 32, 2, 4, 4, 8),
    (16, 64, 4, 3, 3, 6),
    (16, 64, 2, 3, 3, 6),
]  # block_m, block_n, warps, stages, at_once, programs: of plain pages


def together_of(world: World) -> StepBatch:
    """The step as a captured one has its drafts: spans known on the device alone."""
    lengths = torch.tensor([n for _, n in world.spans]).cuda()
    place = torch.cat([torch.arange(n) for _, n in world.spans]).cuda()
    alone = world.row_by_row()
    chain = torch.tensor([(2 << i) - 1 - (1 << 64) * (i == 63) for i in place.tolist()]).cuda()[:, None]
    most = next(form for form in world.backend().together() if form >= max(n for _, n in world.spans))
    return dataclasses.replace(
        alone,
        ancestors=chain if world.batch.ancestors is None else world.batch.ancestors,
        positions=world.batch.positions,
        together=Together(place, lengths.repeat_interleave(lengths), most),
    )


def together_once(world: World, batch: StepBatch, shape: TogetherShape, layer: int) -> torch.Tensor:
    out, planes, rows = torch.empty_like(world.q), world.caches[layer].planes, batch.together
    paged_together_triton(
        world.q,
        planes["k"],
        planes["v"],
        batch.tables[0],
        batch.context,
        rows.place,
        rows.length,
        batch.ancestors,
        batch.positions,
        rows.most,
        SPEC.scale,
        out,
        shape=shape,
    )
    return out


def together_arms(report: Report, case: str, spans: Spans) -> None:
    variants, tree = list[Variant](), "tree" in case
    for world in worlds(spans, tree):
        if world.name not in ("plain", "int4_bdr"):
            continue
        variants.append(Variant(world, {"variant": "one by one"}, world.run(world.backend())))
        if not tree:
            variants.append(Variant(world, {"variant": "row by row"}, world.run(world.backend(), world.row_by_row())))
        if max(n for _, n in spans) > world.backend().together()[-1]:
            continue
        batch = together_of(world)
        variants.append(Variant(world, {"variant": "together"}, world.run(world.backend(), batch)))
        for numbers in TOGETHER if world.name == "plain" else ():
            shape = TogetherShape(*numbers)
            variants.append(
                Variant(world, dataclasses.asdict(shape), functools.partial(together_once, world, batch, shape))
            )
    in_turns(report, "together " + case, variants)


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("kv-codec-kernels", options.output)
    for case, spans in ROWS.items():
        together_arms(report, case, spans)
        torch.cuda.empty_cache()
        report.save()
    return report.end()
