"""Kernel against reference by the 2 x rule: the error against fp64 is at most twice that of plain torch in the same precision."""

from __future__ import annotations

from unittest import mock

import torch

from kvasir.kernels import paged_attention as paged
from kvasir.kernels import store_kv as store
from tests.attention.helpers import World, make_world

FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # where plain torch happens to be exact


def world_of(case: paged.Case, dtype: torch.dtype, device: str) -> World:
    return make_world(list(case.spans), heads=case.heads, kv_heads=case.kv_heads, dim=case.dim, page_slots=case.page_slots, window=case.window,
                      softcap=case.softcap, sinks=case.sinks, trees={s: list(p) for s, p in case.trees}, dtype=dtype, device=device)


def reference(world: World, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on the world's data in ``dtype``; NaN stays where no one may look."""
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    sinks = None if world.sinks is None else world.sinks.to(dtype)
    return paged.paged_attention_ref(
        world.q.to(dtype), planes["k"].to(dtype), planes["v"].to(dtype), batch.tables[0], batch.starts, batch.lengths, spec.scale,
        window=spec.window, softcap=spec.softcap, sinks_H=sinks, ancestors_TA=batch.ancestors, positions_T=batch.positions)


def attend_low(q, k, v, scale, seen=None, softcap=None, sinks=None):
    """Plain torch attention that stays in the inputs' precision."""
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -paged.INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., :k.shape[-2]]
    return torch.matmul(weights, v), torch.logsumexp(scores.float(), -1)


def check_paged_attention(case: paged.Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Errors of the kernel and of plain torch; raises AssertionError where the kernel is worse than allowed."""
    world = world_of(case, dtype, device)
    spec, batch, planes = world.spec, world.batch, world.cache.planes
    want, want_lse = reference(world, torch.float64)
    with mock.patch.object(paged, "attend", attend_low):
        plain, _ = reference(world, dtype)
    out, lse = paged.paged_attention_triton(
        world.q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start,
        paged.plan_tiles(batch.starts, batch.lengths, case.heads, case.kv_heads, dtype, device), spec.scale, window=spec.window,
        softcap=spec.softcap, sinks_H=world.sinks, ancestors_TA=batch.ancestors, positions_T=batch.positions, return_lse=True,
        num_splits=case.splits)
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
    k, v = qkv[:, case.heads:2 * case.heads], qkv[:, 2 * case.heads:]  # strided, as a fused projection hands them out
    slots = torch.randperm(pages * case.page_slots, generator=draw)[:case.rows]
    if case.skip:
        slots[::case.skip] = -1
    shape = (pages, 2, 2, case.heads, case.page_slots, case.dim)
    stored = []
    for write in (store.store_kv_ref, store.store_kv_triton):
        pool = torch.full(shape, 7.0, dtype=dtype, device=device)
        write(k, v, pool[:, 1, 0], pool[:, 1, 1], slots.to(device))
        stored.append(pool)
    assert torch.equal(*stored), case
