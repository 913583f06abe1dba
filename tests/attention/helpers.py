"""Caches and step batches built by hand, and attention as plain loops in fp64 to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.kv.codec import Codec
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.types import CacheGroup, CacheRow, StepBatch


@dataclass
class Tree:
    """A tree span: ``parents`` as in ``Span``."""

    parents: list[int]

    def ancestors(self) -> list[set[int]]:
        known: list[set[int]] = []
        for i, parent in enumerate(self.parents):
            known.append({i} | (known[parent] if parent >= 0 else set()))
        return known

    def depths(self) -> list[int]:
        return [len(a) - 1 for a in self.ancestors()]


@dataclass
class World:
    """A poisoned pool with one group, a batch of spans, and q, k, v of every position that the batch can see."""

    spec: AttentionSpec
    pool: KVPool
    batch: StepBatch
    q: torch.Tensor
    keys: list[torch.Tensor]  # per span [start + length, G, D]
    values: list[torch.Tensor]
    trees: dict[int, Tree] = field(default_factory=dict)
    sinks: torch.Tensor | None = None

    @property
    def cache(self):
        return self.pool.layer(1)

    def site(self, exact: bool = False, device: str = "cpu") -> Site:
        return Site(device, self.q.dtype, "plain", self.pool.page_slots, (self.spec,), exact)


def make_world(
    spans: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page_slots: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    trees: dict[int, list[int]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    content: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    codec: Codec | None = None,
) -> World:
    """``spans``: (start, length) each. Pages are shuffled, pages that fell out of the window are dropped (table entry
    0), and every slot that no span owns is NaN, page 0 included. ``content``: q [length, H, D] and k, v [2, start +
    length, G, D] of spans that are not to be random."""
    draw = torch.Generator().manual_seed(seed)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window, softcap, sinks)
    group = CacheGroup("g", (0, 1), (CacheRow(kv_heads, dim, dim),) * 2, window)
    counts = [-(-(start + length) // page_slots) for start, length in spans]
    total = 4 + sum(counts)
    pool = KVPool([group], codec or PlainCodec(), [total], page_slots, device, dtype)
    pool.poison(0, range(total))
    order = (1 + torch.randperm(total - 1, generator=draw)).tolist()
    width = max(counts, default=0)
    rows = sum(length for _, length in spans)
    table = torch.zeros(len(spans), width, dtype=torch.int32)
    forest = {s: Tree(parents) for s, parents in (trees or {}).items()}
    words = max((-(-len(t.parents) // 64) for t in forest.values()), default=0)
    bits = torch.zeros(rows, words, dtype=torch.int64)
    positions, slots, keys, values, row = [], [], [], [], 0
    for s, (start, length) in enumerate(spans):
        lowest = 0 if window is None else max(0, start - window + 1)
        for i in range(counts[s]):
            page = order.pop()
            table[s, i] = page if (i + 1) * page_slots > lowest else 0
        kv = torch.randn(2, start + length, kv_heads, dim, generator=draw).to(dtype)
        if s in (content or {}):
            kv = content[s][1]
        at = torch.arange(start + length)
        page = table[s, at // page_slots].long()
        owned = torch.where(page > 0, page * page_slots + at % page_slots, -1)
        pool.codec.write(pool.layer(1), kv[0].to(device), kv[1].to(device), owned.to(device))
        keys.append(kv[0])
        values.append(kv[1])
        slots += owned[start:].tolist()
        tree = forest.get(s)
        positions += [start + d for d in (tree.depths() if tree else range(length))]
        for i, known in enumerate(tree.ancestors() if tree else []):
            for j in known:
                word = int(bits[row + i, j // 64]) | (1 << (j % 64))
                bits[row + i, j // 64] = word - (1 << 64) if word >> 63 else word
        row += length
    lengths = [length for _, length in spans]
    batch = StepBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        row_start=torch.tensor(
            [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device
        ),
        context=torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device),
        tables=(table.to(device),),
        slots=(torch.tensor(slots, dtype=torch.int64, device=device),),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        starts=[s for s, _ in spans],
        lengths=lengths,
        ancestors=bits.to(device) if words else None,
    )
    q = torch.randn(rows, heads, dim, generator=draw).to(dtype).to(device)
    for s, (known, _) in (content or {}).items():
        q[sum(lengths[:s]) : sum(lengths[: s + 1])] = known
    learned = torch.randn(heads, generator=draw).to(device) if sinks else None
    return World(spec, pool, batch, q, keys, values, forest, learned)


def truth(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D] and log-sum-exp [T, H] in fp64, one row and head at a time."""
    spec, q = world.spec, world.q.double().cpu()
    share = spec.num_heads // spec.num_kv_heads
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    row = 0
    for s, (start, length) in enumerate(zip(world.batch.starts, world.batch.lengths)):
        tree = world.trees.get(s)
        depths = tree.depths() if tree else list(range(length))
        for i in range(length):
            inside = tree.ancestors()[i] if tree else range(i + 1)
            seen = [(p, p) for p in range(start)] + [(start + j, start + depths[j]) for j in sorted(inside)]
            seen = [
                slot for slot, position in seen if spec.window is None or position > start + depths[i] - spec.window
            ]
            for h in range(spec.num_heads):
                scores = spec.scale * (world.keys[s][seen, h // share].double() @ q[row, h])
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                sink = float(world.sinks[h]) if world.sinks is not None else -math.inf
                top = max(float(scores.max()), sink)
                lse[row, h] = top + torch.log(torch.exp(scores - top).sum() + math.exp(sink - top))
                out[row, h] = torch.exp(scores - lse[row, h]) @ world.values[s][seen, h // share].double()
            row += 1
    return out, lse
