"""The quantising kernels against ``kernels.quantize``: rows within the grid's step of the rotated reference, and
nothing else written. Codes themselves may differ where a rounding error falls on the border of two."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from kvasir.kernels import paged_attention, quantized_attention, quantized_decode, quantized_qkv
from kvasir.kernels.decode_attention import Rows
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.quantized_qkv import Basis
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir.technique import load
from kvasir.types import CacheGroup, CacheRow
from tests.attention.helpers import World, make_world
from tests.kernels.check import attend_low, blank, reference, rows_of
from tests.kernels.check_fused import Draw, hold


def codec_of(format: str, order: int, values: bool) -> Codec:
    spec = f"int4_bdr:order={order},rotate_v={str(values).lower()}" if order and format == "int4" else format
    return load("kvasir.kv.codecs", spec, Codec)


def check_quantized_qkv(case: quantized_qkv.Case, dtype: torch.dtype, device: str) -> float:
    """The worst error of a stored row over half its step, and of a query over the largest."""
    draw = Draw(case.rows + case.dim, dtype, device)
    total, pages = case.heads + 2 * case.groups, 3 + case.rows
    heads = draw(case.rows, total + 2, case.dim)[:, 1:-1]
    table = RopeTable(RopeSpec(1000.0, case.dim), 300, torch.device(device)).table
    positions = torch.randint(0, 300, (case.rows,), generator=draw.generator).to(device)
    norm = (draw(case.heads + case.groups, case.dim), 1e-5) if case.norm else None
    slots = torch.randperm(pages * case.page_slots, generator=draw.generator)[: case.rows].to(device)
    if case.skip:
        slots[:: case.skip] = -1
    codec = codec_of(case.format, 0 if case.format != "int4" else case.order, case.values)
    basis = basis_of(case.order, case.dim, case.values, dtype, device) if case.order else None
    pool = KVPool(
        [CacheGroup("full", (0,), (CacheRow(case.groups, case.dim, case.dim),))],
        codec,
        [pages],
        case.page_slots,
        device,
        dtype,
    )
    pool.pages[0].fill_(0xAB)
    before, cache = pool.pages[0].clone(), pool.layer(0)
    q = quantized_qkv.quantized_qkv(
        heads, HeadOps(case.heads, table, positions, norm), cache.planes, slots, case.format, basis
    )
    wide = (
        None
        if basis is None
        else dataclasses.replace(basis, matrix=basis.matrix.double(), signs_D=basis.signs_D.double())
    )
    ops = HeadOps(case.heads, table.double(), positions, None if norm is None else (norm[0].double(), norm[1]))
    want_q, want_k, want_v = quantized_qkv.quantized_qkv_reference(heads.double(), ops, wide)
    rough = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype] * (4 if device == "cpu" else 1)
    if not case.rows:
        return 0.0
    assert float((q.double() - want_q).abs().max()) <= rough * float(want_q.abs().max()), case
    kept = slots >= 0
    page, offset = slots[kept] // case.page_slots, slots[kept] % case.page_slots
    worst = 0.0
    for side, want in (("k", want_k[kept]), ("v", want_v[kept])):
        parts = {name[1:]: plane[page, :, offset] for name, plane in cache.planes.items() if name[0] == side}
        found = codec.decode(parts, case.dim).double()
        scale = parts["_meta"][..., :1].double()
        step = scale if case.format != "fp8" else want.abs() / 8 + scale
        error = ((found - want).abs() - rough * want.abs().amax(-1, keepdim=True)) / step
        worst = max(worst, float(error.max()))
        # The nearest point of the grid, whose fp16 ends may cut a little off.
        assert worst <= 0.52, (
            case,
            dtype,
            side,
            worst,
        )
    pool.pages[0][page.unique()] = before[page.unique()]
    assert torch.equal(pool.pages[0], before), "other pages were touched"
    return worst


def written(rows: int, at: range, exact: bool, format: str, device: str) -> list[torch.Tensor]:
    """Queries and planes of the rows ``at`` among ``rows``, written together: 8 + 2 x 4 heads of 128, normed."""
    dtype, dim = torch.bfloat16 if device == "cuda" else torch.float16, 128
    draw = Draw(0, dtype, device)
    heads = draw(rows, 16, dim)[at.start : at.stop]
    norm = (draw(12, dim), 1e-6)
    table = RopeTable(RopeSpec(1000.0, dim), 300, torch.device(device)).table
    positions, slots = (
        torch.arange(rows, device=device)[at.start : at.stop] % 300,
        torch.arange(rows, device=device)[at.start : at.stop],
    )
    codec = codec_of(format, dim if format == "int4" else 0, True)
    cache = KVPool(
        [CacheGroup("full", (0,), (CacheRow(4, dim, dim),))], codec, [2 + rows // 64], 64, device, dtype
    ).layer(0)
    basis = basis_of(dim, dim, True, dtype, device) if format == "int4" else None
    ops = HeadOps(8, table, positions, norm, exact)
    q = quantized_qkv.quantized_qkv(heads, ops, cache.planes, slots, format, basis)
    return [q, *(plane[slots // 64, :, slots % 64] for plane in cache.planes.values())]


def basis_of(order: int, dim: int, values: bool, dtype: torch.dtype, device: str) -> Basis:
    from kvasir.kv.rotation import Rotation

    return Rotation(order, dim, signs=True).basis(dtype, torch.device(device), values)


def check_quantized_decode(case: quantized_decode.Case, dtype: torch.dtype, device: str) -> float:
    """Attention over what the codes stand for, in fp64, against the kernel: at most twice the error of plain torch."""
    heads, kv_heads, dim, size = case.heads, case.kv_heads, case.dim, case.page_slots
    draw, codec, count = Draw(dim, dtype, device), codec_of(case.format, 0, False), len(case.contexts)
    pages = [-(-(c + 1) // size) for c in case.contexts]
    pool = KVPool(
        [CacheGroup("full", (0,), (CacheRow(kv_heads, dim, dim),))], codec, [2 + sum(pages)], size, device, dtype
    )
    pool.pages[0].fill_(0xFF)  # NaN in every float
    cache, table = pool.layer(0), torch.zeros(count, max(pages), dtype=torch.int32)
    order = (1 + torch.randperm(sum(pages), generator=draw.generator)).tolist()
    for s, number in enumerate(pages):
        for i in range(number):
            table[s, i] = order.pop()
    q, sinks = draw(count, heads, dim), draw(heads, dtype=torch.float32) if case.sinks else None
    keys, values = [], []
    for s, context in enumerate(case.contexts):
        k, v = draw(context + 1, kv_heads, dim), draw(context + 1, kv_heads, dim)
        at = torch.arange(context + 1)
        cache.codec.write(cache, k, v, (table[s, at // size].long() * size + at % size).to(device))
        found = [
            {n[1:]: p[table[s, at // size].long(), :, at % size] for n, p in cache.planes.items() if n[0] == side}
            for side in "kv"
        ]
        keys.append(codec.decode(found[0], dim))
        values.append(codec.decode(found[1], dim))

    def attention(precision: torch.dtype) -> torch.Tensor:
        out = []
        for s, context in enumerate(case.contexts):
            low = 0 if case.window is None else max(0, context + 1 - case.window)
            k, v = (
                x[s][low:].to(precision).transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (keys, values)
            )
            scores = (q[s].to(precision).unsqueeze(1) @ k.transpose(1, 2) * dim**-0.5).squeeze(1)
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            full = scores if sinks is None else torch.cat([scores, sinks.to(precision)[:, None]], -1)
            out.append((torch.softmax(full, -1)[:, None, : scores.shape[-1]] @ v).squeeze(1))
        return torch.stack(out)

    rows = Rows(
        torch.arange(count, dtype=torch.int32, device=device),
        torch.zeros(count, kv_heads, dtype=torch.int32, device=device),
    )
    out = torch.full_like(q, float("nan"))
    shape = quantized_decode.shape_of(case.format, max(16, dim), dtype, count, heads // kv_heads)
    if case.programs is not None:
        shape = dataclasses.replace(shape, programs=case.programs, at_once=1)
    quantized_decode.quantized_decode_triton(
        q,
        cache.planes,
        case.format,
        table.to(device),
        torch.tensor(case.contexts, dtype=torch.int32, device=device),
        torch.arange(count + 1, dtype=torch.int32, device=device),
        rows,
        dim**-0.5,
        out,
        window=case.window,
        softcap=case.softcap,
        sinks_H=sinks,
        shape=shape,
    )
    assert not rows.arrived.any()
    return hold(case, out, attention(dtype), attention(torch.float64))


def quantized_world(case: quantized_attention.Case, dtype: torch.dtype, device: str) -> tuple[World, KVPool]:
    """A world over codes in a poisoned pool; its own pages hold what the codes stand for, in the codes' basis."""
    fields = {
        f.name: getattr(case, f.name)
        for f in dataclasses.fields(case)
        if f.name not in ("spans", "format", "trees", "splits")
    }
    world = make_world(
        list(case.spans), dtype=dtype, device=device, trees={s: list(p) for s, p in case.trees}, **fields
    )
    codec, size, table = codec_of(case.format, 0, False), case.page_slots, world.batch.tables[0].long().cpu()
    pools = [
        KVPool(world.pool.groups, c, world.pool.num_pages, size, device, t)
        for c, t in ((codec, dtype), (world.pool.codec, torch.float32))
    ]
    for pool in pools:
        pool.poison(0, range(pool.num_pages[0]))
    codes, plain = (pool.layer(1) for pool in pools)
    for s, (k, v) in enumerate(zip(world.keys, world.values)):
        at = torch.arange(len(k))
        page = table[s, at // size]
        codec.write(codes, k.to(device), v.to(device), torch.where(page > 0, page * size + at % size, -1).to(device))
    for side in "kv":
        plain.planes[side].copy_(codec.decode({n[1:]: p for n, p in codes.planes.items() if n[0] == side}, case.dim))
    world.pool = pools[1]
    return world, pools[0]


def check_quantized_attention(
    case: quantized_attention.Case, dtype: torch.dtype, device: str, together: bool = False
) -> float:
    """Check rows of spans and trees over codes against the paged reference in fp64 over the decoded codes.
    ``together``: the host knows nothing about the spans."""
    world, pool = quantized_world(case, dtype, device)
    spec, batch = world.spec, world.batch
    spans = [s for s, length in enumerate(batch.lengths) if length]
    out, lse = blank(world)
    how = {"window": spec.window, "softcap": spec.softcap, "sinks_H": world.sinks, "lse_TH": lse}
    if together:
        shape = quantized_attention.Shape.of(case.format, max(16, 1 << (case.dim - 1).bit_length()), dtype, 16)
        if device == "cpu":  # in the interpreter idle programs take time
            shape = dataclasses.replace(shape, at_once=1, programs=case.splits or 1)
        with mock.patch.object(quantized_attention, "SPLIT_KEYS", 32):  # so that there are several chunks
            quantized_attention.quantized_together_triton(
                world.q,
                pool.layer(1).planes,
                case.format,
                *rows_of(world),
                max(batch.lengths),
                spec.scale,
                out,
                shape=shape,
                **how,
            )
    else:
        quantized_attention.quantized_attention_triton(
            world.q,
            pool.layer(1).planes,
            case.format,
            batch.tables[0],
            batch.context,
            batch.row_start,
            quantized_attention.plan_rows(batch.starts, batch.lengths, spans, case.heads // case.kv_heads, device),
            spec.scale,
            out,
            ancestors_TA=batch.ancestors,
            positions_T=batch.positions,
            num_splits=case.splits,
            **how,
        )
    want, want_lse = reference(world, torch.float64)
    with mock.patch.object(paged_attention, "attend", attend_low):
        plain, _ = reference(world, dtype)
    assert float((lse - want_lse).abs().max()) <= (1e-4 if dtype == torch.float32 else 5e-3), case
    return hold(case, out, plain, want)


def check_gather(format: str, dim: int, dtype: torch.dtype, device: str) -> None:
    """Dense numbers equal to what the codec reads, zeros to the end of the block; the rest of the scratch untouched."""
    draw, codec = Draw(dim, dtype, device), codec_of(format, 0, False)
    pool = KVPool([CacheGroup("full", (0,), (CacheRow(3, dim, dim),))], codec, [9], 16, device, dtype)
    cache = pool.layer(0)
    table = torch.tensor([[3, 1, 7], [5, 2, 0]], dtype=torch.int32, device=device)
    for s, length in enumerate((40, 20)):
        at = torch.arange(length, device=device)
        cache.codec.write(cache, draw(length, 3, dim), draw(length, 3, dim), table[s, at // 16].long() * 16 + at % 16)
    k, v = torch.full((2, 2, 80, dim), 7.0, dtype=dtype, device=device)
    spans = torch.tensor([[1, 0], [0, 32]], dtype=torch.int32, device=device)
    context, row_start = (
        torch.tensor([38, 20 - 5], dtype=torch.int32, device=device),
        torch.tensor([0, 2, 7], dtype=torch.int32, device=device),
    )
    quantized_decode.gather_codes_triton(cache.planes, format, k, v, table, context, row_start, spans, 3, 16, 1)
    for side, dense in enumerate((k, v)):
        for span, first, length in ((1, 0, 20), (0, 32, 40)):
            want = cache.codec.read(cache, table[span])[side][1:, :length]
            assert torch.allclose(
                dense[:, first : first + length].float(),
                want.float(),
                rtol=1e-2 if dtype != torch.float32 else 1e-5,
                atol=1e-5,
            )
        assert bool((dense[:, 20:32] == 0).all()) and bool((dense[:, 72:] == 0).all())
    windowed = torch.full_like(k, 7.0)
    quantized_decode.gather_codes_triton(
        cache.planes, format, windowed, windowed.clone(), table, context, row_start, spans, 3, 16, 1, window=10
    )
    assert bool((windowed[:, : 32 + 16] == 7.0).flatten(1).any(1).all()), (
        "blocks out of the first row's window are left out"
    )
    assert torch.equal(windowed[:, 32 + 32 :], k[:, 32 + 32 :]) and bool((windowed[:, 32:48] == 7.0).all())
