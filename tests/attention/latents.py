"""Batches over latents, built by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.attention.backend import AttentionSpec, LatentHeads, Site
from kvasir.attention.latent import UpProjection
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow, StepBatch
from tests.attention.helpers import make_world

NOPE, VALUE = 24, 20  # of a head, where a test does not say


@dataclass
class LatentWorld:
    """A poisoned pool of latents, a batch of spans, and queries: ``q`` [T, H, R + Q] in the latent's basis, and those
    of heads [T, H, D + Q], which ``up`` brings there."""

    spec: AttentionSpec
    pool: KVPool
    batch: StepBatch
    q: torch.Tensor
    q_heads: torch.Tensor
    up: UpProjection
    rows: list[torch.Tensor]  # per span [start + length, R + Q], as they were written

    @property
    def cache(self):
        return self.pool.layer(1)

    @property
    def rank(self) -> int:
        return self.spec.value_dim

    def site(self, exact: bool = False, device: str = "cpu") -> Site:
        return Site(device, self.q.dtype, self.pool.codec.kernel, self.pool.page_slots, (self.spec,), exact)


def latent_world(spans, *, heads=4, rank=32, rope=16, page_slots=16, trees=(), codec="plain", dtype=torch.float32,
                 device="cpu", seed=0, nope=NOPE, value=VALUE, exact=False) -> LatentWorld:  # fmt: skip
    """``spans``: (start, length) each; ``trees``: (span, parents) each. Pages are shuffled, and every slot that no span
    owns is NaN."""
    base = make_world(
        list(spans), heads=1, kv_heads=1, dim=2, page_slots=page_slots, trees={s: list(p) for s, p in trees},
        device=device, seed=seed,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype).to(device)

    group = CacheGroup("g", (0, 1), (CacheRow(1, 8, 0, latent=4), CacheRow(1, rank + rope, 0, latent=rank)))
    total = base.pool.num_pages[0]
    pool = KVPool([group], load(CODECS, codec, Codec), [total], page_slots, device, dtype)
    pool.poison(0, range(total))
    table, rows = base.batch.tables[0].cpu(), []
    for s, (start, length) in enumerate(spans):
        at = torch.arange(start + length)
        slots = table[s, at // page_slots].long() * page_slots + at % page_slots
        rows.append(random(start + length, rank + rope))
        pool.codec.write_row(pool.layer(1), rows[-1], slots.to(device))
    count = base.batch.input_ids.shape[0]
    spec = AttentionSpec(heads, 1, rank + rope, (nope + rope) ** -0.5, value_dim=rank, latent=LatentHeads(nope, value))
    up = UpProjection(random(heads, nope, rank, scale=rank**-0.5), random(heads, value, rank, scale=rank**-0.5), exact)
    q_heads = random(count, heads, nope + rope)
    return LatentWorld(spec, pool, base.batch, up.absorb(q_heads), q_heads, up, rows)


def stored_rows(world: LatentWorld, dtype: torch.dtype) -> torch.Tensor:
    """The cached rows as the codec reads them, as one plane [N, 1, P, R + Q] of this type."""
    pages = torch.arange(world.pool.num_pages[0], device=world.q.device)
    k, _ = world.cache.codec.read(world.cache, pages[:, None])
    return k.to(dtype)
