"""Kernel against reference by the 2 x rule: the error against fp64 is at most twice that of plain torch in the same
precision."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from kvasir.kernels import decode_attention as decode
from kvasir.kernels import dense_attention as dense
from kvasir.kernels import paged_attention as paged
from kvasir.kernels import store_kv as store
from tests.attention.helpers import World, make_world

FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # where plain torch happens to be exact


def world_of(case: paged.Case, dtype: torch.dtype, device: str) -> World:
    return make_world(
        list(case.spans),
        heads=case.heads,
        kv_heads=case.kv_heads,
        dim=case.dim,
        page_slots=case.page_slots,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        trees={s: list(p) for s, p in case.trees},
        dtype=dtype,
        device=device,
    )


def reference(world: World, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on the world's data in ``dtype``; NaN stays where no one may look."""
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    sinks = None if world.sinks is None else world.sinks.to(dtype)
    return paged.paged_attention_ref(
        world.q.to(dtype),
        planes["k"].to(dtype),
        planes["v"].to(dtype),
        batch.tables[0],
        batch.starts,
        batch.lengths,
        spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks_H=sinks,
        ancestors_TA=batch.ancestors,
        positions_T=batch.positions,
    )


def attend_low(q, k, v, scale, seen=None, softcap=None, sinks=None):
    """Plain torch attention that stays in the inputs' precision."""
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -paged.INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[-2]]
    return torch.matmul(weights, v), torch.logsumexp(scores.float(), -1)


def blank(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a kernel's result: NaN, so that unwritten elements show."""
    out = torch.full_like(world.q, torch.nan)
    return out, torch.full(out.shape[:2], torch.nan, dtype=torch.float32, device=out.device)


def check_paged_attention(case: paged.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of the kernel and of plain torch; raises AssertionError where the kernel is worse than allowed."""
    world = world_of(case, dtype, device)
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    out, lse = blank(world)
    paged.paged_attention_triton(
        world.q,
        planes["k"],
        planes["v"],
        batch.tables[0],
        batch.context,
        batch.row_start,
        paged.plan_tiles(batch.starts, batch.lengths, case.heads, case.kv_heads, dtype, device, dim=case.dim),
        spec.scale,
        out,
        window=spec.window,
        softcap=spec.softcap,
        sinks_H=world.sinks,
        ancestors_TA=batch.ancestors,
        positions_T=batch.positions,
        lse_TH=lse,
        num_splits=case.splits,
    )
    return compare(world, out, lse, case)


def rows_of(world: World) -> tuple[torch.Tensor, ...]:
    """A world's spans as a captured step has them: table [T, W], at, place, length [T], ancestors [T, 1] (of chains,
    too), positions."""
    batch, device = world.batch, world.q.device
    lengths = torch.tensor(batch.lengths, device=device)
    place = torch.cat([torch.arange(n) for n in batch.lengths]).to(device)
    length = lengths.repeat_interleave(lengths)
    at = (batch.context.repeat_interleave(lengths) + place).int()
    chain = torch.tensor([(2 << i) - 1 - (1 << 64) * (i == 63) for i in place.tolist()], device=device)[:, None]
    bits = chain if batch.ancestors is None else torch.where(batch.ancestors == 0, chain, batch.ancestors)
    return batch.tables[0].repeat_interleave(lengths, 0), at, place, length, bits, batch.positions


def check_together(case: paged.Case, dtype: torch.dtype, device: str, min_keys: int = 32) -> dict[str, float]:
    """Check the rows of the case's spans, of which the host knows nothing. ``min_keys``: least keys of a chunk, so that
    there are several."""
    world = world_of(case, dtype, device)
    spec, planes, rows = world.spec, world.cache.planes, rows_of(world)
    out, lse = blank(world)
    most = max(world.batch.lengths)
    shape = paged.TogetherShape.of(most, case.heads // case.kv_heads, max(16, case.dim), dtype)
    if device == "cpu":  # in the interpreter idle programs take time
        shape = dataclasses.replace(shape, at_once=1, programs=case.splits)
    with mock.patch.object(paged, "SPLIT_KEYS", min_keys):
        paged.paged_together_triton(
            world.q,
            planes["k"],
            planes["v"],
            *rows,
            most,
            spec.scale,
            out,
            window=spec.window,
            softcap=spec.softcap,
            sinks_H=world.sinks,
            lse_TH=lse,
            shape=shape,
        )
    same, _ = paged.together_ref(
        world.q,
        planes["k"],
        planes["v"],
        *rows,
        spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks_H=world.sinks,
    )
    assert dtype != torch.float32 or torch.equal(same, reference(world, dtype)[0]), (
        "the reference of rows is that of their spans"
    )
    return compare(world, out, lse, case)


def decode_world(case: decode.Case, dtype: torch.dtype, device: str) -> tuple[World, decode.Rows]:
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in ("contexts", "programs")}
    world = make_world([(context, 1) for context in case.contexts], dtype=dtype, device=device, **fields)
    count = len(case.contexts)
    return world, decode.Rows(
        torch.arange(count, dtype=torch.int32, device=device),
        torch.zeros(count, case.kv_heads, dtype=torch.int32, device=device),
    )


def run_decode(world: World, rows: decode.Rows, case: decode.Case) -> tuple[torch.Tensor, torch.Tensor]:
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    out, lse = blank(world)
    shape = decode.Shape.of(max(16, case.dim), world.q.dtype, len(case.contexts), case.heads // case.kv_heads, 0.0)
    if case.programs is not None:
        shape = dataclasses.replace(shape, programs=case.programs, at_once=1)
    decode.decode_attention_triton(
        world.q,
        planes["k"],
        planes["v"],
        batch.tables[0],
        batch.context,
        batch.row_start,
        rows,
        spec.scale,
        out,
        window=spec.window,
        softcap=spec.softcap,
        sinks_H=world.sinks,
        lse_TH=lse,
        shape=shape,
    )
    return out, lse


def check_decode_attention(case: decode.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    world, rows = decode_world(case, dtype, device)
    return compare(world, *run_decode(world, rows, case), case)


def check_dense_attention(
    case: dense.Case, dtype: torch.dtype, device: str, shape: dense.Shape | None = None
) -> dict[str, float]:
    """The long spans of the case; the others' rows must stay untouched, and are then filled in from the reference."""
    fields = {
        f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in ("spans", "scratch_bytes")
    }
    world = make_world(list(case.spans), dtype=dtype, device=device, **fields)
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    chosen = [s for s, length in enumerate(batch.lengths) if length >= dense.SHORTEST]
    out, lse = blank(world)
    share = case.heads // case.kv_heads
    shape = shape or dense.shape_for(dtype, case.dim, share, device, softcap=case.softcap, sinks=case.sinks)
    dense.dense_attention_triton(
        world.q,
        planes["k"],
        planes["v"],
        batch.tables[0],
        batch.context,
        batch.row_start,
        dense.plan_long(batch.starts, batch.lengths, chosen, share, device, shape),
        spec.scale,
        out,
        softcap=spec.softcap,
        sinks_H=world.sinks,
        lse_TH=lse,
        scratch_bytes=case.scratch_bytes,
    )
    want, want_lse = reference(world, torch.float64)
    for s, (a, b) in enumerate(zip(batch.row_start.tolist(), batch.row_start.tolist()[1:])):
        if s not in chosen:
            assert out[a:b].isnan().all() and lse[a:b].isnan().all(), case
            out[a:b], lse[a:b] = want[a:b].to(out.dtype), want_lse[a:b].float()
    return compare(world, out, lse, case)


def compare(world: World, out: torch.Tensor, lse: torch.Tensor, case: object) -> dict[str, float]:
    """A kernel's result by the 2 x rule."""
    dtype = world.q.dtype
    want, want_lse = reference(world, torch.float64)
    with mock.patch.object(paged, "attend", attend_low):
        plain, _ = reference(world, dtype)
    if not want.numel():
        assert out.shape == want.shape and lse.shape == want_lse.shape
        return {"kernel": 0.0, "plain": 0.0, "lse": 0.0}
    errors = {"kernel": _worst(out, want), "plain": _worst(plain, want), "lse": _worst(lse, want_lse)}
    assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype], (case, dtype, errors)
    assert errors["lse"] <= 1e-4, (case, dtype, errors)
    return errors


def _worst(x: torch.Tensor, want: torch.Tensor) -> float:
    gap = (x.double() - want).abs().max()
    return float("inf") if gap.isnan() else float(gap)


def check_store_kv(case: store.Case, dtype: torch.dtype, device: str) -> None:
    """The kernel and the reference write the same bytes, and nothing but the rows' slots."""
    draw = torch.Generator().manual_seed(case.rows)
    pages = 3 + case.rows
    qkv = torch.randn(case.rows, 3 * case.heads, case.dim, generator=draw).to(dtype).to(device)
    # Strided, as a fused projection hands them out.
    k, v = (
        qkv[:, case.heads : 2 * case.heads],
        qkv[:, 2 * case.heads :],
    )
    slots = torch.randperm(pages * case.page_slots, generator=draw)[: case.rows]
    if case.skip:
        slots[:: case.skip] = -1
    shape = (pages, 2, 2, case.heads, case.page_slots, case.dim)
    stored = []
    for write in (store.store_kv_ref, store.store_kv_triton):
        pool = torch.full(shape, 7.0, dtype=dtype, device=device)
        write(k, v, pool[:, 1, 0], pool[:, 1, 1], slots.to(device))
        stored.append(pool)
    assert torch.equal(*stored), case
