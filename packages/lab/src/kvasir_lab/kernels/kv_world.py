"""Steps over pages of every codec, for the experiments kv, kv_drafts and kv_write.

Llama-8B's heads, bf16 queries. Variants take turns, in CUDA graphs over as many layers as keep the L2 cache from
holding the keys; every result is compared with plain torch over the numbers that the codes stand for.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.triton import TritonBackend
from kvasir.kernels.decode_attention import Rows
from kvasir.kernels.paged_attention import paged_attention_ref
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow, StepBatch
from kvasir_lab.kernels.frame import BF16, COLD_BYTES, Report, elapsed, tried
from kvasir_lab.kernels.pages import DIM, GROUPS, SPEC, Spans, make_batch, queries

CODECS = ("plain", "fp8", "int8", "int4_bdr")
SIZE = {"plain": 16, "fp8": 32, "int8": 32, "int4": 64, "int4_bdr": 64}
KERNEL = {"fp8": "fp8", "int8": "int8", "int4_bdr": "int4"}
ROWS: dict[str, Spans] = {
    "1 x 8 rows x 32k": [(32760, 8)],
    "16 x 8 rows x 4k": [(4088, 8)] * 16,
    "64 x 4 rows x 1k": [(1020, 4)] * 64,
    "1 x tree of 16 x 32k": [(32752, 16)],
    "1 x 64 rows x 32k": [(32704, 64)],
    "16 x 32 rows x 4k": [(4064, 32)] * 16,
}
ROUNDS = 3


class World:
    """Random pages in random order, a step over them, and the right result. ``tree``: the spans are binary trees."""

    def __init__(self, name: str, spans: Spans, layers: int, tree: bool = False) -> None:
        size, codec = SIZE[name], load("kvasir.kv.codecs", name, Codec)
        counts = [-(-(s + n) // size) for s, n in spans]
        self.name, self.spans = name, spans
        self.pool = KVPool(
            [CacheGroup("full", tuple(range(layers)), (CacheRow(GROUPS, DIM, DIM),) * layers)],
            codec,
            [1 + sum(counts)],
            size,
            "cuda",
            BF16,
        )
        self.caches = [self.pool.layer(i) for i in range(layers)]
        for cache in self.caches:
            fill(name, cache.planes)
        order = (1 + torch.randperm(sum(counts))).to(torch.int32)
        tables = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True).contiguous().cuda()
        self.batch = make_batch(spans, tables, size)
        if tree:
            self.batch = dataclasses.replace(self.batch, **ancestry(spans))
        self.q = queries(spans)
        self.rows = Rows(
            torch.arange(len(spans), dtype=torch.int32, device="cuda"),
            torch.zeros(len(spans), GROUPS, dtype=torch.int32, device="cuda"),
        )
        row_bytes = sum(p.width * p.dtype.itemsize for p in codec.planes(DIM, BF16))
        self.kv_bytes = sum(s + n for s, n in spans) * GROUPS * row_bytes

    def backend(self, short: bool = True) -> TritonBackend:
        chosen = TritonBackend()
        chosen.prepare(Site("cuda", BF16, self.caches[0].codec.kernel, SIZE[self.name], (SPEC,)))
        if not short:
            chosen.takes_short = lambda spec, length: False
        return chosen

    def run(self, backend: TritonBackend, batch: StepBatch | None = None) -> Callable[[int], torch.Tensor]:
        """A call that computes one layer, as the backend does it."""
        batch = dataclasses.replace(batch or self.batch, scratch={})
        backend.plan(batch)
        return lambda layer: backend.run(self.q, self.caches[layer], SPEC, batch)

    def row_by_row(self) -> StepBatch:
        """The step with each row as a span of its own, as a captured step has its drafts."""
        return make_batch(
            [(s + i, 1) for s, n in self.spans for i in range(n)],
            self.batch.tables[0].repeat_interleave(torch.tensor([n for _, n in self.spans]).cuda(), 0),
            SIZE[self.name],
        )

    def truth(self) -> torch.Tensor:
        """The right result of layer 0, computed in fp32 span by span."""
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
    """Ancestors and positions of binary trees: row i of a span hangs on row (i - 1) // 2."""
    bits, positions = [], []
    for start, length in spans:
        known, depth = [1], [0]
        for i in range(1, length):
            known.append(known[(i - 1) // 2] | 1 << i)
            depth.append(depth[(i - 1) // 2] + 1)
        bits += [x - (1 << 64) if x >> 63 else x for x in known]
        positions += [start + d for d in depth]
    return {"ancestors": torch.tensor(bits).cuda()[:, None], "positions": torch.tensor(positions).cuda()}


def worlds(spans: Spans, tree: bool = False) -> list[World]:
    """The step over every codec's pages, with as many layers as keep the L2 cache from holding them."""
    made = []
    for name in CODECS:
        one = sum(s + n for s, n in spans) * GROUPS * 2 * DIM * {"plain": 2, "int4_bdr": 0.53}.get(name, 1.03)
        made.append(World(name, spans, max(1, min(256, int(COLD_BYTES / one))), tree))
    return made


# -------------------------------------------------------------------------------------------------------------- timings


@dataclasses.dataclass
class Variant:
    """One way to compute a layer. ``checked``: whether its result is compared with the right one."""

    world: World
    config: dict[str, Any]
    run: Callable[[int], torch.Tensor]
    checked: bool = True


def captured(variant: Variant) -> tuple[Callable[[], None], torch.Tensor, Callable[[], bool]]:
    """A replay of all layers, layer 0's result, and whether the last replay's last layer is right."""
    layers = range(len(variant.world.caches))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out, want = variant.run(0).clone(), variant.run(layers[-1]).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            last = variant.run(layer)
    return graph.replay, out, lambda: torch.allclose(last.float(), want.float(), atol=1e-3, rtol=1e-2)


def in_turns(report: Report, case: str, variants: list[Variant]) -> None:
    """Time every variant once a round, and add an arm for each: the median of the rounds."""
    ready = [(v, found) for v in variants if (found := tried(v.config, lambda v=v: captured(v))) is not None]
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(ROUNDS):
        for spent, (_, (replay, *_)) in zip(times, ready):
            replay()
            spent.append(elapsed(lambda replay=replay: [replay() for _ in range(4)]) / 4 * 1e6)
    truths: dict[int, torch.Tensor] = {}
    for spent, (variant, (_, out, right)) in zip(times, ready):
        world, error = variant.world, 0.0
        if variant.checked:
            if id(world) not in truths:
                truths[id(world)] = world.truth()
            want = truths[id(world)]
            error = float((out.reshape(want.shape).float() - want).abs().max() / want.abs().max())
        us = statistics.median(spent) / len(world.caches)
        metrics = {
            "us": round(us, 2),
            "us_least": round(min(spent) / len(world.caches), 2),
            "TB_per_s": round(world.kv_bytes / us / 1e6, 3),
            "error": round(error, 5),
            "failed": int(not error < 2e-2 or not right()),
        }
        report.add(case, {"codec": world.name, **variant.config}, metrics)
