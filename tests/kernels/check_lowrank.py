"""The kernels over low-rank keys and values against their reference, by the 2 x rule of ``tests.kernels.check``."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from kvasir.kernels import lowrank_decode as lowrank
from kvasir.kernels.lowrank_decode import Case, Latents, Shape, block_of, padded
from tests.attention.helpers import World, make_world
from tests.kernels.check import FLOOR, _worst, attend_low, rows_of


def world_of(case: Case, dtype: torch.dtype, device: str) -> tuple[World, Latents]:
    """Spans, and a cache of random latents in which every slot that no span owns is NaN and stands anywhere."""
    fields = {name: getattr(case, name) for name in ("heads", "kv_heads", "dim", "page_slots", "window", "softcap")}
    world = make_world(
        list(case.spans), sinks=case.sinks, trees={s: list(p) for s, p in case.trees}, dtype=dtype, device=device,
        **fields,
    )  # fmt: skip
    draw, pages, size = torch.Generator().manual_seed(5), world.pool.num_pages[0], case.page_slots

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype).to(device)

    k, v = (torch.full((pages, 2, 1, size, rank), torch.nan, dtype=dtype, device=device)[:, 1] for rank in case.ranks)
    position = torch.randint(-(2**31), 2**31 - 1, (pages, 1, size, 1), generator=draw).int().to(device)
    table, row = world.batch.tables[0].long(), 0
    for s, (start, length) in enumerate(case.spans):
        at = torch.arange(start + length, device=device)
        page, slot = table[s, at // size], at % size
        k[page, 0, slot], v[page, 0, slot] = (random(start + length, rank) for rank in case.ranks)
        at[start:] = world.batch.positions[row : row + length]  # nodes of a tree share positions
        position[page, 0, slot, 0] = at.int()
        row += length
    positions = torch.arange(max(400.0, *(start + length for start, length in case.spans)))
    angles = torch.outer(positions, 0.9 ** torch.arange(case.turned // 2)) if case.turned else None
    table = None if angles is None else torch.cat((angles.cos(), angles.sin()), -1).to(device)
    k_up = random(case.kv_heads * case.dim, case.ranks[0], scale=case.ranks[0] ** -0.5)
    v_up = random(case.kv_heads, case.dim, case.ranks[1], scale=case.ranks[1] ** -0.5)
    return world, Latents(k, v, position, k_up, v_up, table)


def reference(world: World, latents: Latents, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference on the world's data in ``dtype``; NaN stays where no one may look."""
    spec, batch = world.spec, world.batch
    wide = latents._replace(**{name: getattr(latents, name).to(dtype) for name in ("k", "v", "k_up", "v_up")})
    return lowrank.lowrank_attention_ref(
        world.q.to(dtype), wide, batch.tables[0], batch.starts, batch.lengths, spec.scale, window=spec.window,
        softcap=spec.softcap, sinks_H=None if world.sinks is None else world.sinks.to(dtype),
        ancestors_TA=batch.ancestors, positions_T=batch.positions,
    )  # fmt: skip


def check_rows(case: Case, dtype: torch.dtype, device: str, min_keys: int = 32) -> dict[str, float]:
    """Rows of spans of which the host knows nothing. ``min_keys``: least keys of a chunk, so that there are several."""
    world, latents = world_of(case, dtype, device)
    table, at, place, length, bits, positions = rows_of(world)
    if not case.trees:
        bits = positions = None
    spec, most, rank = world.spec, max(world.batch.lengths), case.ranks[1]
    out = torch.full((*world.q.shape[:2], rank), torch.nan, dtype=dtype, device=device)
    lse = torch.full(out.shape[:2], torch.nan, dtype=torch.float32, device=device)
    shape = Shape.of(block_of(most, case.heads // case.kv_heads), padded(max(case.ranks)), dtype)
    if case.k_block:
        shape = dataclasses.replace(shape, k_block=case.k_block)
    if device == "cpu":  # in the interpreter idle programs take time
        shape = dataclasses.replace(shape, at_once=1, programs=case.splits, block_n=16)
    with mock.patch.object(lowrank, "SPLIT_KEYS", min_keys):
        lowrank.lowrank_rows_triton(
            world.q, latents, table, at, place, length, most, spec.scale, out, window=spec.window,
            softcap=spec.softcap, sinks_H=world.sinks, ancestors_TA=bits, positions_T=positions, lse_TH=lse,
            shape=shape,
        )  # fmt: skip
    want, want_lse = reference(world, latents, torch.float64)
    with mock.patch.object(lowrank, "attend", attend_low):
        plain, plain_lse = reference(world, latents, dtype)
    errors = {"kernel": _worst(out, want), "plain": _worst(plain, want), "lse": _worst(lse, want_lse)}
    assert errors["kernel"] <= 2 * errors["plain"] + FLOOR[dtype], (case, dtype, errors)
    # keys are rounded to the model's type
    assert errors["lse"] <= 2 * _worst(plain_lse, want_lse) + max(1e-4, FLOOR[dtype]), (case, dtype, errors)
    return errors


def check_gather(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Keys and values made in scratch, some KV heads at a time, are those of plain torch in fp64."""
    world, latents = world_of(case, dtype, device)
    batch, dim, block = world.batch, case.dim, 64
    longest = max(start + length for start, length in case.spans)
    room = -(-longest // block) * block
    spans = torch.tensor([(s, s * room) for s in range(len(case.spans))], dtype=torch.int32, device=device)
    worst = 0.0
    for group in range(case.kv_heads):
        k, v = torch.full((2, 1, room * len(case.spans), dim), torch.nan, dtype=dtype, device=device)
        lowrank.gather_lowrank_triton(
            latents, k, v, batch.tables[0], batch.context, batch.row_start, spans, room // block, block, group
        )
        for s, (start, length) in enumerate(case.spans):
            at = torch.arange(start + length, device=device)
            page, slot = batch.tables[0][s, at // case.page_slots].long(), at % case.page_slots
            up = latents.k_up.view(case.kv_heads, dim, -1)[group].double()
            key = latents.k[page, 0, slot].double() @ up.T
            if latents.angles is not None:
                cos, sin = latents.angles[latents.position[page, 0, slot, 0].long()].double().split(case.turned // 2, 1)
                a, b = key[:, : case.turned].chunk(2, 1)
                key = torch.cat((a * cos - b * sin, b * cos + a * sin, key[:, case.turned :]), 1)
            value = latents.v[page, 0, slot].double() @ latents.v_up[group].double().T
            mine = slice(s * room, s * room + start + length)
            worst = max(worst, _worst(k[0, mine], key), _worst(v[0, mine], value))
            assert not k[0, mine.stop : mine.start + -(-(start + length) // block) * block].any(), "zeros past the end"
    assert worst <= 4 * FLOOR[dtype], (case, dtype, worst)
    return {"kernel": worst}
