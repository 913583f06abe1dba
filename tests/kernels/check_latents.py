"""The kernels over latents against their references, by the 2 x rule of ``tests.kernels.check``."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from kvasir.attention.latent import UpProjection
from kvasir.kernels import latent_decode as latents
from kvasir.kernels import latent_prompt, latent_rows
from kvasir.kernels.latent_decode import Case, Planes, Shape
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.pool import KVPool
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow
from tests.attention.latents import LatentWorld, latent_world, stored_rows
from tests.kernels.check import FLOOR, _worst, attend_low, rows_of


def world_of(case: Case, dtype: torch.dtype, device: str) -> LatentWorld:
    fields = {name: getattr(case, name) for name in ("heads", "rank", "rope", "page_slots", "trees")}
    return latent_world(case.spans, codec=case.format, dtype=dtype, device=device, **fields)


def reference(world: LatentWorld, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on the world's data in ``dtype``; NaN stays where no one may look."""
    batch = world.batch
    how = {"ancestors_TA": batch.ancestors, "positions_T": batch.positions}
    rows, q = stored_rows(world, dtype), world.q.to(dtype)
    return latents.latent_attention_ref(
        q, rows, batch.tables[0], batch.starts, batch.lengths, world.spec.scale, world.rank, **how
    )


def blank(world: LatentWorld) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*world.q.shape[:2], world.rank), torch.nan, dtype=world.q.dtype, device=world.q.device)
    return out, torch.full(out.shape[:2], torch.nan, dtype=torch.float32, device=out.device)


def check_tiles(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Spans as tiles that the host plans."""
    world = world_of(case, dtype, device)
    batch, (out, lse) = world.batch, blank(world)
    spans = list(range(len(batch.lengths)))
    latents.latent_tiles_triton(
        world.q,
        Planes.of(world.cache.planes, world.rank, case.format),
        batch.tables[0],
        batch.context,
        batch.row_start,
        latents.plan_latent_tiles(batch.starts, batch.lengths, case.heads, dtype, device, spans),
        world.spec.scale,
        out,
        ancestors_TA=batch.ancestors,
        lse_TH=lse,
        num_splits=case.splits,
    )
    return compare(world, out, lse, case)


def check_rows(case: Case, dtype: torch.dtype, device: str, min_keys: int = 32) -> dict[str, float]:
    """Rows of spans of which the host knows nothing. ``min_keys``: least keys of a chunk, so that there are several."""
    world = world_of(case, dtype, device)
    table, at, place, length, bits, _ = rows_of(world)
    if not case.trees and max(world.batch.lengths) == 1:
        bits = None  # single rows need none
    out, lse = blank(world)
    most = max(world.batch.lengths)
    block_m = latents.block_of(most, case.heads, dtype)
    shape = Shape.of(block_m, max(16, 1 << (case.rank - 1).bit_length()), dtype)
    if device == "cpu":  # in the interpreter idle programs take time
        shape = dataclasses.replace(shape, at_once=1, programs=case.splits, block_n=16)
    with mock.patch.object(latents, "SPLIT_KEYS", min_keys):
        latents.latent_rows_triton(
            world.q,
            Planes.of(world.cache.planes, world.rank, case.format),
            table,
            at,
            place,
            length,
            most,
            world.spec.scale,
            out,
            ancestors_TA=bits,
            lse_TH=lse,
            shape=shape,
        )
    return compare(world, out, lse, case)


def compare(world: LatentWorld, out: torch.Tensor, lse: torch.Tensor, case: Case) -> dict[str, float]:
    dtype = world.q.dtype
    want, want_lse = reference(world, torch.float64)
    with mock.patch.object(latents, "attend", attend_low):
        plain, _ = reference(world, dtype)
    errors = {"kernel": _worst(out, want), "plain": _worst(plain, want), "lse": _worst(lse, want_lse)}
    assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype], (case, dtype, errors)
    assert errors["lse"] <= 1e-4, (case, dtype, errors)
    return errors


def check_write(case: latent_rows.Case, dtype: torch.dtype, device: str) -> None:
    """The kernel's rows and queries are the reference's, rounded once; nothing but the rows' slots is written."""
    draw = torch.Generator().manual_seed(case.rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype).to(device)

    width, pages = case.rank + case.rope, 3 + case.rows
    # Strided, as a fused projection hands them out.
    q = random(case.rows, case.heads * (case.nope + case.rope) + 5)[:, 5:].unflatten(1, (case.heads, -1))
    row = random(case.rows, width + 3)[:, :width]
    slots = torch.randperm(pages * case.page_slots, generator=draw)[: case.rows]
    if case.skip:
        slots[:: case.skip] = -1
    norm = (random(case.rank), 1e-5) if case.norm else None
    table = torch.randn(50, max(2, case.rope), generator=draw).to(device)
    turning = (table, torch.randint(50, (case.rows,), generator=draw).to(device)) if case.turn else None
    stored = []
    for write, kind in ((latent_rows.latent_rows_reference, torch.float64), (latent_rows.latent_rows, dtype)):
        pool = torch.full((pages, 2, 1, case.page_slots, width), 7.0, dtype=kind, device=device)
        mine = q.to(kind) if kind != dtype else q.clone()
        made = None if norm is None else (norm[0].to(kind), norm[1])
        if write is latent_rows.latent_rows:
            write(mine, row, Planes.of({"k": pool[:, 1]}, case.rank, "plain"), slots.to(device), made, turning)
        else:
            write(mine, row.to(kind), pool[:, 1], slots.to(device), case.rank, made, turning)
        stored.append((pool, mine))
    for want, got in zip(*stored):
        torch.testing.assert_close(got.double(), want.double(), atol=FLOOR[dtype] * 4, rtol=FLOOR[dtype])
        assert (got[want == 7.0] == 7.0).all()


def check_prompts(case: latent_prompt.Case, dtype: torch.dtype, device: str) -> None:
    """Long spans, expanded, against the absorbed reference in fp64; the other rows stay untouched."""
    fields = {name: getattr(case, name) for name in ("heads", "rank", "rope", "nope", "value", "page_slots")}
    world = latent_world(case.spans, codec=case.format, dtype=dtype, device=device, **fields)
    batch = world.batch
    chosen = [s for s, length in enumerate(batch.lengths) if length >= latent_prompt.SHORTEST]
    out = torch.full((*world.q.shape[:2], case.value), torch.nan, dtype=dtype, device=device)
    latent_prompt.latent_prompt_triton(
        world.q_heads,
        Planes.of(world.cache.planes, world.rank, case.format),
        world.up.key_HDR,
        world.up.value_HVR,
        batch.tables[0],
        batch.context,
        batch.row_start,
        latent_prompt.plan_prompts(batch.starts, batch.lengths, chosen, case.nope, case.rope, device),
        world.spec.scale,
        out,
        scratch_bytes=case.scratch_bytes,
    )
    wide = UpProjection(world.up.key_HDR.double(), world.up.value_HVR.double())
    world.q = wide.absorb(world.q_heads.double())
    want = wide.project(reference(world, torch.float64)[0])
    for s, (a, b) in enumerate(zip(batch.row_start.tolist(), batch.row_start.tolist()[1:])):
        if s in chosen:
            error = (out[a:b].double() - want[a:b]).abs().max()
            assert error <= 4 * FLOOR[dtype] * want[a:b].abs().max().clamp(min=1), (case, float(error))
        else:
            assert out[a:b].isnan().all(), case


def check_codes(format: str, rank: int, rope: int, device: str) -> None:
    """Latents that the kernel encodes are those of the codec's own torch code, to a code of the last place."""
    group = CacheGroup("g", (0,), (CacheRow(1, rank + rope, 0, latent=rank),))
    pools = [KVPool([group], load(CODECS, format, Codec), [3], 32, device, torch.float32) for _ in range(2)]
    draw = torch.Generator().manual_seed(rank)
    rows = (torch.randn(9, rank + rope, generator=draw) * torch.linspace(0.1, 20, 9)[:, None]).to(device)
    rows[4] = 0.0
    slots = torch.randperm(96, generator=draw)[:9].to(device)
    slots[2] = -1
    cache, mine = pools[0].layer(0), pools[1].layer(0)
    cache.codec.write_row(cache, rows, slots)
    q = torch.zeros(9, 2, 8 + rope, device=device)
    latent_rows.latent_rows(q, rows, Planes.of(mine.planes, rank, format), slots, None, None)
    pages = torch.arange(3, device=device)
    want, got = (x.codec.read(x, pages)[0] for x in (cache, mine))
    step = rows.abs().amax() * (1 / 255 if format == "int8" else 1 / 7)
    assert (got - want).abs().max() <= step
    if format == "int8" or device == "cuda":  # Triton's interpreter cuts fp8 off instead of rounding it
        assert (got != want).float().mean() < 0.01
    assert torch.equal(got[..., rank:], want[..., rank:])
