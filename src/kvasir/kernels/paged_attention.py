"""Attention of ragged spans over paged keys and values: the reference, and a FlashAttention-style kernel in Triton.

This kernel takes every span; single rows and long spans have faster ones (``decode_attention.py``,
``dense_attention.py``).

A *tile* is what one program computes: a few rows of one span, times the query heads that share one KV head, so that
grouped heads fill the tensor core's rows and every key is read once for all of them. ``Tiles`` is the list of tiles of
a launch; spans of a step take at most two launches, one of small tiles (drafts) and one of large tiles (prompt chunks).
Where tiles are too few to fill the GPU, the keys of each are split over several programs and a second kernel merges
their partial results by log-sum-exp (flash-decoding). No result is read back by the host.

Exact mode: a row's bits depend on its sequence and position alone. Every span takes tiles of one shape
(``exact_tiles``), every block of keys the masked path, and keys are always cut at multiples of ``CHUNK``, whose partial
results are merged one after the other in their order. Blocks that a row does not see change none of its bits: they add
zero and multiply by one. A row of a draft tree has its keys at other slots than the same row of a plain span, so there
the promise does not hold.

FlashAttention-2 (arXiv:2307.08691), flash-decoding (the PyTorch blog, October 2023), PagedAttention (arXiv:2309.06180).
Bytes of a decode step: 2 x keys x G x D x itemsize a sequence and layer. FLOPs: 4 x rows x keys x H x D.

Legend: T rows, S spans, L rows of one span, M rows x heads of a tile, H query heads, G KV heads, D head dim, N keys,
W pages of a table, P slots per page, A words of ancestor bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvasir import tuned
from kvasir.kernels._triton import Launches, cdiv, jit, launch, next_power_of_2, tl
from kvasir.kernels.attention_tile import (
    derived_tile,
    is_tree,
    keys_of_tile,
    planned_tile,
    rows_of_tile,
    seen_keys,
)
from kvasir.kernels.hardware import multiprocessors, name_of, send
from kvasir.kernels.key_chunks import SHORT_CHUNK, _merge_tiles, find_tile_chunk, merged_at_once
from kvasir.kernels.softmax_block import attend_block, sink_logits

INF = float("inf")
SMALL_TILE = 16  # rows x heads: the least that the tensor core takes
TREE_ROWS = 64  # of a span, where a row's ancestors are one word
MAX_DIM = 512  # of a head
MAX_SPLITS = 32  # splits of a tile's keys
SPLIT_KEYS = tuned.SPLIT_KEYS.value  # fewer keys than this are not worth a program of their own
CHUNK = 1024  # keys that exact mode computes apart
PART_BYTES = 256 << 20  # of partial results at a time, in exact mode


def tree_bits(ancestors_LA: torch.Tensor) -> torch.Tensor:
    """Unpack ``StepBatch.ancestors`` of one span: bool [L, L], true where row j is an ancestor of row i or i itself."""
    j = torch.arange(ancestors_LA.shape[0], device=ancestors_LA.device)
    return (ancestors_LA[:, j // 64] >> (j % 64)) & 1 == 1


def visible(start: int, length: int, first: int, window: int | None = None, ancestors_LA: torch.Tensor | None = None,
            positions_L: torch.Tensor | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """Mask of the slots ``first .. start + length`` that each row of a span sees: bool [L, start + length - first].

    A tree span (``ancestors_LA`` given, with the RoPE ``positions_L`` of its rows) sees the context and its ancestors.
    For its window a row stands at its depth, not at its slot.
    """
    keys = torch.arange(first, start + length, device=device)
    rows = torch.arange(start, start + length, device=device)
    if ancestors_LA is None:
        seen = keys <= rows[:, None]
    else:
        context = torch.ones(length, start - first, dtype=torch.bool, device=device)
        seen = torch.cat([context, tree_bits(ancestors_LA)], 1)
        rows = positions_L
        keys = torch.cat([keys[:start - first], positions_L])
    if window is not None:
        seen &= keys > rows[:, None] - window
    return seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor | None = None,
           softcap: float | None = None, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain dense attention in fp32 (fp64 stays): q [..., L, D], k and v [..., N, D] -> [..., L, D], lse [..., L].

    ``seen``: bool, broadcast to [..., L, N]. ``sinks``: logits that join the softmax without a value, broadcast to
    [..., L]. The log-sum-exp is natural and counts the sink, so that ``out = sum exp(score - lse) v``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide) * scale, k.to(wide).transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -INF)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide))
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), v.to(wide)).to(q.dtype), lse


def paged_attention_ref(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_SW: torch.Tensor,
                        starts: list[int], lengths: list[int], scale: float, *, window: int | None = None,
                        softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                        ancestors_TA: torch.Tensor | None = None, positions_T: torch.Tensor | None = None,
                        ) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one span after the other: [T, H, D] in q's dtype and the log-sum-exp [T, H]. Reads only slots that a
    row sees."""
    heads, groups, size = q_THD.shape[1], k_NGPD.shape[1], k_NGPD.shape[2]
    out_THD = torch.empty_like(q_THD)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    sinks = None if sinks_H is None else sinks_H.view(groups, -1, 1)
    row = 0
    for span, (start, length) in enumerate(zip(starts, lengths)):
        rows = slice(row, row + length)
        row += length
        bits = ancestors_TA[rows] if ancestors_TA is not None and bool(ancestors_TA[rows.start].any()) else None
        first = 0 if window is None else max(0, start - window + 1)
        at = torch.arange(first, start + length, device=q_THD.device)
        page = table_SW[span, at // size].long()
        k, v = (pages[page, :, at % size].transpose(0, 1).unsqueeze(1) for pages in (k_NGPD, v_NGPD))  # [G, 1, N, D]
        seen = visible(start, length, first, window, bits, None if bits is None else positions_T[rows], q_THD.device)
        q = q_THD[rows].unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3)  # [G, R, L, D]
        out, lse = attend(q, k, v, scale, seen, softcap, sinks)
        out_THD[rows], lse_TH[rows] = out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)
    return out_THD, lse_TH


# -------------------------------------------------------------------------------------------------------------- kernels


@jit(do_not_specialize=["table_row", "window", "num_splits", "words", "tile_m", "count", "wave", "budget"],
     do_not_specialize_on_alignment=["place_ptr", "length_ptr"])
def _paged_attention(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, context_ptr, row_start_ptr, tiles_ptr,
        ancestors_ptr, positions_ptr,
        part_ptr, part_lse_ptr, cuts_ptr, place_ptr, length_ptr,
        q_row, q_head, page_stride, head_stride, out_row, table_row, words, window, num_splits, tile_m, count, wave,
        budget, scale, softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
        TREE: tl.constexpr, SPLIT: tl.constexpr, CHUNKED: tl.constexpr, WANT_LSE: tl.constexpr, ROWS: tl.constexpr = 0,
        COUNT_PAD: tl.constexpr = 16, MIN_KEYS: tl.constexpr = 0, SHORT_KEYS: tl.constexpr = 0):
    """One tile, one KV head, one split of its keys. CHUNKED (0: off): keys of a split, which starts at a multiple of
    it.

    SPLIT: ``out`` is [tiles, splits, G, tile_m, D] fp32 and ``lse`` [tiles, splits, G, tile_m] in base 2, both for
    ``merge_splits``; else they are the results. Only slots below the span's end are loaded; the others may hold NaN.

    ROWS (0: off): the device derives tiles of this many rows, and chunks of their keys, from the rows' ``place`` and
    ``length``; see ``paged_together_triton``. ``context`` is then the place of each of the ``count`` rows in the cache,
    and each row has a table. ``part``, ``part_lse`` and ``cuts`` [T, 2] (a tile's first chunk, and their number) are
    for ``_merge_tiles``.
    """
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ROWS > 0:
        group, tile = tl.program_id(0), tl.program_id(1)
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
    d = tl.arange(0, D_PAD)
    local, head, live, row = rows_of_tile(m, group, first_row, span_row, length, R, BLOCK_M)
    inside = d < D
    q = tl.load(q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :],
                mask=live[:, None] & inside[None, :], other=0.0)

    tree = is_tree(ancestors_ptr, span_row, words, TREE)
    at_m, low, full, start, stop = keys_of_tile(
        tile, split, num_splits, first, chunk, tree, first_row, context, length, local, row, live, window,
        positions_ptr, R, BLOCK_M, BLOCK_N, TREE, WINDOWED, SPLIT, CHUNKED, ROWS)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    table = table_ptr + span.to(tl.int64) * table_row
    kv_head = group.to(tl.int64) * head_stride
    n = tl.arange(0, BLOCK_N)

    # Page ids are fetched a block ahead and carried: keys whose address waits for a load of the same iteration would
    # not be pipelined. Blocks that every row of the tile sees whole need no mask; a window puts masked blocks before
    # them as well.
    pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
    middle = start
    if not WINDOWED and CHUNKED == 0:
        middle = start + tl.maximum(tl.minimum(stop, full) - start, 0) // BLOCK_N * BLOCK_N
        for j0 in range(start, middle, BLOCK_N):
            j = j0 + n
            at = pages.to(tl.int64) * page_stride + kv_head + (j % P) * D
            k = tl.load(k_ptr + at[:, None] + d[None, :], mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside[None, :], other=0.0)
            pages = tl.load(table + (j + BLOCK_N) // P, mask=j + BLOCK_N < stop, other=0)
            top, total, acc = attend_block(q, tl.trans(k), v, None, scale, softcap, top, total, acc, CAPPED, False)

    for j0 in range(middle, stop, BLOCK_N):
        j = j0 + n
        held = (j >= low) & (j < stop)
        at = pages.to(tl.int64) * page_stride + kv_head + (j % P) * D
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        pages = tl.load(table + (j + BLOCK_N) // P, mask=j + BLOCK_N < stop, other=0)
        seen = seen_keys(j, held, tree, at_m, context, span_row, local, row, live, window, words, ancestors_ptr,
                         positions_ptr, TREE, WINDOWED)
        top, total, acc = attend_block(q, tl.trans(k), v, seen, scale, softcap, top, total, acc, CAPPED, True)

    if ROWS > 0:
        if parts == 1:
            _finish(out_ptr, lse_ptr, sinks_ptr, 0, group, 0, 1, tile_m, m, d, row, head, live, inside, out_row, top,
                    total, acc, H, R, D, SINKS, False, WANT_LSE)
        else:
            _finish(part_ptr, part_lse_ptr, sinks_ptr, tile, group, 0, 1, tile_m, m, d, row, head, live, inside,
                    out_row, top, total, acc, H, R, D, SINKS, True, WANT_LSE)
    else:
        _finish(out_ptr, lse_ptr, sinks_ptr, tile, group, split, num_splits, tile_m, m, d, row, head, live, inside,
                out_row, top, total, acc,
                H, R, D, SINKS, SPLIT, WANT_LSE)


@jit
def _finish(out_ptr, lse_ptr, sinks_ptr, tile, group, split, num_splits, tile_m, m, d, row, head, live, inside, out_row,
            top, total, acc,
            H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
            WANT_LSE: tl.constexpr):
    """Normalise a tile and store it: as a partial result of its split, or for good."""
    lse = top + tl.log2(total)
    if SPLIT:
        at = (((tile.to(tl.int64) * num_splits + split) * (H // R) + group) * tile_m + m)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at[:, None] * D + d[None, :], acc, mask=live[:, None] & inside[None, :])
        tl.store(lse_ptr + at, lse, mask=live)
    else:
        if SINKS:
            top, total, acc = sink_logits(sinks_ptr, head, live, top, total, acc)
            lse = top + tl.log2(total)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out = out_ptr + row[:, None] * out_row + head[:, None] * D + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])
        if WANT_LSE:
            tl.store(lse_ptr + row * H + head, lse * 0.6931471805599453, mask=live)


@jit(do_not_specialize=["num_splits", "tile_m", "window"])
def merge_splits(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, context_ptr, row_start_ptr, tiles_ptr, out_row,
                 num_splits, tile_m, window,
                 H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
                 CHUNKED: tl.constexpr,
                 WINDOWED: tl.constexpr, TREE: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr):
    """One row and head: the splits' results, each weighted by its share of the softmax's denominator."""
    tile, group, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(tiles_ptr + tile * 2)
    local = tl.load(tiles_ptr + tile * 2 + 1) + m // R
    span_row = tl.load(row_start_ptr + span)
    length = tl.load(row_start_ptr + span + 1) - span_row
    if local < length:
        row = (span_row + local).to(tl.int64)
        head = group * R + m % R
        d = tl.arange(0, D_PAD)
        sink = -float("inf")
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        if CHUNKED > 0:  # in order, whatever the number: the sum of a tree would depend on it
            context = tl.load(context_ptr + span)
            end = context + local + 1
            first = 0
            if WINDOWED:
                first = tl.maximum(end - window, 0) // CHUNKED
            if TREE:
                end = context + length
                if WINDOWED:
                    first = tl.maximum(context + 1 - window, 0) // CHUNKED
            peak, total = -float("inf"), 0.0
            acc = tl.zeros([D_PAD], tl.float32)
            for split in range(first, tl.cdiv(end, CHUNKED)):
                at = ((tile.to(tl.int64) * num_splits + split) * (H // R) + group) * tile_m + m
                part_lse = tl.load(part_lse_ptr + at)
                part = tl.load(part_ptr + at * D + d, mask=d < D, other=0.0)
                new_peak = tl.maximum(peak, part_lse)
                base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                shrink, share = tl.exp2(peak - base), tl.exp2(part_lse - base)
                acc, total, peak = acc * shrink + part * share, total * shrink + share, new_peak
            if SINKS:
                new_peak = tl.maximum(peak, sink)
                shrink = tl.exp2(peak - new_peak)
                acc, total, peak = acc * shrink, total * shrink + tl.exp2(sink - new_peak), new_peak
        else:
            s = tl.arange(0, SPLITS_PAD)
            at = ((tile.to(tl.int64) * num_splits + s) * (H // R) + group) * tile_m + m
            part_lse = tl.load(part_lse_ptr + at, mask=s < num_splits, other=-float("inf"))
            peak = tl.maximum(tl.max(part_lse, 0), sink)
            share = tl.exp2(part_lse - peak)
            total = tl.sum(share, 0) + tl.exp2(sink - peak)
            parts = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=(share > 0.0)[:, None] & (d < D)[None, :],
                            other=0.0)
            acc = tl.sum(parts * share[:, None], 0)
        tl.store(out_ptr + row * out_row + head * D + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)
        if WANT_LSE:
            tl.store(lse_ptr + row * H + head, (peak + tl.log2(total)) * 0.6931471805599453)


# ------------------------------------------------------------------------------------------------------------- launcher


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch. ``items`` [n, 2] int32 on the device: span, first row in the span. ``max_keys``,
    ``max_rows``: the most of any span. ``exact``: a row's bits do not depend on the rest of the batch; ``max_keys`` is
    then unused."""

    items: torch.Tensor
    block_m: int
    max_keys: int
    max_rows: int
    exact: bool = False


def rows_of_small(share: int) -> int:
    """Rows of a small tile, for the ``share`` query heads of a KV head."""
    return max(SMALL_TILE, next_power_of_2(share)) // share


def block_of(length: int, share: int, dtype: torch.dtype, dim: int) -> int:
    """Rows x heads of the tiles of a launch whose longest span has ``length`` rows.

    fp32 has no tensor core of its own precision: its products live in registers, which hold small tiles only. The same
    holds for the sums of heads wider than 256.
    """
    small = max(SMALL_TILE, next_power_of_2(share))
    if length <= rows_of_small(share):
        return small
    return max(small, 32 if _narrow(dtype, dim) else 128 if length * share >= 128 else 64)


def _narrow(dtype: torch.dtype, dim: int) -> bool:
    """Whether registers hold small tiles only."""
    return dtype == torch.float32 or dim > 256


def plan_tiles(starts: list[int], lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype,
               device: torch.device | str, spans: list[int] | None = None, dim: int = 128) -> list[Tiles]:
    """Cut ``spans`` of a step (None: all) into tiles, on the host: those that fit a small tile separately from those
    that fill large ones."""
    share = heads // kv_heads
    small_rows = rows_of_small(share)
    spans = range(len(lengths)) if spans is None else spans
    small = [s for s in spans if 0 < lengths[s] <= small_rows]
    large = [s for s in spans if lengths[s] > small_rows]
    plans = []
    if small:
        plans.append((block_of(1, share, dtype, dim), [(s, 0) for s in small], small))
    if large:
        large_m = block_of(max(lengths[s] for s in large), share, dtype, dim)
        rows = large_m // share
        # The last rows of a span see the most keys: they start first, so that the launch ends together.
        items = [(s, row) for s in large for row in reversed(range(0, lengths[s], rows))]
        plans.append((large_m, items, large))
    return [Tiles(send(torch.tensor(items, dtype=torch.int32), device), block_m,
                  max(starts[s] + lengths[s] for s in chosen),
                  max(lengths[s] for s in chosen)) for block_m, items, chosen in plans]


def exact_tiles(lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device | str,
                dim: int = 128) -> list[Tiles]:
    """Tiles of one shape for every span, in the order of the rows. They do not depend on ``starts``: see ``graphs`` of
    the backend."""
    block_m = max(32 if _narrow(dtype, dim) else 64, next_power_of_2(heads // kv_heads))
    rows = block_m // (heads // kv_heads)
    items = [(s, row) for s, length in enumerate(lengths) for row in range(0, length, rows)]
    if not items:
        return []
    return [Tiles(send(torch.tensor(items, dtype=torch.int32), device), block_m, 0, max(lengths), exact=True)]


@functools.cache  # every layer asks
def _blocks(block_m: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys of a block, warps and pipeline stages, from the table of tuned numbers: nothing is searched at start-up, and
    no shape spills Hopper's registers or exceeds its shared memory."""
    return tuned.look_up(tuned.PAGED_ATTENTION.value, dtype=name_of(dtype), dim=dim, block_m=block_m)


def _num_splits(programs: int, keys: int, device: torch.device) -> int:
    """Splits of each tile's keys: enough programs for four on every multiprocessor, each with enough keys."""
    return max(1, min(4 * multiprocessors(device) // programs, keys // SPLIT_KEYS, MAX_SPLITS))


def paged_attention_triton(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_SW: torch.Tensor,
                           context_S: torch.Tensor, row_start_S: torch.Tensor, tiles: list[Tiles], scale: float,
                           out_THD: torch.Tensor, *, window: int | None = None, softcap: float | None = None,
                           sinks_H: torch.Tensor | None = None, ancestors_TA: torch.Tensor | None = None,
                           positions_T: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None,
                           num_splits: int | None = None, launches: Launches | None = None) -> None:
    """Compute ``paged_attention_ref`` for the tiles of ``plan_tiles`` into their rows of ``out`` and ``lse`` (fp32).

    ``k_NGPD``/``v_NGPD``: pages with a power of two of slots, strided by page and head. Head dims up to ``MAX_DIM``.
    """
    _, heads, dim = q_THD.shape
    _, groups, size, _ = k_NGPD.shape
    assert heads % groups == 0 and dim <= MAX_DIM and size & (size - 1) == 0, "unsupported shape"
    assert k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1), \
        "planes must be page-strided with dense slots"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1 and q_THD.dtype == k_NGPD.dtype, \
        "rows must be dense, of one dtype"
    share, dim_pad = heads // groups, max(16, next_power_of_2(dim))
    absent = q_THD  # stands in for pointers that the compiled variant never touches
    run = launches or launch
    sinks, lse = absent if sinks_H is None else sinks_H, absent if lse_TH is None else lse_TH
    for part in tiles:
        block_n, warps, stages = _blocks(part.block_m, dim_pad, q_THD.dtype)
        count, tile_m = part.items.shape[0], min(part.block_m // share, part.max_rows) * share
        keys = part.max_keys if window is None else min(part.max_keys, window + part.block_m)
        at_once = count
        if part.exact:
            splits = cdiv(table_SW.shape[1] * size, CHUNK)
            at_once = max(1, min(count, PART_BYTES // (4 * splits * groups * tile_m * (dim + 1))))
        else:
            splits = num_splits or _num_splits(count * groups, keys, q_THD.device)
        split = part.exact or splits > 1
        target, target_lse = out_THD, lse
        if split:
            target = torch.empty((at_once, splits, groups, tile_m, dim), dtype=torch.float32, device=q_THD.device)
            target_lse = torch.empty(target.shape[:-1], dtype=torch.float32, device=q_THD.device)
        flags = {"H": heads, "R": share, "D": dim, "D_PAD": dim_pad, "CHUNKED": CHUNK if part.exact else 0,
                 "WINDOWED": window is not None,
                 "TREE": ancestors_TA is not None, "SINKS": sinks_H is not None, "WANT_LSE": lse_TH is not None}
        for items in part.items.split(at_once):
            run(_paged_attention, (items.shape[0], groups, splits),
                q_THD, k_NGPD, v_NGPD, target, target_lse, sinks, table_SW, context_S, row_start_S, items,
                absent if ancestors_TA is None else ancestors_TA, absent if positions_T is None else positions_T,
                *[absent] * 5,
                q_THD.stride(0), q_THD.stride(1), k_NGPD.stride(0), k_NGPD.stride(1), out_THD.stride(0),
                table_SW.stride(0),
                0 if ancestors_TA is None else ancestors_TA.stride(0), window or 0, splits, tile_m, 0, 1, 1, scale,
                softcap or 1.0,
                P=size, BLOCK_M=part.block_m, BLOCK_N=block_n, CAPPED=softcap is not None, SPLIT=split, num_warps=warps,
                num_stages=stages, **flags)
            if split:
                run(merge_splits, (items.shape[0], groups, tile_m),
                    target, target_lse, out_THD, lse, sinks, context_S, row_start_S, items, out_THD.stride(0), splits,
                    tile_m, window or 0, SPLITS_PAD=MAX_SPLITS, num_warps=4, **flags)


# ------------------------------------------------------------------------- rows of a captured step that verifies drafts


@dataclass(frozen=True, slots=True)
class TogetherShape:
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
    def of(most: int, share: int, dim: int, dtype: torch.dtype) -> TogetherShape:
        """Shape for spans of at most ``most`` rows, with tiles as ``plan_tiles`` chooses them. ``dim``: a power of
        two."""
        small = max(SMALL_TILE, next_power_of_2(share))
        block_m = small if most <= rows_of_small(share) else max(small, 32 if _narrow(dtype, dim) else 64)
        work = tuned.look_up(tuned.DRAFT_TILES.value, block_m=block_m)
        return TogetherShape(block_m, *_blocks(block_m, dim, dtype), *work)


def chunks_of(shape: Any, groups: int, device: torch.device) -> tuple[int, int]:
    """``wave`` and ``budget`` of ``key_chunks``: at most one chunk a row, and ``budget`` more."""
    wave = max(1, shape.at_once * multiprocessors(device) // groups)
    return wave, max(wave, shape.programs * multiprocessors(device) // groups)


def together_ref(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_TW: torch.Tensor,
                 at_T: torch.Tensor, place_T: torch.Tensor, length_T: torch.Tensor, ancestors_TA: torch.Tensor,
                 positions_T: torch.Tensor, scale: float, *, window: int | None = None, softcap: float | None = None,
                 sinks_H: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged_attention_ref`` of the spans that these rows belong to."""
    firsts, starts, lengths = spans_of(at_T, place_T, length_T)
    return paged_attention_ref(q_THD, k_NGPD, v_NGPD, table_TW[firsts], starts, lengths, scale, window=window,
                               softcap=softcap, sinks_H=sinks_H,
                               ancestors_TA=ancestors_TA, positions_T=positions_T)


def spans_of(at_T: torch.Tensor, place_T: torch.Tensor,
             length_T: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """First rows, starts and lengths of the spans, on the host, of rows that stand at ``at`` in the cache, at ``place``
    in a span of ``length`` rows."""
    firsts = torch.nonzero(place_T == 0)[:, 0].tolist()
    return firsts, at_T[firsts].tolist(), length_T[firsts].tolist()


def merge_tiles(part: torch.Tensor, part_lse: torch.Tensor, cuts: torch.Tensor, place_T: torch.Tensor, rows: int,
                dim: int, sinks_H: torch.Tensor | None, out_THD: torch.Tensor, lse_TH: torch.Tensor | None) -> None:
    """Merge the chunks of every tile of ``rows`` rows: ``part`` [C, G, columns, D] fp32, ``part_lse`` [C, G, columns]
    in base 2."""
    count, heads, _ = out_THD.shape
    groups, columns = part.shape[1:3]
    share, dim_pad, warps = heads // groups, max(16, next_power_of_2(dim)), 4
    _merge_tiles[(groups, count)](
        part, part_lse, out_THD, part_lse if lse_TH is None else lse_TH, part_lse if sinks_H is None else sinks_H, cuts,
        place_T,
        out_THD.stride(0), columns, H=heads, R=share, D=dim, D_PAD=dim_pad, R_PAD=next_power_of_2(share), ROWS=rows,
        MERGE=merged_at_once(share, dim_pad, warps), SINKS=sinks_H is not None, WANT_LSE=lse_TH is not None,
        num_warps=warps)


def paged_together_triton(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_TW: torch.Tensor,
                          at_T: torch.Tensor, place_T: torch.Tensor, length_T: torch.Tensor, ancestors_TA: torch.Tensor,
                          positions_T: torch.Tensor, most: int, scale: float, out_THD: torch.Tensor, *,
                          window: int | None = None, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                          lse_TH: torch.Tensor | None = None, shape: TogetherShape | None = None) -> None:
    """Compute ``together_ref``: consecutive spans of at most ``most`` rows. The host knows nothing else about them, so
    a CUDA graph can hold the launch.

    The rows of a tile share the read of their keys. What a row sees is data: ``ancestors_TA`` as in ``StepBatch``, for
    chains, too. ``at`` [T] int32; ``place``, ``length`` [T] int64; ``table_TW``: each row's table, of which that of a
    tile's first row is read.
    """
    count, heads, dim = q_THD.shape
    groups, size = k_NGPD.shape[1], k_NGPD.shape[2]
    assert heads % groups == 0 and dim <= MAX_DIM and size & (size - 1) == 0, "unsupported shape"
    assert k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1), \
        "planes must be page-strided with dense slots"
    assert q_THD.stride(-1) == 1 and table_TW.stride(-1) == 1 and q_THD.dtype == k_NGPD.dtype, \
        "rows must be dense, of one dtype"
    share, dim_pad = heads // groups, max(16, next_power_of_2(dim))
    shape = shape or TogetherShape.of(most, share, dim_pad, q_THD.dtype)
    rows = shape.block_m // share
    wave, budget = chunks_of(shape, groups, q_THD.device)
    part = torch.empty((count + budget, groups, rows * share, dim), dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q_THD.device)
    cuts = torch.empty((count, 2), dtype=torch.int32, device=q_THD.device)
    absent = q_THD
    _paged_attention[(groups, count + budget)](
        q_THD, k_NGPD, v_NGPD, out_THD, absent if lse_TH is None else lse_TH, absent if sinks_H is None else sinks_H,
        table_TW, at_T, absent, absent,
        ancestors_TA, positions_T, part, part_lse, cuts, place_T, length_T, q_THD.stride(0), q_THD.stride(1),
        k_NGPD.stride(0), k_NGPD.stride(1),
        out_THD.stride(0), table_TW.stride(0), ancestors_TA.stride(0), window or 0, 1, rows * share, count, wave,
        budget, scale, softcap or 1.0,
        H=heads, R=share, P=size, D=dim, D_PAD=dim_pad, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        WINDOWED=window is not None,
        CAPPED=softcap is not None, SINKS=sinks_H is not None, TREE=True, SPLIT=False, CHUNKED=0,
        WANT_LSE=lse_TH is not None, ROWS=rows,
        COUNT_PAD=max(16, next_power_of_2(count)), MIN_KEYS=max(SPLIT_KEYS, shape.block_n), SHORT_KEYS=SHORT_CHUNK,
        num_warps=shape.warps,
        num_stages=shape.stages)
    merge_tiles(part, part_lse, cuts, place_T, rows, dim, sinks_H, out_THD, lse_TH)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: ``spans`` as (start, length), ``trees`` as (span, parents of its rows)."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page_slots: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    trees: tuple[tuple[int, tuple[int, ...]], ...] = ()
    splits: int = 1


def grid() -> Iterator[Case]:
    mixed = ((40, 1), (0, 5), (70, 1), (16, 23))
    yield Case(spans=())
    yield Case(spans=((0, 1),))
    yield Case(spans=((0, 0), (9, 2), (3, 0)))
    for splits in (1, 2, 5):
        yield Case(spans=((70, 1), (16, 23)), splits=splits, heads=4, kv_heads=2)
        yield Case(spans=((300, 1), (5, 1)), splits=splits, sinks=True, softcap=4.0)
    for dim in (8, 80, 96, 128, 256, 512):
        yield Case(spans=((33, 1), (5, 19)), dim=dim)
    for heads, kv_heads in ((1, 1), (3, 3), (7, 1), (12, 2), (16, 1)):
        yield Case(spans=((20, 1), (30, 3), (2, 18)), heads=heads, kv_heads=kv_heads)
    for page_slots in (32, 128):
        yield Case(spans=((150, 1), (64, 40)), page_slots=page_slots)
    for window in (1, 16, 21):
        for splits in (1, 3):
            yield Case(spans=mixed, window=window, splits=splits)
    yield Case(spans=mixed, softcap=2.0)
    yield Case(spans=mixed, sinks=True)
    yield Case(spans=mixed, window=30, softcap=3.0, sinks=True, page_slots=32, splits=2)
    for window in (None, 2, 40):
        for splits in (1, 2):
            trees = ((1, (-1, 0, 0, 1, 1, 2, 5)), (3, (-1, 0, 1)))
            yield Case(spans=((50, 1), (61, 7), (0, 20), (30, 3), (3, 2)), window=window, trees=trees, splits=splits)
    yield Case(spans=((10, 100),), trees=((0, (-1, *((i - 1) // 2 for i in range(1, 100)))),))


def together_grid() -> Iterator[Case]:
    """Chains, trees and single rows of one step, in small and in large tiles. ``splits``: chunks of long work for a
    multiprocessor."""
    small, bushy = (-1, 0, 0, 1, 1, 2, 5), (-1, *([0] * 10), *range(10))
    yield Case(spans=((0, 1),))
    yield Case(spans=((300, 3), (5, 2)), heads=4, sinks=True, softcap=4.0, splits=2)  # small tiles, several chunks
    yield Case(spans=((170, 1), (260, 9), (0, 1), (61, 7)), heads=8, kv_heads=2, trees=((3, small),))
    yield Case(spans=((70, 64), (3, 2)), heads=1, trees=((0, (-1, *((i - 1) // 2 for i in range(1, 64)))),))
    for dim in (80, 512):
        yield Case(spans=((33, 4), (5, 7)), dim=dim, trees=((1, small),))
    yield Case(spans=((120, 2), (30, 3)), heads=7)
    yield Case(spans=((20, 2), (30, 9)), heads=3, kv_heads=3, dim=8)
    for window in (1, 100):
        yield Case(spans=((150, 1), (161, 7), (0, 9)), window=window, trees=((1, small),), heads=4, splits=2)
    yield Case(spans=((233, 21),), window=90, softcap=3.0, sinks=True, page_slots=32, trees=((0, bushy),), splits=2)
