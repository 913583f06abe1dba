"""Caches and step batches built by hand, and attention as scalar loops in fp64 to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.types import CacheGroup, StepBatch


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
        return Site(device=device, dtype=self.q.dtype, codec_kernel="plain", page_slots=self.pool.page_slots, specs=(self.spec,), exact=exact)


def make_world(spans: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, page_slots: int = 16,
               window: int | None = None, softcap: float | None = None, sinks: bool = False, trees: dict[int, list[int]] | None = None,
               dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, spare: int = 3) -> World:
    """``spans``: (start, length) each. Pages are shuffled, pages that fell out of the window are dropped (table entry 0),
    and every slot that no span owns is NaN, page 0 included."""
    draw = torch.Generator().manual_seed(seed)
    spec = AttentionSpec(heads, kv_heads, dim, dim ** -0.5, window, softcap, sinks)
    group = CacheGroup("g", (0, 1), kv_heads, dim, window)
    counts = [-(-(start + length) // page_slots) for start, length in spans]
    total = 1 + sum(counts) + spare
    pool = KVPool([group], PlainCodec(), [total], page_slots, device, dtype)
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
        at = torch.arange(start + length)
        owned = [int(table[s, p // page_slots]) * page_slots + p % page_slots if table[s, p // page_slots] else -1 for p in at.tolist()]
        pool.codec.write(pool.layer(1), kv[0].to(device), kv[1].to(device), torch.tensor(owned, dtype=torch.int64, device=device))
        keys.append(kv[0])
        values.append(kv[1])
        slots += owned[start:]
        tree = forest.get(s)
        positions += [start + d for d in (tree.depths() if tree else range(length))]
        for i, known in enumerate(tree.ancestors() if tree else []):
            for j in known:
                word = int(bits[row + i, j // 64]) | (1 << (j % 64))
                bits[row + i, j // 64] = word - (1 << 64) if word >> 63 else word
        row += length
    lengths = [length for _, length in spans]
    batch = StepBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64, device=device), positions=torch.tensor(positions, dtype=torch.int64, device=device),
        row_start=torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device),
        context=torch.tensor([s for s, _ in spans], dtype=torch.int32, device=device), tables=(table.to(device),),
        slots=(torch.tensor(slots, dtype=torch.int64, device=device),), logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        starts=[s for s, _ in spans], lengths=lengths, ancestors=bits.to(device) if words else None)
    q = torch.randn(rows, heads, dim, generator=draw).to(dtype).to(device)
    learned = torch.randn(heads, generator=draw).to(device) if sinks else None
    return World(spec, pool, batch, q, keys, values, forest, learned)


def truth(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D] and log-sum-exp [T, H] in fp64, one key at a time."""
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
            seen = [slot for slot, position in seen if spec.window is None or position > start + depths[i] - spec.window]
            for h in range(spec.num_heads):
                scores = [spec.scale * float(q[row, h] @ world.keys[s][p, h // share].double()) for p in seen]
                if spec.softcap:
                    scores = [spec.softcap * math.tanh(x / spec.softcap) for x in scores]
                everything = scores + ([float(world.sinks[h])] if world.sinks is not None else [])
                top = max(everything)
                lse[row, h] = top + math.log(sum(math.exp(x - top) for x in everything))
                for p, x in zip(seen, scores):
                    out[row, h] += math.exp(x - lse[row, h]) * world.values[s][p, h // share].double()
            row += 1
    return out, lse
