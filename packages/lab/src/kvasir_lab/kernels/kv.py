"""Check the attention kernels of the quantised caches, and time them beside bf16, ours and those of packages.

Decodes, rows of drafts and chunks over plain, fp8, int8 and int4_bdr pages. "as chosen" is what the engine runs, the
other arms are other shapes of the kernels. Ratios above 1: the quantised cache is faster. See kv_world.py for what all
cases share.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from kvasir.kernels import quantized_attention, quantized_decode
from kvasir.kernels.decode_attention import Shape as DecodeShape
from kvasir.kernels.quantized_attention import Shape as RowsShape
from kvasir_lab.kernels.frame import Grid, Report, check_grids, copy_bandwidth
from kvasir_lab.kernels.kv_world import CODECS, KERNEL, ROWS, SIZE, Variant, World, in_turns, worlds
from kvasir_lab.kernels.pages import DIM, GROUPS, HEADS, SPEC, Spans
from tests.kernels.check_quantized import check_quantized_attention, check_quantized_decode

DECODES: dict[str, Spans] = {
    "1 x 128": [(127, 1)],
    "8 x 1k": [(1023, 1)] * 8,
    "64 x 1k": [(1023, 1)] * 64,
    "256 x 1k": [(1023, 1)] * 256,
    "16 x 32k": [(32767, 1)] * 16,
    "1 x 32k": [(32767, 1)],
}
CHUNKS: dict[str, Spans] = {"8k": [(0, 8192)], "2k at 30k": [(30720, 2048)], "256 rows at 8k": [(7936, 256)]}
# Shapes of the decode kernel, by bits of a code.
WORDS = {  # block_n, warps, stages, programs, at_once: of 4-bit and of 8-bit codes
    4: [
        (64, 1, 4, 16, 8),
        (64, 1, 4, 8, 8),
        (64, 1, 4, 12, 8),
        (64, 1, 4, 32, 8),
        (64, 1, 5, 12, 6),
        (32, 1, 3, 24, 12),
        (32, 1, 4, 24, 12),
        (32, 1, 4, 12, 12),
        (32, 1, 5, 20, 10),
        (64, 1, 3, 10, 10),
        (128, 4, 3, 6, 2),
        (128, 2, 3, 8, 4),
    ],
    8: [
        (32, 1, 4, 14, 7),
        (32, 1, 4, 7, 7),
        (32, 1, 4, 28, 7),
        (32, 1, 5, 10, 5),
        (32, 1, 3, 10, 10),
        (32, 1, 3, 20, 10),
        (32, 1, 2, 24, 12),
        (16, 1, 4, 24, 12),
        (64, 4, 3, 9, 3),
        (64, 4, 3, 6, 3),
        (128, 4, 3, 4, 2),
        (128, 4, 3, 6, 2),
    ],
}
# Shapes of the kernel for several rows.
TILES = [
    (16, 32, 1, 3, 8),
    (16, 32, 1, 3, 4),
    (16, 32, 1, 3, 6),
    (16, 32, 1, 4, 8),
    (16, 16, 1, 4, 10),
    (16, 64, 1, 3, 6),
    (16, 32, 2, 3, 6),
    (16, 64, 2, 3, 4),
    (32, 32, 1, 3, 8),
    (32, 64, 2, 3, 4),
]  # block_m, block_n, warps, stages, at_once
PATIENCE_SECONDS = 165  # cases that would begin later are left out, and named in the result
EVERY = {torch.bfloat16: 1, torch.float16: 2}
GRIDS = {
    "decode": Grid(quantized_decode.grid, check_quantized_decode, EVERY),
    "rows": Grid(quantized_attention.grid, check_quantized_attention, EVERY),
}


# ----------------------------------------------------------------------------------------------------------- compiling


def compile_decode(name: str, numbers: tuple, count: int) -> None:
    """Into Triton's cache on disk, so that timing does not wait for it."""
    decode_once(World(name, [(40, 1)] * count, 1), DecodeShape(*numbers), 0)


def compile_rows(name: str, numbers: tuple) -> None:
    """Into Triton's cache on disk."""
    world = World(name, [(600, 8)], 1)
    for splits in (1, 2):
        rows_once(world, numbers, tiles_of(world, numbers[0]), 0, splits)


def to_compile() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Shapes that differ only in how work is cut share a kernel."""
    decodes = [
        (compile_decode, (name, numbers, count))
        for name in KERNEL
        for numbers in {n[:3]: n for n in WORDS[4 if name == "int4_bdr" else 8]}.values()
        for count in (1, 64, 256)
    ]
    rows = [(compile_rows, (name, n)) for name in KERNEL for n in {n[:4]: n for n in TILES}.values()]
    return [*decodes, *rows]


# -------------------------------------------------------------------------------------------------------------- timing


def decode_once(world: World, shape: DecodeShape, layer: int) -> torch.Tensor:
    batch, out = world.batch, torch.empty_like(world.q)
    quantized_decode.quantized_decode_triton(
        world.q,
        world.caches[layer].planes,
        KERNEL[world.name],
        batch.tables[0],
        batch.context,
        batch.row_start,
        world.rows,
        SPEC.scale,
        out,
        shape=shape,
    )
    return out


def tiles_of(world: World, block_m: int):
    with mock.patch.object(quantized_attention, "COLUMNS", block_m):
        spans = list(range(len(world.spans)))
        return quantized_attention.plan_rows(world.batch.starts, world.batch.lengths, spans, HEADS // GROUPS, "cuda")


def rows_once(world: World, numbers: tuple, tiles, layer: int, splits: int | None = None) -> torch.Tensor:
    batch, out = world.batch, torch.empty_like(world.q)
    quantized_attention.quantized_attention_triton(
        world.q,
        world.caches[layer].planes,
        KERNEL[world.name],
        batch.tables[0],
        batch.context,
        batch.row_start,
        tiles,
        SPEC.scale,
        out,
        ancestors_TA=batch.ancestors,
        positions_T=batch.positions,
        shape=RowsShape(*numbers[1:]),
        num_splits=splits,
    )
    return out


def outside(world: World) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Kernels of packages over the plain pages, where they are installed."""
    batch, starts, lengths = world.batch, world.batch.starts, world.batch.lengths
    ends = torch.tensor([s + n for s, n in world.spans], dtype=torch.int32).cuda()
    try:
        from flash_attn_interface import flash_attn_with_kvcache as fa3

        def third(layer: int) -> torch.Tensor:
            k, v = (world.caches[layer].planes[x].transpose(1, 2) for x in "kv")
            found = fa3(
                world.q,
                k,
                v,
                cache_seqlens=ends,
                page_table=batch.tables[0],
                cu_seqlens_q=batch.row_start,
                max_seqlen_q=max(lengths),
                softmax_scale=SPEC.scale,
                causal=True,
            )
            return found if isinstance(found, torch.Tensor) else found[0]

        yield "flash_attn 3", third
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_with_kvcache as fa2

        if len(set(world.spans)) == 1:
            dense = [
                torch.randn(2, len(starts), starts[0] + lengths[0], GROUPS, DIM, device="cuda", dtype=torch.bfloat16)
                for _ in world.caches
            ]
            q = world.q.view(len(starts), lengths[0], HEADS, DIM)
            yield (
                "flash_attn 2, dense",
                lambda layer: fa2(q, *dense[layer], cache_seqlens=ends, softmax_scale=SPEC.scale, causal=True),
            )
    except ImportError:
        pass
    try:
        import flashinfer

        counts = [-(-int(e) // SIZE["plain"]) for e in ends]
        first = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).cuda()
        pages = torch.cat([batch.tables[0][s, :c] for s, c in enumerate(counts)])
        last, space = (ends - 1) % SIZE["plain"] + 1, torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        how = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": SPEC.scale}
        if max(lengths) == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
            wrapper.plan(first, pages, last, HEADS, GROUPS, DIM, SIZE["plain"], **how)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
            wrapper.plan(batch.row_start, first, pages, last, HEADS, GROUPS, DIM, SIZE["plain"], causal=True, **how)
        yield "flashinfer", lambda layer: wrapper.run(world.q, tuple(world.caches[layer].planes[x] for x in "kv"))
    except Exception as e:  # it may want a compiler that is not there
        print("flashinfer:", type(e).__name__, str(e)[:200], flush=True)


def decode_arms(report: Report, case: str, spans: Spans) -> None:
    variants: list[Variant] = []
    for world in worlds(spans):
        variants.append(Variant(world, {"variant": "as chosen"}, world.run(world.backend())))
        if world.name == "plain":
            variants += [
                Variant(world, {"variant": name}, run, checked="dense" not in name) for name, run in outside(world)
            ]
        else:
            for numbers in WORDS[4 if world.name == "int4_bdr" else 8]:
                shape = DecodeShape(*numbers)
                variants.append(Variant(world, dataclasses.asdict(shape), functools.partial(decode_once, world, shape)))
    in_turns(report, "decode " + case, variants)


def rows_arms(report: Report, case: str, spans: Spans) -> None:
    variants, tree = list[Variant](), "tree" in case
    for world in worlds(spans, tree):
        variants.append(Variant(world, {"variant": "as chosen"}, world.run(world.backend())))
        if world.name == "plain":
            if not tree:
                variants += [
                    Variant(world, {"variant": name}, run, checked="dense" not in name) for name, run in outside(world)
                ]
            continue
        variants.append(Variant(world, {"variant": "numbers in scratch"}, world.run(world.backend(short=False))))
        if not tree:
            variants.append(Variant(world, {"variant": "row by row"}, world.run(world.backend(), world.row_by_row())))
        for numbers in TILES if not tree else ():
            tiles = tiles_of(world, numbers[0])
            if tiles.block_m == numbers[0]:
                config = {"block_m": numbers[0], **dataclasses.asdict(RowsShape(*numbers[1:]))}
                variants.append(Variant(world, config, functools.partial(rows_once, world, numbers, tiles)))
    in_turns(report, "rows " + case, variants)


def chunk_arms(report: Report, case: str, spans: Spans) -> None:
    """Long spans: numbers are made of the codes once a layer."""
    made = [World(name, spans, 2) for name in CODECS]
    in_turns(report, "chunk " + case, [Variant(w, {"variant": "as chosen"}, w.run(w.backend())) for w in made])


def ratios_of(arms: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios by case and codec: our bf16, and the fastest bf16, over as chosen; as chosen over the best shape."""
    found, cases = (
        {},
        dict.fromkeys(
            a["name"] for a in arms if a["name"].startswith(("decode", "rows", "chunk")) and "codec" in a["config"]
        ),
    )
    for case in cases:
        mine = [a for a in arms if a["name"] == case]
        plain = [a for a in mine if a["config"]["codec"] == "plain"]
        for name in KERNEL:
            ours = [a for a in mine if a["config"]["codec"] == name]
            chosen = next((a["metrics"]["us"] for a in ours if a["config"].get("variant") == "as chosen"), None)
            if chosen is None or not plain:
                continue
            found[f"{case}: ours bf16/{name}"] = round(plain[0]["metrics"]["us"] / chosen, 3)
            found[f"{case}: fastest bf16/{name}"] = round(min(a["metrics"]["us"] for a in plain) / chosen, 3)
            found[f"{case}: {name}/its best"] = round(chosen / min(a["metrics"]["us"] for a in ours), 3)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("kv-codec-kernels", options.output)
    check_grids(report, __name__, {} if options.skip_checks else GRIDS, to_compile())
    report.limits |= {"copy_GB_per_s": round(copy_bandwidth() / 1e9), "left_out": []}
    work = [(decode_arms, case, spans) for case, spans in DECODES.items()]
    work += [(rows_arms, case, spans) for case, spans in ROWS.items()]
    work += [(chunk_arms, case, spans) for case, spans in CHUNKS.items()]
    for add_arms, case, spans in work:
        if report.seconds > PATIENCE_SECONDS:
            report.limits["left_out"].append(case)
            continue
        add_arms(report, case, spans)
        torch.cuda.empty_cache()
        report.ratios = ratios_of(report.arms)
        report.save()
    return report.end()
