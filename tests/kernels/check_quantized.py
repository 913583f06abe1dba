"""The quantising kernels against ``kernels.quantize``: rows within the grid's step of the rotated reference, and nothing else
written. Codes themselves may differ where a rounding error falls on the border of two."""

from __future__ import annotations

import dataclasses

import torch

from kvasir.kernels import quantized_qkv
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.quantized_qkv import Basis
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.rope import RopeTable
from kvasir.layers.spec import RopeSpec
from kvasir.technique import load
from kvasir.types import CacheGroup
from tests.kernels.check_fused import Draw


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
    slots = torch.randperm(pages * case.page_slots, generator=draw.generator)[:case.rows].to(device)
    if case.skip:
        slots[::case.skip] = -1
    codec = codec_of(case.format, 0 if case.format != "int4" else case.order, case.values)
    basis = basis_of(case.order, case.dim, case.values, dtype, device) if case.order else None
    pool = KVPool([CacheGroup("full", (0,), case.groups, case.dim)], codec, [pages], case.page_slots, device, dtype)
    pool.pages[0].fill_(0xAB)
    before, cache = pool.pages[0].clone(), pool.layer(0)
    q = quantized_qkv.quantized_qkv(heads, HeadOps(case.heads, table, positions, norm), cache.planes, slots, case.format, basis)
    wide = None if basis is None else dataclasses.replace(basis, matrix=basis.matrix.double(), signs_D=basis.signs_D.double())
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
        assert worst <= 0.52, (case, dtype, side, worst)  # the nearest point of the grid, whose fp16 ends may cut a little off
    pool.pages[0][page.unique()] = before[page.unique()]
    assert torch.equal(pool.pages[0], before), "other pages were touched"
    return worst


def basis_of(order: int, dim: int, values: bool, dtype: torch.dtype, device: str) -> Basis:
    from kvasir.kv.quantized import Rotation

    return Rotation(order, dim, signs=True).basis(dtype, torch.device(device), values)
