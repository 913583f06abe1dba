"""Attention over paged latents: one cached row is the key of all heads, and its first R elements are their value.

A program takes a tile of rows x heads and a part of its keys. It loads a page's rows once and uses them twice, for the
scores and for the sums, so the bytes are those of one plane. Rotary elements lie behind the latent (or, where latents
are stored as codes, in a plane of their own) and only join the scores.

Two forms share the kernel. *Rows*: single rows and spans of a few rows (chains, trees), whose tiles and chunks of keys
the device derives from data alone (``key_chunks``), so that a CUDA graph can hold the launch. *Tiles*: spans of any
length cut on the host, and exact mode, with the promises of ``paged_attention``: there keys are cut at multiples of
``CHUNK``, merged in their order. Up to ``MOST_HEADS`` heads are one tile's; more are *blocks* of heads, neighbours in
the grid, so that later blocks find the rows in the L2 cache.

Flash-decoding (the PyTorch blog, October 2023) over the absorbed form of DeepSeek-V2 (arXiv:2405.04434). Bytes: keys x
(R + Q) x itemsize a sequence and layer. FLOPs: 2 x rows x keys x H x (2 R + Q).

Legend: T rows, S spans, M rows x heads of a tile, H query heads, R rank of the latent, Q rotary elements, N pages, W
pages of a table, P slots per page, A words of ancestor bits, X = R + Q.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvasir import tuned
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl
from kvasir.kernels.attention_tile import (
    derived_tile,
    is_tree,
    keys_of_tile,
    planned_tile,
    rows_of_tile,
    seen_keys,
)
from kvasir.kernels.hardware import multiprocessors, name_of, send
from kvasir.kernels.key_chunks import SHORT_CHUNK, find_tile_chunk
from kvasir.kernels.paged_attention import (
    CHUNK,
    MAX_SPLITS,
    PART_BYTES,
    SPLIT_KEYS,
    Tiles,
    attend,
    merge_splits,
    visible,
)

MAX_RANK = 512  # of a latent
MOST_HEADS = 64  # of a tile: the sums of so many heads of 512 elements fill half of a multiprocessor's registers
LARGE_TILE = 64  # rows x heads of a tile of several rows
FORMATS = ("plain", "int8", "fp8")  # how latents are stored
BLOCK = 128  # elements of a latent that share a scale


class Planes(NamedTuple):
    """The planes of a layer. ``latent`` [N, 1, P, R] and ``rope`` [N, 1, P, Q], strided by page and slot; ``meta``
    [N, 1, P, blocks x numbers]: scales of codes. ``format``: one of ``FORMATS``."""

    latent: torch.Tensor
    rope: torch.Tensor
    meta: torch.Tensor | None = None
    format: str = "plain"

    @staticmethod
    def of(planes: dict[str, torch.Tensor], rank: int, format: str) -> Planes:
        """The planes of a cache of latents of this rank."""
        k = planes["k"]
        if format == "plain":
            return Planes(k[..., :rank], k[..., rank:])
        return Planes(k.view(torch.uint8), planes.get("k_rope", k[..., :0]),
                      planes["k_meta"], format)


def latent_attention_ref(q_THX: torch.Tensor, rows_NGPX: torch.Tensor, table_SW: torch.Tensor, starts: list[int],
                         lengths: list[int], scale: float, rank: int, *, ancestors_TA: torch.Tensor | None = None,
                         positions_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one span after the other: [T, H, R] in q's dtype and the log-sum-exp [T, H]. Reads only slots that a
    row sees."""
    size = rows_NGPX.shape[2]
    out_THR = q_THX.new_empty(*q_THX.shape[:2], rank)
    lse_TH = torch.empty(q_THX.shape[:2], dtype=torch.promote_types(q_THX.dtype, torch.float32), device=q_THX.device)
    row = 0
    for span, (start, length) in enumerate(zip(starts, lengths)):
        rows = slice(row, row + length)
        row += length
        bits = ancestors_TA[rows] if ancestors_TA is not None and bool(ancestors_TA[rows.start].any()) else None
        at = torch.arange(start + length, device=q_THX.device)
        k_NX = rows_NGPX[table_SW[span, at // size].long(), 0, at % size]
        seen = visible(start, length, 0, None, bits, None if bits is None else positions_T[rows], q_THX.device)
        out, lse = attend(q_THX[rows].transpose(0, 1), k_NX, k_NX[:, :rank], scale, seen)
        out_THR[rows], lse_TH[rows] = out.transpose(0, 1), lse.t()
    return out_THR, lse_TH


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _load_latents(latent_ptr, meta_ptr, page, slot, held, latent_stride, meta_stride, R: tl.constexpr,
                  R_PAD: tl.constexpr, LATENT_ROW: tl.constexpr, META_ROW: tl.constexpr, BLOCK_N: tl.constexpr,
                  FORMAT: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr):
    """Latents [BLOCK_N, R_PAD] of these slots, in the queries' type."""
    i = tl.arange(0, R_PAD)
    inside = held[:, None]
    if R != R_PAD:
        inside = inside & (i < R)[None, :]
    at = page * latent_stride + slot * LATENT_ROW
    c = tl.load(latent_ptr + at[:, None] + i[None, :], mask=inside, other=0)
    if FORMAT != "plain":
        BLOCKS: tl.constexpr = R_PAD // WIDE
        b = tl.arange(0, BLOCKS)
        live = held[:, None] & (b * WIDE < R)[None, :]
        meta = meta_ptr + (page * meta_stride + slot * META_ROW)[:, None]
        if FORMAT == "fp8":
            c = c.to(tl.float8e4nv, bitcast=True)
        codes = tl.reshape(c.to(tl.float32), [BLOCK_N, BLOCKS, WIDE])
        if FORMAT == "int8":
            scale = tl.load(meta + 2 * b[None, :], mask=live, other=0.0).to(tl.float32)
            bias = tl.load(meta + 2 * b[None, :] + 1, mask=live, other=0.0).to(tl.float32)
            values = (codes - 128.0) * scale[:, :, None] + bias[:, :, None]
        else:
            values = codes * tl.load(meta + b[None, :], mask=live, other=0.0)[:, :, None]
        c = tl.reshape(values, [BLOCK_N, R_PAD]).to(dtype)
        if R != R_PAD:
            c = tl.where(inside, c, 0.0)
    return c


@jit(do_not_specialize=["table_row", "words", "num_splits", "tile_m", "count", "wave", "budget"],
     do_not_specialize_on_alignment=["place_ptr", "length_ptr"])
def _latent_attention(
        q_ptr, latent_ptr, rope_ptr, meta_ptr, out_ptr, lse_ptr, table_ptr, context_ptr, row_start_ptr, tiles_ptr,
        ancestors_ptr, part_ptr, part_lse_ptr, cuts_ptr, place_ptr, length_ptr,
        q_row, q_head, latent_stride, rope_stride, meta_stride, out_row, table_row, words, num_splits, tile_m, count,
        wave, budget, scale,
        H: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, Q: tl.constexpr,
        Q_PAD: tl.constexpr, LATENT_ROW: tl.constexpr, ROPE_ROW: tl.constexpr, META_ROW: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr, TREE: tl.constexpr,
        SPLIT: tl.constexpr, CHUNKED: tl.constexpr, WANT_LSE: tl.constexpr, ROWS: tl.constexpr = 0,
        COUNT_PAD: tl.constexpr = 16, MIN_KEYS: tl.constexpr = 0, SHORT_KEYS: tl.constexpr = 0):
    """One tile, one block of HEADS heads, one part of its keys. Only slots below the span's end are loaded; the others
    may hold NaN.

    ROWS (0: off): the device derives tiles of so many rows, and chunks of their keys, from the rows' ``place`` and
    ``length``; ``context`` is the place of each of the ``count`` rows in the cache, and each row has a table. Tiles of
    several chunks go to ``part`` [C, G, tile_m, R] fp32 and ``part_lse`` in base 2; ``cuts`` [T, 2] are a tile's first
    chunk and their number. Otherwise, with SPLIT, ``out`` and ``lse`` are [tiles, splits, G, tile_m, ...], for
    ``merge_splits``. G is the number of blocks of heads. CHUNKED (0: off): keys of a split.
    """
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ROWS > 0:
        span, first, parts, chunk = find_tile_chunk(tile, context_ptr, place_ptr, length_ptr, count, wave, budget, 0,
                                                    ROWS, BLOCK_N, COUNT_PAD, MIN_KEYS, SHORT_KEYS, False)
        if span >= count:
            return
        first_row, context, span_row, length = derived_tile(span, tile, first, parts, context_ptr, place_ptr,
                                                            length_ptr, cuts_ptr)
    else:
        first, chunk = 0, 0
        span, first_row, context, span_row, length = planned_tile(tiles_ptr + tile * 2, context_ptr, row_start_ptr)

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    i = tl.arange(0, R_PAD)
    local, head, live, row = rows_of_tile(m, group, first_row, span_row, length, HEADS, BLOCK_M)
    q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head
    q = tl.load(q_at + i[None, :], mask=live[:, None] & (i < R)[None, :], other=0.0)
    if Q > 0:
        r = tl.arange(0, Q_PAD)
        q_rope = tl.load(q_at + R + r[None, :], mask=live[:, None] & (r < Q)[None, :], other=0.0)

    tree = is_tree(ancestors_ptr, span_row, words, TREE)
    _, _, _, start, stop = keys_of_tile(
        tile, split, num_splits, first, chunk, tree, first_row, context, length, local, row, live, 0, None, HEADS,
        BLOCK_M, BLOCK_N, TREE, False, SPLIT, CHUNKED, ROWS)

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, R_PAD], tl.float32)
    table = table_ptr + span.to(tl.int64) * table_row
    factor = scale * 1.4426950408889634
    # Page ids are fetched a block ahead and carried, as in ``decode_attention``.
    pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
    for j0 in range(start, stop, BLOCK_N):
        j = j0 + n
        held = j < stop
        page, slot = pages.to(tl.int64), j % P
        c = _load_latents(latent_ptr, meta_ptr, page, slot, held, latent_stride, meta_stride, R, R_PAD, LATENT_ROW,
                          META_ROW, BLOCK_N, FORMAT, WIDE, q_ptr.dtype.element_ty)
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        if Q > 0:
            at = page * rope_stride + slot * ROPE_ROW
            k_rope = tl.load(rope_ptr + at[:, None] + r[None, :], mask=held[:, None] & (r < Q)[None, :], other=0.0)
            s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
        pages = tl.load(table + (j + BLOCK_N) // P, mask=j + BLOCK_N < stop, other=0)
        seen = seen_keys(j, held, tree, None, context, span_row, local, row, live, 0, words, ancestors_ptr, None, TREE,
                         False)
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a row that has seen nothing yet
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(top - base)
        acc = tl.dot(p.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = new_top

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    keep = live[:, None] & (i < R)[None, :]
    at_part = ((tile.to(tl.int64) * num_splits + split) * (H // HEADS) + group) * tile_m + m
    if ROWS > 0:
        if parts > 1:
            tl.store(part_ptr + at_part[:, None] * R + i[None, :], acc, mask=keep)
            tl.store(part_lse_ptr + at_part, top + tl.log2(total), mask=live)
        else:
            _store_tile(out_ptr, lse_ptr, row, head, i, acc, top, total, keep, live, out_row, H, R, WANT_LSE)
    elif SPLIT:
        tl.store(out_ptr + at_part[:, None] * R + i[None, :], acc, mask=keep)
        tl.store(lse_ptr + at_part, top + tl.log2(total), mask=live)
    else:
        _store_tile(out_ptr, lse_ptr, row, head, i, acc, top, total, keep, live, out_row, H, R, WANT_LSE)


@jit
def _store_tile(out_ptr, lse_ptr, row, head, i, acc, top, total, keep, live, out_row, H: tl.constexpr, R: tl.constexpr,
                WANT_LSE: tl.constexpr):
    """Store a tile's results for good."""
    tl.store(out_ptr + row[:, None] * out_row + head[:, None] * R + i[None, :], acc.to(out_ptr.dtype.element_ty),
             mask=keep)
    if WANT_LSE:
        tl.store(lse_ptr + row * H + head, (top + tl.log2(total)) * 0.6931471805599453, mask=live)


@jit(do_not_specialize=["tile_m"], do_not_specialize_on_alignment=["place_ptr"])
def _merge_rows(part_ptr, part_lse_ptr, out_ptr, lse_ptr, cuts_ptr, place_ptr, out_row, tile_m, H: tl.constexpr,
                HEADS: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, ROWS: tl.constexpr, MERGE: tl.constexpr,
                WANT_LSE: tl.constexpr):
    """One row and head: its tile's chunks, in the order of the keys. A tile of one chunk has been written already."""
    row, head = tl.program_id(0), tl.program_id(1)
    local = tl.load(place_ptr + row).to(tl.int32) % ROWS
    first = tl.load(cuts_ptr + 2 * (row - local))
    parts = tl.load(cuts_ptr + 2 * (row - local) + 1)
    if parts > 1:
        c, i = tl.arange(0, MERGE), tl.arange(0, R_PAD)
        top, total = -float("inf"), 0.0
        acc = tl.zeros([R_PAD], tl.float32)
        column = local * HEADS + head % HEADS
        for c0 in range(0, parts, MERGE):
            held = c0 + c < parts
            at = ((first + c0 + c).to(tl.int64) * (H // HEADS) + head // HEADS) * tile_m + column
            lse = tl.load(part_lse_ptr + at, mask=held, other=-float("inf"))
            part = tl.load(part_ptr + at[:, None] * R + i[None, :], mask=held[:, None] & (i < R)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)  # the first keys may be none of this row's
            share = tl.exp2(lse - base)
            shrink = tl.exp2(top - base)
            acc = acc * shrink + tl.sum(part * share[:, None], 0)
            total = total * shrink + tl.sum(share, 0)
            top = new_top
        out = out_ptr + row.to(tl.int64) * out_row + head * R + i
        tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=i < R)
        if WANT_LSE:
            tl.store(lse_ptr + row.to(tl.int64) * H + head, (top + tl.log2(total)) * 0.6931471805599453)


# ------------------------------------------------------------------------------------------------------------- launcher


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel for tiles of ``block_m`` rows x heads. ``at_once``: programs that fit on a
    multiprocessor; ``programs``: chunks of long work for each."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    at_once: int
    programs: int

    @staticmethod
    @functools.cache  # every layer asks
    def of(block_m: int, rank: int, dtype: torch.dtype) -> Shape:
        """Shape from the table of tuned numbers. ``rank``: a power of two."""
        return Shape(block_m, *tuned.look_up(tuned.LATENT_ATTENTION.value, dtype=name_of(dtype), rank=rank,
                                             block_m=block_m))


def padded(rank: int) -> int:
    """The width that the kernels compute with, for latents of this rank."""
    return max(16, next_power_of_2(rank))


def wide_of(rank: int) -> int:
    """Elements of a block that shares a scale, as the kernels see it."""
    return min(BLOCK, padded(rank))


@functools.cache
def heads_of_block(heads: int) -> int:
    """Heads of a block: as many as a tile holds, so that all blocks have the same number."""
    return next(n for n in range(min(heads, MOST_HEADS), 0, -1) if heads % n == 0)


def block_of(most: int, heads: int, dtype: torch.dtype) -> int:
    """Rows x heads of tiles of spans of at most ``most`` rows. fp32 has no tensor core of its own precision: its
    products live in registers, which hold small tiles only."""
    block = heads_of_block(heads)
    small = max(16, next_power_of_2(block))
    if most <= small // block:
        return small
    return max(small, 32 if dtype == torch.float32 else LARGE_TILE)


def plan_latent_tiles(starts: list[int], lengths: list[int], heads: int, dtype: torch.dtype,
                      device: torch.device | str, spans: list[int]) -> list[Tiles]:
    """Cut ``spans`` of a step into tiles, on the host; the last rows see the most keys and start first."""
    spans = [s for s in spans if lengths[s]]
    if not spans:
        return []
    most = max(lengths[s] for s in spans)
    block_m = block_of(most, heads, dtype)
    rows = block_m // heads_of_block(heads)
    items = [(s, row) for s in spans for row in reversed(range(0, lengths[s], rows))]
    keys = max(starts[s] + lengths[s] for s in spans)
    return [Tiles(send(torch.tensor(items, dtype=torch.int32), device), block_m, keys, most)]


def exact_latent_tiles(lengths: list[int], heads: int, dtype: torch.dtype, device: torch.device | str) -> list[Tiles]:
    """Tiles of one shape for every span, in the order of the rows, for exact mode."""
    block_m = block_of(1 << 30, heads, dtype)
    rows = block_m // heads_of_block(heads)
    items = [(s, row) for s, length in enumerate(lengths) for row in range(0, length, rows)]
    if not items:
        return []
    return [Tiles(send(torch.tensor(items, dtype=torch.int32), device), block_m, 0, max(lengths), exact=True)]


def _flags(q_THX: torch.Tensor, planes: Planes, shape: Shape) -> dict:
    """Arguments that decide the compiled variant, and the checks that come with them."""
    heads, rank, rope = q_THX.shape[1], planes.latent.shape[3], planes.rope.shape[3]
    size = planes.latent.shape[2]
    assert q_THX.shape[2] == rank + rope and rank <= MAX_RANK and size & (size - 1) == 0, "unsupported shape"
    assert q_THX.stride(-1) == 1 and planes.latent.stride(-1) == 1, "rows must be dense"
    assert planes.format != "plain" or q_THX.dtype == planes.latent.dtype, "queries and rows have one type"
    meta = 0 if planes.meta is None else planes.meta.stride(2)
    return {"H": heads, "HEADS": heads_of_block(heads), "P": size, "R": rank, "R_PAD": padded(rank),
            "Q": rope, "Q_PAD": max(16, next_power_of_2(rope)), "LATENT_ROW": planes.latent.stride(2),
            "ROPE_ROW": planes.rope.stride(2), "META_ROW": meta, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
            "FORMAT": planes.format, "WIDE": wide_of(rank), "num_warps": shape.warps, "num_stages": shape.stages}


def latent_tiles_triton(q_THX: torch.Tensor, planes: Planes, table_SW: torch.Tensor, context_S: torch.Tensor,
                        row_start_S: torch.Tensor, tiles: list[Tiles], scale: float, out_THR: torch.Tensor, *,
                        ancestors_TA: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None,
                        num_splits: int | None = None) -> None:
    """Compute ``latent_attention_ref`` for the tiles into their rows of ``out`` [T, H, R] and ``lse`` (fp32)."""
    heads, rank, size = q_THX.shape[1], planes.latent.shape[3], planes.latent.shape[2]
    block, absent = heads_of_block(heads), q_THX  # stands in for pointers that the compiled variant never touches
    groups, lse, meta = heads // block, absent if lse_TH is None else lse_TH, planes.meta
    for part in tiles:
        shape = Shape.of(part.block_m, padded(rank), q_THX.dtype)
        count, tile_m = part.items.shape[0], min(part.block_m // block, part.max_rows) * block
        at_once = count
        if part.exact:
            splits = cdiv(table_SW.shape[1] * size, CHUNK)
            at_once = max(1, min(count, PART_BYTES // (4 * splits * groups * tile_m * (rank + 1))))
        else:
            wanted = shape.at_once * multiprocessors(q_THX.device) // (count * groups)
            splits = num_splits or max(1, min(wanted, part.max_keys // SPLIT_KEYS, MAX_SPLITS))
        split = part.exact or splits > 1
        target, target_lse = out_THR, lse
        if split:
            target = torch.empty((at_once, splits, groups, tile_m, rank), dtype=torch.float32, device=q_THX.device)
            target_lse = torch.empty(target.shape[:-1], dtype=torch.float32, device=q_THX.device)
        flags, tree = _flags(q_THX, planes, shape), ancestors_TA is not None
        for items in part.items.split(at_once):
            _latent_attention[(groups, items.shape[0], splits)](
                q_THX, planes.latent, planes.rope, absent if meta is None else meta, target, target_lse, table_SW,
                context_S, row_start_S, items, ancestors_TA if tree else absent, *[absent] * 5, q_THX.stride(0),
                q_THX.stride(1), planes.latent.stride(0), planes.rope.stride(0), 0 if meta is None else meta.stride(0),
                out_THR.stride(0), table_SW.stride(0), ancestors_TA.stride(0) if tree else 0, splits, tile_m, 0, 1, 1,
                scale, TREE=tree, SPLIT=split, CHUNKED=CHUNK if part.exact else 0, WANT_LSE=lse_TH is not None,
                **flags)
            if split:
                merge_splits[(items.shape[0], groups, tile_m)](
                    target, target_lse, out_THR, lse, absent, context_S, row_start_S, items, out_THR.stride(0), splits,
                    tile_m, 0, H=heads, R=block, D=rank, D_PAD=flags["R_PAD"], SPLITS_PAD=MAX_SPLITS,
                    CHUNKED=CHUNK if part.exact else 0, WINDOWED=False, TREE=tree, SINKS=False,
                    WANT_LSE=lse_TH is not None, num_warps=4)


def latent_rows_triton(q_THX: torch.Tensor, planes: Planes, table_TW: torch.Tensor, at_T: torch.Tensor,
                       place_T: torch.Tensor, length_T: torch.Tensor, most: int, scale: float, out_THR: torch.Tensor, *,
                       ancestors_TA: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None,
                       shape: Shape | None = None) -> None:
    """Compute ``latent_attention_ref`` for consecutive spans of at most ``most`` rows, of which the host knows nothing
    else, so a CUDA graph can hold the launch.

    Row t stands at ``at`` [T] int32 in the cache and at ``place`` in a span of ``length`` rows (both [T] int64), with a
    table of its own, of which that of a tile's first row is read. ``ancestors_TA``: as in ``StepBatch``, for chains,
    too; None: spans are causal.
    """
    count, heads, _ = q_THX.shape
    rank, device = planes.latent.shape[3], q_THX.device
    shape = shape or Shape.of(block_of(most, heads, q_THX.dtype), padded(rank), q_THX.dtype)
    flags, block = _flags(q_THX, planes, shape), heads_of_block(heads)
    rows, groups = shape.block_m // block, heads // block
    wave = max(1, shape.at_once * multiprocessors(device) // groups)
    budget = max(wave, shape.programs * multiprocessors(device) // groups)
    chunks, tile_m = count + budget, rows * block
    part = torch.empty((chunks, groups, tile_m, rank), dtype=torch.float32, device=device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=device)
    cuts = torch.empty((count, 2), dtype=torch.int32, device=device)
    absent, meta, tree = q_THX, planes.meta, ancestors_TA is not None
    lse = absent if lse_TH is None else lse_TH
    _latent_attention[(groups, chunks, 1)](
        q_THX, planes.latent, planes.rope, absent if meta is None else meta, out_THR, lse, table_TW, at_T, absent,
        absent, ancestors_TA if tree else absent, part, part_lse, cuts, place_T, length_T, q_THX.stride(0),
        q_THX.stride(1), planes.latent.stride(0), planes.rope.stride(0), 0 if meta is None else meta.stride(0),
        out_THR.stride(0), table_TW.stride(0), ancestors_TA.stride(0) if tree else 0, 1, tile_m, count, wave, budget,
        scale, TREE=tree, SPLIT=False, CHUNKED=0, WANT_LSE=lse_TH is not None, ROWS=rows,
        COUNT_PAD=max(16, next_power_of_2(count)), MIN_KEYS=max(SPLIT_KEYS, shape.block_n), SHORT_KEYS=SHORT_CHUNK,
        **flags)
    _merge_rows[(count, heads)](part, part_lse, out_THR, lse, cuts, place_T, out_THR.stride(0), tile_m, H=heads,
                                HEADS=block, R=rank, R_PAD=flags["R_PAD"], ROWS=rows, MERGE=8,
                                WANT_LSE=lse_TH is not None, num_warps=4)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: ``spans`` as (start, length), ``trees`` as (span, parents of its rows). ``splits``:
    of the tiles' keys; with rows, chunks of long work for a multiprocessor."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 32
    rope: int = 16
    page_slots: int = 16
    trees: tuple[tuple[int, tuple[int, ...]], ...] = ()
    splits: int = 1
    format: str = "plain"


def grid() -> Iterator[Case]:
    small = (-1, 0, 0, 1, 1, 2, 5)
    yield Case(spans=((0, 1),))
    yield Case(spans=((70, 1), (16, 23), (300, 1), (0, 5)), splits=3)
    for rank, rope, heads in ((96, 16, 20), (256, 64, 4), (320, 32, 3), (512, 64, 16), (32, 0, 128)):
        yield Case(spans=((290, 1), (5, 3)), rank=rank, rope=rope, heads=heads, splits=2)
    yield Case(spans=((150, 1), (64, 9)), rank=512, rope=64, heads=128, page_slots=64)
    yield Case(spans=((120, 4), (61, 7), (0, 2), (33, 1)), heads=16, trees=((1, small),), splits=2)
    yield Case(spans=((333, 16), (3, 2)), heads=20, page_slots=64, trees=((0, (-1, *([0] * 5), *range(10))),))
    for format in ("int8", "fp8"):
        for rank, rope in ((512, 64), (320, 32), (96, 0)):
            yield Case(spans=((90, 1), (37, 3)), rank=rank, rope=rope, page_slots=32, format=format, splits=2)
