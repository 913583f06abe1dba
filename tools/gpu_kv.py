"""On a machine with an NVIDIA GPU: the kernels of the quantised caches against their references, and timings beside bf16.

    python tools/gpu_kv.py RESULT.json [--skip-checks | --together | --write]

``--together``: only the rows of drafts in a captured step (bf16 and int4_bdr), by the kernels as an eager step takes them, row by row,
and told apart on the device, the last in several shapes; about a minute, most of it compiling. ``--write``: only the write, in several
shapes.

Llama-8B's heads (32 query, 8 KV, 128 wide), bf16 queries. Everything is timed inside CUDA graphs, over as many layers as
keep the L2 cache from holding the keys; what is compared takes turns, round after round. Every variant's result is compared
with plain torch over what the codes stand for. Exit status 1 when a check failed.
"""

# ruff: noqa: B023
from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention.backend import Site  # noqa: E402
from kvasir.attention.backends.triton import TritonBackend  # noqa: E402
from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.kernels import quantized_attention, quantized_decode, quantized_qkv  # noqa: E402
from kvasir.kernels.decode_attention import Rows  # noqa: E402
from kvasir.kernels.decode_attention import Shape as DecodeShape  # noqa: E402
from kvasir.kernels.fused_qkv import HeadOps  # noqa: E402
from kvasir.kernels.paged_attention import TogetherShape, paged_attention_ref, paged_together_triton  # noqa: E402
from kvasir.kernels.quantized_attention import Shape as RowsShape  # noqa: E402
from kvasir.kv.codec import Codec  # noqa: E402
from kvasir.kv.pool import KVPool  # noqa: E402
from kvasir.layers.rope import RopeTable  # noqa: E402
from kvasir.layers.spec import RopeSpec  # noqa: E402
from kvasir.technique import load  # noqa: E402
from kvasir.types import CacheGroup, StepBatch, Together  # noqa: E402
from tests.kernels.check_quantized import check_quantized_attention, check_quantized_decode, check_quantized_qkv  # noqa: E402
from tools.gpu_attention import gathered  # noqa: E402
from tools.gpu_kernels import DIM, GROUPS, HEADS, SPEC, copy_bandwidth, make_batch  # noqa: E402

Spans = list[tuple[int, int]]
DECODES: dict[str, Spans] = {
    "1 x 128": [(127, 1)],
    "8 x 1k": [(1023, 1)] * 8,
    "64 x 1k": [(1023, 1)] * 64,
    "256 x 1k": [(1023, 1)] * 256,
    "16 x 32k": [(32767, 1)] * 16,
    "1 x 32k": [(32767, 1)],
}
ROWS: dict[str, Spans] = {
    "1 x 8 rows x 32k": [(32760, 8)],
    "16 x 8 rows x 4k": [(4088, 8)] * 16,
    "64 x 4 rows x 1k": [(1020, 4)] * 64,
    "1 x tree of 16 x 32k": [(32752, 16)],
    "1 x 64 rows x 32k": [(32704, 64)],
    "16 x 32 rows x 4k": [(4064, 32)] * 16,
}
CHUNKS: dict[str, Spans] = {"8k": [(0, 8192)], "2k at 30k": [(30720, 2048)], "256 rows at 8k": [(7936, 256)]}
CODECS = ("plain", "fp8", "int8", "int4_bdr")
SIZE = {"plain": 16, "fp8": 32, "int8": 32, "int4": 64, "int4_bdr": 64}
KERNEL = {"fp8": "fp8", "int8": "int8", "int4_bdr": "int4"}
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
CHECKS = {
    "write": (quantized_qkv.grid, check_quantized_qkv),
    "decode": (quantized_decode.grid, check_quantized_decode),
    "rows": (quantized_attention.grid, check_quantized_attention),
}
WRITTEN = (1, 8, 64, 256, 2048)  # rows
ROUNDS, PATIENCE_S = 3, 165


# ------------------------------------------------------------------------------------------------- checks and compiling


def check_case(op: str, dtype: torch.dtype, index: int) -> tuple[float, str]:
    cases, check = CHECKS[op]
    case = list(cases())[index]
    try:
        return check(case, dtype, "cuda"), ""
    except Exception as e:  # a failed compile or launch is a result, too
        return float("inf"), f"{op} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}"


def compile_decode(name: str, numbers: tuple, count: int) -> None:
    """Into Triton's cache on disk, so that timing does not wait for it."""
    decode_once(World(name, [(40, 1)] * count, 1), DecodeShape(*numbers), 0)


def compile_rows(name: str, numbers: tuple) -> None:
    world = World(name, [(600, 8)], 1)
    for splits in (1, 2):
        rows_once(world, numbers, tiles_of(world, numbers[0]), 0, splits)


def in_parallel(with_checks: bool, only_write: bool) -> list[dict]:
    with ProcessPoolExecutor(
        min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as processes:
        compiling = [processes.submit(compile_write, place) for place in range(len(written(1)))]
        if not only_write:
            compiling += [
                processes.submit(compile_decode, name, numbers, count)
                for name in KERNEL
                for numbers in {n[:3]: n for n in WORDS[4 if name == "int4_bdr" else 8]}.values()
                for count in (1, 64, 256)
            ]
            compiling += [
                processes.submit(compile_rows, name, numbers)
                for name in KERNEL
                for numbers in {n[:4]: n for n in TILES}.values()
            ]
        ops = {op: checks for op, checks in CHECKS.items() if op == "write" or not only_write} if with_checks else {}
        checking = {
            processes.submit(check_case, op, dtype, i): (op, dtype)
            for op, (cases, _) in ops.items()
            for dtype, step in ((torch.bfloat16, 1), (torch.float16, 2))
            for i in range(0, len(list(cases())), step)
        }
        return gathered(checking, compiling)


# ------------------------------------------------------------------------------------------------------ what is computed


class World:
    """Pages of random rows in random order, a step over them, and what is right. ``tree``: the spans are binary trees."""

    def __init__(self, name: str, spans: Spans, layers: int, tree: bool = False) -> None:
        size, codec = SIZE[name], load("kvasir.kv.codecs", name, Codec)
        counts = [-(-(s + n) // size) for s, n in spans]
        self.name, self.spans = name, spans
        self.pool = KVPool(
            [CacheGroup("full", tuple(range(layers)), GROUPS, DIM)],
            codec,
            [1 + sum(counts)],
            size,
            "cuda",
            torch.bfloat16,
        )
        self.caches = [self.pool.layer(i) for i in range(layers)]
        for cache in self.caches:
            fill(name, cache.planes)
        order = (1 + torch.randperm(sum(counts))).to(torch.int32)
        tables = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True).contiguous().cuda()
        self.batch = make_batch(spans, tables, size)
        if tree:
            self.batch = dataclasses.replace(self.batch, **ancestry(spans))
        self.q = torch.randn(sum(n for _, n in spans), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.rows = Rows(
            torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            torch.zeros(len(spans), GROUPS, dtype=torch.int32, device="cuda"),
        )
        row_bytes = sum(p.width * p.dtype.itemsize for p in codec.planes(DIM, torch.bfloat16))
        self.kv_bytes = sum(s + n for s, n in spans) * GROUPS * row_bytes

    def backend(self, short: bool = True) -> TritonBackend:
        chosen = TritonBackend()
        chosen.prepare(Site("cuda", torch.bfloat16, self.caches[0].codec.kernel, SIZE[self.name], (SPEC,)))
        if not short:
            chosen.takes_short = lambda spec, length: False
        return chosen

    def run(self, backend: TritonBackend, batch: StepBatch | None = None) -> Callable[[int], torch.Tensor]:
        """One layer, as the backend does it."""
        batch = dataclasses.replace(batch or self.batch, scratch={})
        backend.plan(batch)
        return lambda layer: backend.run(self.q, self.caches[layer], SPEC, batch)

    def row_by_row(self) -> StepBatch:
        """Each row as a span of its own, as a captured step has its drafts."""
        return make_batch(
            [(s + i, 1) for s, n in self.spans for i in range(n)],
            self.batch.tables[0].repeat_interleave(torch.tensor([n for _, n in self.spans]).cuda(), 0),
            SIZE[self.name],
        )

    def truth(self) -> torch.Tensor:
        """Layer 0 in fp32, span by span."""
        cache, batch, out, row = self.caches[0], self.batch, [], 0
        for s, (start, length) in enumerate(self.spans):
            pages = batch.tables[0][s : s + 1, : -(-(start + length) // SIZE[self.name])]
            if self.name == "plain":
                k, v = (cache.planes[x][pages[0].long()].float() for x in "kv")
            else:
                k, v = (
                    cache.codec.decode({n[1:]: p[pages[0].long()] for n, p in cache.planes.items() if n[0] == x}, DIM)
                    for x in "kv"
                )
            table = torch.arange(pages.shape[1], device="cuda")[None]
            mine = slice(row, row + length)
            trees = (
                {}
                if batch.ancestors is None
                else {"ancestors_TA": batch.ancestors[mine], "positions_T": batch.positions[mine]}
            )
            out.append(
                paged_attention_ref(self.q[mine].float(), k, v, table, [start], [length], SPEC.scale, **trees)[0]
            )
            row += length
        return torch.cat(out)


def fill(name: str, planes: dict[str, torch.Tensor]) -> None:
    for side in "kv":
        if name == "plain":
            planes[side].normal_()
        elif name == "fp8":
            planes[side].view(torch.uint8).random_(0, 120)
        else:
            planes[side].random_(0, 256)
        if name != "plain":
            planes[side + "_meta"].uniform_(0.01, 0.02)


def ancestry(spans: Spans) -> dict[str, torch.Tensor]:
    """Row i of a span hangs on row (i - 1) // 2."""
    bits, positions = [], []
    for start, length in spans:
        known, depth = [1], [0]
        for i in range(1, length):
            known.append(known[(i - 1) // 2] | 1 << i)
            depth.append(depth[(i - 1) // 2] + 1)
        bits += [x - (1 << 64) if x >> 63 else x for x in known]
        positions += [start + d for d in depth]
    return {"ancestors": torch.tensor(bits).cuda()[:, None], "positions": torch.tensor(positions).cuda()}


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


# -------------------------------------------------------------------------------------------------------------- timings


@dataclasses.dataclass
class Variant:
    world: World
    config: dict
    run: Callable[[int], torch.Tensor]
    checked: bool = True


def captured(variant: Variant) -> tuple[Callable[[], None], torch.Tensor, Callable[[], bool]] | None:
    """A replay of all layers, layer 0's result, and whether the last replay's last layer is right. None: it does not run."""
    layers = range(len(variant.world.caches))
    try:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            out, want = variant.run(0).clone(), variant.run(layers[-1]).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in layers:
                last = variant.run(layer)
        return graph.replay, out, lambda: torch.allclose(last.float(), want.float(), atol=1e-3, rtol=1e-2)
    except Exception as e:
        print("does not run:", variant.config, type(e).__name__, str(e)[:200], flush=True)
        torch.cuda.synchronize()
        return None


def in_turns(case: str, variants: list[Variant]) -> list[dict]:
    """Every variant once a round; the median of the rounds."""
    ready, truths, arms = [], {}, []
    for variant in variants:
        found = captured(variant)
        if found is not None:
            ready.append((variant, *found))
    times: dict[int, list[float]] = {i: [] for i in range(len(ready))}
    for _ in range(ROUNDS):
        for i, (_, replay, *_) in enumerate(ready):
            replay()
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(4):
                replay()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) / 4 * 1e3)
    for i, (variant, _, out, right) in enumerate(ready):
        world, error = variant.world, 0.0
        if variant.checked:
            if world not in truths:
                truths[world] = world.truth()
            want = truths[world]
            error = float((out.reshape(want.shape).float() - want).abs().max() / want.abs().max())
        us = statistics.median(times[i]) / len(world.caches)
        metrics = {
            "us": round(us, 2),
            "us_least": round(min(times[i]) / len(world.caches), 2),
            "TB_per_s": round(world.kv_bytes / us / 1e6, 3),
            "error": round(error, 5),
            "failed": int(not error < 2e-2 or not right()),
        }
        arms.append(arm(case, {"codec": world.name, **variant.config}, metrics))
        print(case, arms[-1]["config"], metrics, flush=True)
    return arms


def worlds(spans: Spans, tree: bool = False) -> list[World]:
    made = []
    for name in CODECS:
        one = sum(s + n for s, n in spans) * GROUPS * 2 * DIM * {"plain": 2, "int4_bdr": 0.53}.get(name, 1.03)
        made.append(World(name, spans, max(1, min(256, int((256 << 20) / one))), tree))
    return made


def decode_arms(case: str, spans: Spans) -> list[dict]:
    variants = []
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
    return in_turns("decode " + case, variants)


def rows_arms(case: str, spans: Spans) -> list[dict]:
    variants, tree = [], "tree" in case
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
    return in_turns("rows " + case, variants)


def together_of(world: World) -> StepBatch:
    """As a captured step has its drafts: spans known on the device alone."""
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


def together_arms(case: str, spans: Spans) -> list[dict]:
    variants, tree = [], "tree" in case
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
    return in_turns("together " + case, variants)


def chunk_arms(case: str, spans: Spans) -> list[dict]:
    """Long spans: numbers are made of the codes once a layer."""
    return in_turns(
        "chunk " + case,
        [
            Variant(world, {"variant": "as chosen"}, world.run(world.backend()))
            for world in (World(name, spans, 2) for name in CODECS)
        ],
    )


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
    """The fused write of ``rows`` rows into every codec."""
    table, variants = RopeTable(RopeSpec(500000.0, DIM), 4096, torch.device("cuda")).table, []
    for name in (*CODECS, "int4"):
        world = World(name, [(rows, 1)], 20)
        heads = torch.randn(rows, HEADS + 2 * GROUPS, DIM, device="cuda", dtype=torch.bfloat16)
        positions, slots = torch.arange(rows, device="cuda"), SIZE[name] + torch.arange(rows, device="cuda")
        kinds = {"plain": [], "int4_bdr": WRITES["turned"]}.get(name, WRITES["plain codes"])
        for numbers in (None, *kinds):
            config = {"variant": "as chosen"} if numbers is None else dataclasses.asdict(quantized_qkv.Shape(*numbers))
            run = functools.partial(write_once, world, heads, HeadOps(HEADS, table, positions), slots, numbers)
            variants.append(Variant(world, config, run, checked=False))
    return variants


def compile_write(place: int) -> None:
    written(2)[place].run(0)


def ratios_of(arms: list[dict]) -> dict[str, float]:
    """By case and codec: ours in bf16 over as chosen, the fastest in bf16 over as chosen, as chosen over the best shape."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    arms, late = [] if options.together else in_parallel(not options.skip_checks, options.write), []

    def save() -> int:
        failed = sum(a["metrics"].get("failed", 0) for a in arms)
        limits = {
            "copy_GB_per_s": round(copy_bandwidth() / 1e9),
            "failed_checks": failed,
            "left_out": late,
            "seconds": round(time.perf_counter() - began, 1),
        }
        options.output.write_text(as_json(result("kv-codec-kernels", arms, ratios=ratios_of(arms), limits=limits)))
        return failed

    print(f"compiled and checked in {time.perf_counter() - began:.0f} s", flush=True)
    save()
    work = [(decode_arms, case, spans) for case, spans in DECODES.items()] + [
        (rows_arms, case, spans) for case, spans in ROWS.items()
    ]
    work += [(chunk_arms, case, spans) for case, spans in CHUNKS.items()]
    if options.write:
        work = []
    elif options.together:
        work = [(together_arms, case, spans) for case, spans in ROWS.items()]
    for function, case, spans in work:
        if time.perf_counter() - began > PATIENCE_S:
            late.append(case)
            continue
        arms += function(case, spans)
        torch.cuda.empty_cache()
        save()
    if not options.together:
        for rows in WRITTEN:
            arms += in_turns(f"write {rows} rows", written(rows))
    failed = save()
    print(json.dumps(ratios_of(arms), indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
