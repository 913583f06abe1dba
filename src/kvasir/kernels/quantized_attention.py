"""Attention of short spans over quantised pages: drafts, draft trees, the ends of prompts. Codes go to the tensor core
as they are.

The rows of a span share the read and the conversion of the codes. A *tile* is a few rows of one span times the query
heads that share a KV head: the columns of the products of ``quantized_decode``, whose arithmetic this is. Tiles, trees,
the splitting of keys where tiles are too few to fill the GPU, and the kernel that merges the splits are those of
``paged_attention``. The reference is ``paged_attention_ref`` over the decoded codes.

Bytes: 2 x keys x G x (D x bits / 8 + 4) a tile and layer, plus 8 x rows x H x D for every split.

Legend: T rows, S spans, M rows x heads of a tile, H query heads, G KV heads, R = H / G, D head dim, W words of a row, N
pages or keys of a block, P slots per page, A words of ancestor bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels import paged_attention
from kvasir.kernels._triton import INTERPRETED, jit, next_power_of_2, tl
from kvasir.kernels.attention_tile import (
    derived_tile,
    is_tree,
    keys_of_tile,
    load_pages,
    planned_tile,
    rows_of_tile,
    seen_of_few,
)
from kvasir.kernels.hardware import multiprocessors, name_of, send
from kvasir.kernels.key_chunks import SHORT_CHUNK, find_tile_chunk
from kvasir.kernels.paged_attention import SPLIT_KEYS, TREE_ROWS, Tiles, chunks_of, merge_splits, merge_tiles
from kvasir.kernels.quantized_decode import fold_codes, load_queries, store_parts, values_of
from kvasir.kernels.quantized_qkv import FORMATS, Format
from kvasir.kernels.softmax_block import sink_logits

MAX_ROWS = TREE_ROWS  # rows of a span
MAX_COLUMNS = tuned.QUANTIZED_COLUMNS.value  # rows x query heads of a KV head
MAX_SPLITS = 64
MIN_SPLITS = 3  # fewer splits do not make up for the merge
COLUMNS = 16  # columns of a tile, unless one row has more: as many as a program of one warp has registers for


def worth_it(length: int, share: int) -> bool:
    """Whether a span of ``length`` rows reads codes here. Each of its tiles converts all codes that it reads."""
    return length <= most_rows(share)


def most_rows(share: int) -> int:
    """Most rows of a span that is read here, for the ``share`` query heads of a KV head."""
    return min(MAX_ROWS, MAX_COLUMNS // share)


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel. ``at_once``: programs that fit on a multiprocessor; ``programs``: chunks of long
    work for each multiprocessor, where the device cuts them."""

    block_n: int
    warps: int
    stages: int
    at_once: int
    programs: int = 16

    @staticmethod
    @functools.cache  # every layer asks
    def of(format: Format, dim: int, dtype: torch.dtype, block_m: int) -> Shape:
        """Shape for tiles of ``block_m`` columns, from the table of tuned numbers. ``dim``: a power of two.

        One warp needs no barrier for the sums over keys: two tiles of 16 columns take less time than one of 32 on four
        warps. fp32 products live in registers, not on the tensor cores.
        """
        rows = tuned.QUANTIZED_ROWS.value
        return Shape(*tuned.look_up(rows, dtype=name_of(dtype), dim=dim, block_m=block_m, format=format))


def plan_rows(starts: list[int], lengths: list[int], spans: list[int], share: int, device: torch.device | str) -> Tiles:
    """Cut ``spans`` of a step into the tiles of one launch, on the host."""
    block_m = max(COLUMNS, next_power_of_2(share))
    rows = block_m // share
    items = [(s, row) for s in spans for row in range(0, lengths[s], rows)]
    return Tiles(send(torch.tensor(items, dtype=torch.int32), device), block_m,
                 max(starts[s] + lengths[s] for s in spans),
                 max(lengths[s] for s in spans))


@jit(do_not_specialize=["table_row", "words", "window", "num_splits", "tile_m", "count", "wave", "budget"],
     do_not_specialize_on_alignment=["place_ptr", "length_ptr"])
def _quantized_attention(
        q_ptr, k_ptr, v_ptr, k_meta, v_meta, out_ptr, lse_ptr, sinks_ptr, table_ptr, context_ptr, row_start_ptr,
        tiles_ptr, ancestors_ptr,
        positions_ptr, part_ptr, part_lse_ptr, cuts_ptr, place_ptr, length_ptr,
        q_row, q_head, page_stride, head_stride, meta_page, meta_head, out_row, table_row, words, window, num_splits,
        tile_m,
        count, wave, budget, scale, softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BITS: tl.constexpr, TRICK: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
        CAPPED: tl.constexpr,
        SINKS: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr, WANT_LSE: tl.constexpr, ROWS: tl.constexpr = 0,
        COUNT_PAD: tl.constexpr = 16, MIN_KEYS: tl.constexpr = 0, SHORT_KEYS: tl.constexpr = 0):
    """One tile, one KV head, one split of its keys, as in ``_paged_attention``; scores are [keys, M], sums [words, M].

    SPLIT: ``out`` is [tiles, splits, G, tile_m, D] fp32 and ``lse`` [tiles, splits, G, tile_m] in base 2, both for
    ``merge_splits``. Only slots below the span's end are ever loaded (the others may hold NaN). ROWS: as in
    ``_paged_attention``."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ROWS > 0:
        span, first, parts, chunk = find_tile_chunk(tile, context_ptr, place_ptr, length_ptr, count, wave, budget,
                                                    window, ROWS, BLOCK_N, COUNT_PAD, MIN_KEYS, SHORT_KEYS, WINDOWED)
        if span >= count:
            return
        first_row, context, span_row, length = derived_tile(span, tile, first, parts, context_ptr, place_ptr,
                                                            length_ptr, cuts_ptr)
    else:
        first, chunk = 0, 0
        span, first_row, context, span_row, length = planned_tile(tiles_ptr + tile * 2, context_ptr, row_start_ptr)

    m = tl.arange(0, BLOCK_M)
    w = tl.arange(0, W_PAD)
    n = tl.arange(0, BLOCK_N)
    local, head, live, row = rows_of_tile(m, group, first_row, span_row, length, R, BLOCK_M)
    wide = (w < W)[None, :]

    tree, kin = is_tree(ancestors_ptr, span_row, words, TREE), None
    if TREE:
        kin = tl.load(ancestors_ptr + row * words, mask=live, other=0)  # the row and its ancestors, a bit each
    at_m, low, full, start, stop = keys_of_tile(
        tile, split, num_splits, first, chunk, tree, first_row, context, length, local, row, live, window,
        positions_ptr, R, BLOCK_M, BLOCK_N, TREE, WINDOWED, SPLIT, 0, ROWS)

    factor = scale if CAPPED else scale * 1.4426950408889634
    q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head + 2 * w[None, :]
    q0, q1, q2, q3, total_q, above_q = load_queries(q_at, live[:, None] & wide, factor, D, BITS, TRICK)
    acc0 = tl.zeros([W_PAD, BLOCK_M], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    shift = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = table_ptr + span.to(tl.int64) * table_row
    kv_head, kv_meta = group.to(tl.int64) * head_stride, group.to(tl.int64) * meta_head

    # Page ids are fetched a block ahead and carried; blocks that every row sees whole need no mask: see
    # ``_paged_attention``.
    pages = load_pages(table, start, start + n, stop, P, BLOCK_N)
    middle = start
    if not WINDOWED:
        middle = start + tl.maximum(tl.minimum(stop, full) - start, 0) // BLOCK_N * BLOCK_N
        for j0 in range(start, middle, BLOCK_N):
            j = j0 + n
            slot = j0 % P + n if BLOCK_N <= P else j % P
            at = pages.to(tl.int64) * page_stride + kv_head + slot * W
            at_meta = pages.to(tl.int64) * meta_page + kv_meta + slot
            k = tl.load(k_ptr + at[:, None] + w[None, :], mask=wide, other=0)
            k_grid = tl.load(k_meta + at_meta)
            v = tl.load(v_ptr + at[None, :] + w[:, None], mask=(w < W)[:, None], other=0)
            v_grid = tl.load(v_meta + at_meta)
            pages = load_pages(table, j0 + BLOCK_N, j + BLOCK_N, stop, P, BLOCK_N)
            top, total, shift, acc0, acc1, acc2, acc3 = fold_codes(
                k, v, k_grid, v_grid, None, q0, q1, q2, q3, total_q, above_q, softcap, top, total, shift, acc0, acc1,
                acc2, acc3,
                BLOCK_M, BLOCK_N, BITS, TRICK, ASM, CAPPED, False)

    for j0 in range(middle, stop, BLOCK_N):
        j = j0 + n
        held = (j >= low) & (j < stop)
        slot = j0 % P + n if BLOCK_N <= P else j % P
        at = pages.to(tl.int64) * page_stride + kv_head + slot * W
        at_meta = pages.to(tl.int64) * meta_page + kv_meta + slot
        k = tl.load(k_ptr + at[:, None] + w[None, :], mask=held[:, None] & wide, other=0)
        k_grid = tl.load(k_meta + at_meta, mask=held, other=0)
        v = tl.load(v_ptr + at[None, :] + w[:, None], mask=held[None, :] & (w < W)[:, None], other=0)
        v_grid = tl.load(v_meta + at_meta, mask=held, other=0)
        pages = load_pages(table, j0 + BLOCK_N, j + BLOCK_N, stop, P, BLOCK_N)
        seen = seen_of_few(j, held, tree, kin, at_m, context, span_row, local, window, positions_ptr, TREE, WINDOWED)
        top, total, shift, acc0, acc1, acc2, acc3 = fold_codes(
            k, v, k_grid, v_grid, seen, q0, q1, q2, q3, total_q, above_q, softcap, top, total, shift, acc0, acc1, acc2,
            acc3,
            BLOCK_M, BLOCK_N, BITS, TRICK, ASM, CAPPED, True)

    lse = top + tl.log2(total)
    peak, whole = top, total
    if SINKS and not SPLIT:
        peak, whole, _ = sink_logits(sinks_ptr, head, live, top, total, shift[:, None])
        if ROWS > 0:  # of several chunks, whoever merges them adds it
            peak, whole = tl.where(parts == 1, peak, top), tl.where(parts == 1, whole, total)
        lse = peak + tl.log2(whole)
    weight = tl.where(total == 0.0, 0.0, tl.exp2(top - peak) / tl.where(total == 0.0, 1.0, whole))
    acc0, acc1, acc2, acc3 = values_of(acc0, acc1, acc2, acc3, shift, weight, BITS, TRICK)
    if ROWS > 0:
        if parts > 1:
            at_part = (tile.to(tl.int64) * (H // R) + group) * tile_m + m
            _store_tile(part_ptr, part_lse_ptr, at_part * D, at_part, lse, acc0, acc1, acc2, acc3, w, live, D, W, BITS,
                        True)
        else:
            _store_tile(out_ptr, lse_ptr, row * out_row + head * D, row * H + head, lse * 0.6931471805599453, acc0,
                        acc1, acc2, acc3, w, live, D, W, BITS, WANT_LSE)
    elif SPLIT:
        at_part = ((tile.to(tl.int64) * num_splits + split) * (H // R) + group) * tile_m + m
        _store_tile(out_ptr, lse_ptr, at_part * D, at_part, lse, acc0, acc1, acc2, acc3, w, live, D, W, BITS, True)
    else:
        _store_tile(out_ptr, lse_ptr, row * out_row + head * D, row * H + head, lse * 0.6931471805599453, acc0, acc1,
                    acc2, acc3, w, live, D, W, BITS, WANT_LSE)


@jit
def _store_tile(out_ptr, lse_ptr, at, at_lse, lse, acc0, acc1, acc2, acc3, w, live, D: tl.constexpr, W: tl.constexpr,
                BITS: tl.constexpr,
                WANT_LSE: tl.constexpr):
    """The columns of a tile, [W, M] by elements, at ``at`` [M] and ``at_lse`` [M]."""
    store_parts(out_ptr + at[None, :], acc0, acc1, acc2, acc3, w, live, D, W, BITS)
    if WANT_LSE:
        tl.store(lse_ptr + at_lse, lse, mask=live)


def quantized_attention_triton(q_THD: torch.Tensor, planes: Mapping[str, torch.Tensor], format: Format,
                               table_SW: torch.Tensor, context_S: torch.Tensor, row_start_S: torch.Tensor, tiles: Tiles,
                               scale: float, out_THD: torch.Tensor, *, window: int | None = None,
                               softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                               ancestors_TA: torch.Tensor | None = None, positions_T: torch.Tensor | None = None,
                               lse_TH: torch.Tensor | None = None, shape: Shape | None = None,
                               num_splits: int | None = None) -> None:
    """Compute ``paged_attention_ref`` over decoded ``planes`` for the tiles of ``plan_rows``, into their rows of
    ``out`` and ``lse`` (fp32). Queries and values are in the cache's basis. ``planes``: as ``quantized_qkv`` writes
    them."""
    _, heads, dim = q_THD.shape
    k, v = planes["k"].view(torch.int16), planes["v"].view(torch.int16)
    k_meta, v_meta = planes["k_meta"].view(torch.int32), planes["v_meta"].view(torch.int32)
    groups, size, width = k.shape[1:]
    assert heads % groups == 0 and dim % 4 == 0 and dim <= 256 and size & (size - 1) == 0, "unsupported shape"
    assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k_meta.stride() == v_meta.stride(), \
        "planes must have dense slots"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1 and out_THD.stride(1) == dim, "rows must be dense"
    assert tiles.max_rows <= MAX_ROWS, "a tree's ancestors are one word a row"
    share, dim_pad = heads // groups, max(16, next_power_of_2(dim))
    shape = shape or Shape.of(format, dim_pad, q_THD.dtype, tiles.block_m)
    count, tile_m = tiles.items.shape[0], min(tiles.block_m // share, tiles.max_rows) * share
    keys = tiles.max_keys if window is None else min(tiles.max_keys, window + tiles.block_m)
    splits = num_splits or min(shape.at_once * multiprocessors(q_THD.device) // (count * groups), keys // SPLIT_KEYS,
                               MAX_SPLITS)
    splits = splits if num_splits or splits >= MIN_SPLITS else 1
    absent = q_THD  # stands in for pointers that the compiled variant never touches
    sinks, lse = absent if sinks_H is None else sinks_H, absent if lse_TH is None else lse_TH
    target, target_lse = out_THD, lse
    if splits > 1:
        target = torch.empty((count, splits, groups, tile_m, dim), dtype=torch.float32, device=q_THD.device)
        target_lse = torch.empty(target.shape[:-1], dtype=torch.float32, device=q_THD.device)
    flags = {"WINDOWED": window is not None, "TREE": ancestors_TA is not None, "SINKS": sinks_H is not None,
             "WANT_LSE": lse_TH is not None}
    _quantized_attention[(groups, count, splits)](
        q_THD, k, v, k_meta, v_meta, target, target_lse, sinks, table_SW, context_S, row_start_S, tiles.items,
        absent if ancestors_TA is None else ancestors_TA, absent if positions_T is None else positions_T, *[absent] * 5,
        q_THD.stride(0), q_THD.stride(1), k.stride(0), k.stride(1), k_meta.stride(0), k_meta.stride(1),
        out_THD.stride(0), table_SW.stride(0),
        0 if ancestors_TA is None else ancestors_TA.stride(0), window or 0, splits, tile_m, 0, 1, 1, scale,
        softcap or 1.0,
        H=heads, R=share, P=size, D=dim, W=width, W_PAD=max(16, next_power_of_2(width)), BLOCK_M=tiles.block_m,
        BLOCK_N=shape.block_n,
        BITS=FORMATS[format], TRICK=q_THD.dtype != torch.float32, ASM=not INTERPRETED, CAPPED=softcap is not None,
        SPLIT=splits > 1,
        num_warps=shape.warps, num_stages=shape.stages, **flags)
    if splits > 1:
        merge_splits[(count, groups, tile_m)](
            target, target_lse, out_THD, lse, sinks, context_S, row_start_S, tiles.items, out_THD.stride(0), splits,
            tile_m, window or 0,
            H=heads, R=share, D=dim, D_PAD=dim_pad, SPLITS_PAD=max(16, next_power_of_2(splits)), CHUNKED=0, num_warps=4,
            **flags)


def quantized_together_triton(q_THD: torch.Tensor, planes: Mapping[str, torch.Tensor], format: Format,
                              table_TW: torch.Tensor, at_T: torch.Tensor, place_T: torch.Tensor, length_T: torch.Tensor,
                              ancestors_TA: torch.Tensor, positions_T: torch.Tensor, most: int, scale: float,
                              out_THD: torch.Tensor, *, window: int | None = None, softcap: float | None = None,
                              sinks_H: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None,
                              shape: Shape | None = None) -> None:
    """``paged_together_triton`` over what ``planes`` stand for, for queries and values in the cache's basis."""
    count, heads, dim = q_THD.shape
    k, v = planes["k"].view(torch.int16), planes["v"].view(torch.int16)
    k_meta, v_meta = planes["k_meta"].view(torch.int32), planes["v_meta"].view(torch.int32)
    groups, size, width = k.shape[1:]
    assert heads % groups == 0 and dim % 4 == 0 and dim <= 256 and size & (size - 1) == 0, "unsupported shape"
    assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k_meta.stride() == v_meta.stride(), \
        "planes must have dense slots"
    assert q_THD.stride(-1) == 1 and table_TW.stride(-1) == 1 and out_THD.stride(1) == dim, "rows must be dense"
    assert most <= MAX_ROWS, "a tree's ancestors are one word a row"
    share, dim_pad = heads // groups, max(16, next_power_of_2(dim))
    block_m = max(COLUMNS, next_power_of_2(share))
    rows = block_m // share
    shape = shape or Shape.of(format, dim_pad, q_THD.dtype, block_m)
    wave, budget = chunks_of(shape, groups, q_THD.device)
    part = torch.empty((count + budget, groups, rows * share, dim), dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q_THD.device)
    cuts = torch.empty((count, 2), dtype=torch.int32, device=q_THD.device)
    absent = q_THD  # stands in for pointers that the compiled variant never touches
    _quantized_attention[(groups, count + budget, 1)](
        q_THD, k, v, k_meta, v_meta, out_THD, absent if lse_TH is None else lse_TH,
        absent if sinks_H is None else sinks_H, table_TW, at_T, absent,
        absent, ancestors_TA, positions_T, part, part_lse, cuts, place_T, length_T, q_THD.stride(0), q_THD.stride(1),
        k.stride(0), k.stride(1),
        k_meta.stride(0), k_meta.stride(1), out_THD.stride(0), table_TW.stride(0), ancestors_TA.stride(0), window or 0,
        1, rows * share, count,
        wave, budget, scale, softcap or 1.0, H=heads, R=share, P=size, D=dim, W=width,
        W_PAD=max(16, next_power_of_2(width)), BLOCK_M=block_m,
        BLOCK_N=shape.block_n, BITS=FORMATS[format], TRICK=q_THD.dtype != torch.float32, ASM=not INTERPRETED,
        WINDOWED=window is not None,
        CAPPED=softcap is not None, SINKS=sinks_H is not None, TREE=True, SPLIT=False, WANT_LSE=lse_TH is not None,
        ROWS=rows,
        COUNT_PAD=max(16, next_power_of_2(count)), MIN_KEYS=max(SPLIT_KEYS, shape.block_n), SHORT_KEYS=SHORT_CHUNK,
        num_warps=shape.warps,
        num_stages=shape.stages)
    merge_tiles(part, part_lse, cuts, place_T, rows, dim, sinks_H, out_THD, lse_TH)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case(paged_attention.Case):
    """One point of the test grid. ``splits`` None: chosen."""

    format: Format = "int4"
    page_slots: int = 64
    splits: int | None = None


def grid() -> Iterator[Case]:
    mixed = ((40, 2), (0, 5), (16, 19), (130, 6))
    small, wide = (-1, 0, 0, 1, 1, 2, 5), (-1, *((i - 1) // 2 for i in range(1, 64)))
    for format in FORMATS:
        yield Case(spans=mixed, format=format, splits=3, heads=4, kv_heads=2)
        yield Case(spans=((61, 7), (0, 9)), format=format, trees=((0, small),), page_slots=32, softcap=4.0, sinks=True,
                   splits=2)
    for dim in (64, 80, 96, 128, 256):
        yield Case(spans=((33, 2), (5, 9)), dim=dim)
    for heads, kv_heads in ((1, 1), (3, 3), (7, 1), (12, 2), (16, 1), (20, 1)):
        yield Case(spans=((20, 2), (30, 3), (2, 5)), heads=heads, kv_heads=kv_heads)
    yield Case(spans=((150, 2), (64, 12)), page_slots=16)
    for window, splits in ((1, 3), (21, 1), (100, 3)):
        yield Case(spans=mixed, window=window, splits=splits)
    for window, splits in ((None, 1), (2, 2), (40, 2), (40, 1)):
        yield Case(spans=((50, 2), (61, 7), (0, 8), (30, 3), (3, 2)), window=window,
                   trees=((1, small), (3, (-1, 0, 1))), splits=splits)
    yield Case(spans=((70, 64),), trees=((0, wide),))
    yield Case(spans=((1000, 4),), heads=4, sinks=True)  # splits as chosen


def together_grid() -> Iterator[Case]:
    """Spans of a captured step, as in ``paged_attention``."""
    small = (-1, 0, 0, 1, 1, 2, 5)
    for format in FORMATS:
        yield Case(spans=((140, 7), (16, 1), (0, 9)), format=format, trees=((0, small),), page_slots=32, splits=2)
    yield Case(spans=((130, 6), (0, 5)), sinks=True, softcap=4.0, splits=2)
    yield Case(spans=((33, 2), (5, 9)), dim=80)
    yield Case(spans=((20, 2), (130, 3)), heads=12, kv_heads=2)
    for window in (2, 40):
        yield Case(spans=((50, 2), (161, 7), (0, 4)), window=window, trees=((1, small),), page_slots=16, splits=2)
    yield Case(spans=((70, 64),), heads=1, trees=((0, (-1, *((i - 1) // 2 for i in range(1, 64)))),))
