"""Attention over pages of low-rank keys and values: keys are made of their latents block by block, values never.

All KV heads of a layer share a cached latent of keys, one of values, and the token's position. A program takes one KV
head, a tile of rows x query heads of that head, and a part of the keys. For every block it multiplies the latents by
the head's up-projection, turns the keys at their stored positions, and scores them for all columns of the tile. Weights
then sum the latents of values; the caller brings these sums out of the latent by one product a head.

Keys are the rows of the products, as in ``quantized_decode``: a few query heads are the columns. Tiles and chunks of
keys are derived on the device from data alone (``key_chunks``), for single rows, chains and trees alike, so that a CUDA
graph can hold the launch. Prompts read keys and values that ``gather_lowrank_triton`` makes in bounded scratch.

A key is a pair of halves: element i of the first half turns with element i of the second, and elements without RoPE
are split between both. The codec is that of CARE's one-shot form (arXiv:2603.17946); the kernel is ours.

Bytes: keys x (K + V) x itemsize + 4 a sequence and layer, from DRAM once and from the L2 cache once a KV head. FLOPs: 2
x keys x K x G x D to make keys, and 2 x rows x keys x H x (D + V).

Legend: T rows, S spans, M rows x heads of a tile, H query heads, G KV heads, R = H / G, D head dim, K and V ranks of
the latents of keys and values, N pages or keys of a block, W pages of a table, P slots per page, Q elements that turn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvasir import tuned
from kvasir.kernels._triton import jit, next_power_of_2, tl
from kvasir.kernels.attention_tile import derived_tile, is_tree, rows_of_tile, seen_of_few
from kvasir.kernels.hardware import name_of
from kvasir.kernels.key_chunks import SHORT_CHUNK, find_tile_chunk
from kvasir.kernels.paged_attention import SPLIT_KEYS, TREE_ROWS, attend, chunks_of, merge_tiles, visible
from kvasir.kernels.rope import rotate
from kvasir.kernels.softmax_block import cap, fold_columns, sink_logits

MAX_RANK = 512  # of a latent of values: a program holds the sums of all its elements
MOST_COLUMNS = 64  # of a tile


class Latents(NamedTuple):
    """One layer's cache and matrices. ``k`` [N, 1, P, K], ``v`` [N, 1, P, V] and ``position`` [N, 1, P, 1] int32,
    strided by page; ``k_up`` [G D, K] and ``v_up`` [G, D, V] in the type of the latents; ``angles`` [positions, Q]
    fp32, cosines and then sines (None: keys do not turn)."""

    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor
    angles: torch.Tensor | None

    @property
    def turned(self) -> int:
        """Elements of a key that turn."""
        return 0 if self.angles is None else self.angles.shape[1]


def lowrank_attention_ref(
    q_THD: torch.Tensor, latents: Latents, table_SW: torch.Tensor, starts: list[int], lengths: list[int], scale: float,
    *, window: int | None = None, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
    ancestors_TA: torch.Tensor | None = None, positions_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one span after the other: sums of value latents [T, H, V] in q's dtype and the log-sum-exp [T, H].
    Reads only slots that a row sees."""
    size, (groups, dim, rank), heads = latents.k.shape[2], latents.v_up.shape, q_THD.shape[1]
    out_THV = q_THD.new_empty(len(q_THD), heads, rank)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    row = 0
    for span, (start, length) in enumerate(zip(starts, lengths)):
        rows = slice(row, row + length)
        row += length
        bits = ancestors_TA[rows] if ancestors_TA is not None and bool(ancestors_TA[rows.start].any()) else None
        low = 0 if window is None else max(0, start + 1 - window)
        at = torch.arange(low, start + length, device=q_THD.device)
        page, slot = table_SW[span, at // size].long(), at % size
        k_NGD = (latents.k[page, 0, slot] @ latents.k_up.T).view(-1, groups, dim)
        if latents.angles is not None:
            found = latents.angles[latents.position[page, 0, slot, 0].long()].view(len(at), 1, 2, -1)
            cos, sin = found.split(1, 2)
            k_NGD = rotate(k_NGD, cos, torch.cat((-sin, sin), 2))
        at_rows = None if bits is None else positions_T[rows]
        seen = visible(start, length, low, window, bits, at_rows, q_THD.device)
        q = q_THD[rows].view(length, groups, -1, dim).permute(1, 2, 0, 3)  # [G, R, L, D]
        sinks = None if sinks_H is None else sinks_H.view(groups, -1, 1)
        k, v = k_NGD.transpose(0, 1).unsqueeze(1), latents.v[page, 0, slot].expand(groups, 1, -1, -1)
        out, lse = attend(q, k, v, scale, seen, softcap, sinks)
        out_THV[rows] = out.permute(2, 0, 1, 3).flatten(1, 2)
        lse_TH[rows] = lse.permute(2, 0, 1).flatten(1)
    return out_THV, lse_TH


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _halves(i, D: tl.constexpr, Q: tl.constexpr):
    """Elements of a head that are number ``i`` of its first and of its second half."""
    return tl.where(i < Q // 2, i, i + Q // 2), tl.where(i < Q // 2, i + Q // 2, i + D // 2)


@jit
def _weights(up_ptr, columns, live, r0, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Elements [RANK_BLOCK, columns] of an up-projection whose rows are ``columns``."""
    r = r0 + tl.arange(0, RANK_BLOCK)
    return tl.load(up_ptr + columns[None, :] * RANK + r[:, None], mask=live[None, :] & (r < RANK)[:, None], other=0.0)


@jit
def _latents(ptr, at, held, r0, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Elements [N, RANK_BLOCK] of the latents that begin at ``at`` [N]."""
    r = r0 + tl.arange(0, RANK_BLOCK)
    return tl.load(ptr + at[:, None] + r[None, :], mask=held[:, None] & (r < RANK)[None, :], other=0.0)


@jit
def _turn(first, second, angles_ptr, position, held, i, num_positions, Q: tl.constexpr, dtype: tl.constexpr):
    """Both halves of keys, turned at their positions. They are rounded to ``dtype`` before and after, as the codec's
    read rounds them. Slots that were never written may hold any position."""
    first, second = first.to(dtype), second.to(dtype)
    if Q > 0:
        turns = held[:, None] & (i < Q // 2)[None, :]
        at = tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64)[:, None] * Q + i[None, :]
        cos = tl.load(angles_ptr + at, mask=turns, other=1.0)
        sin = tl.load(angles_ptr + at + Q // 2, mask=turns, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    return first, second


@jit(do_not_specialize=["table_row", "words", "window", "count", "wave", "budget", "num_positions"],
     do_not_specialize_on_alignment=["place_ptr", "length_ptr"])
def _lowrank_rows(
        q_ptr, k_ptr, v_ptr, position_ptr, up_ptr, angles_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, at_ptr,
        ancestors_ptr, positions_ptr, part_ptr, part_lse_ptr, cuts_ptr, place_ptr, length_ptr,
        q_row, q_head, k_page, v_page, position_page, out_row, table_row, words, window, count, wave, budget,
        num_positions, scale, softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, Q: tl.constexpr,
        K: tl.constexpr, K_BLOCK: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr,
        WANT_LSE: tl.constexpr, ROWS: tl.constexpr, COUNT_PAD: tl.constexpr, MIN_KEYS: tl.constexpr,
        SHORT_KEYS: tl.constexpr):
    """One tile of ROWS rows, one KV head, one chunk of the tile's keys, as in ``paged_together_triton``. Scores are
    [keys, M], sums [V, M]. Only slots below the span's end are loaded; the others may hold NaN."""
    group, tile = tl.program_id(0), tl.program_id(1)
    span, begun, parts, chunk = find_tile_chunk(tile, at_ptr, place_ptr, length_ptr, count, wave, budget, window, ROWS,
                                                BLOCK_N, COUNT_PAD, MIN_KEYS, SHORT_KEYS, WINDOWED)
    if span >= count:
        return
    first_row, context, span_row, length = derived_tile(span, tile, begun, parts, at_ptr, place_ptr, length_ptr,
                                                        cuts_ptr)
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    i = tl.arange(0, HALF_PAD)
    r = tl.arange(0, V_PAD)
    local, head, live, row = rows_of_tile(m, group, first_row, span_row, length, R, BLOCK_M)
    half = i < D // 2
    one, other = _halves(i, D, Q)

    tree, kin = is_tree(ancestors_ptr, span_row, words, TREE), None
    if TREE:
        kin = tl.load(ancestors_ptr + row * words, mask=live, other=0)  # the row and its ancestors, a bit each
    end = context + tl.minimum(first_row + ROWS, length)
    at_m = context + local
    low = 0
    if TREE:  # noqa: SIM102  (compile time, then run time)
        if tree:
            end = context + length
            at_m = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int32)
    if WINDOWED:  # for a tree, the root's row is the one that sees furthest back
        low = tl.maximum(context + 1 + tl.where(tree, 0, first_row) - window, 0)
    start = (low // BLOCK_N) * BLOCK_N + (tile - begun) * chunk
    stop = tl.minimum(start + chunk, end)

    q_at = q_ptr + row[:, None] * q_row + head[:, None] * q_head
    mine = live[:, None] & half[None, :]
    q1 = tl.trans(tl.load(q_at + one[None, :], mask=mine, other=0.0))
    q2 = tl.trans(tl.load(q_at + other[None, :], mask=mine, other=0.0))
    up = up_ptr + group.to(tl.int64) * (D * K)
    if K_BLOCK >= K:  # the whole up-projection of this head stays on the multiprocessor
        w1, w2 = _weights(up, one, half, 0, K, K_BLOCK), _weights(up, other, half, 0, K, K_BLOCK)
    acc = tl.zeros([V_PAD, BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = table_ptr + span.to(tl.int64) * table_row
    factor = scale * 1.4426950408889634
    # Page ids are fetched a block ahead and carried, as in ``decode_attention``; so are the positions.
    pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
    position = tl.load(position_ptr + pages.to(tl.int64) * position_page + (start + n) % P, mask=start + n < stop,
                       other=0)
    for j0 in range(start, stop, BLOCK_N):
        j = j0 + n
        held = (j >= low) & (j < stop)
        page, slot = pages.to(tl.int64), j % P
        at_k = page * k_page + slot * K
        at_v = page * v_page + slot * V
        v = tl.load(v_ptr + at_v[None, :] + r[:, None], mask=held[None, :] & (r < V)[:, None], other=0.0)  # as columns
        if K_BLOCK >= K:
            c = _latents(k_ptr, at_k, held, 0, K, K_BLOCK)
            k1 = tl.dot(c, w1, input_precision="ieee")
            k2 = tl.dot(c, w2, input_precision="ieee")
        else:
            k1 = tl.zeros([BLOCK_N, HALF_PAD], tl.float32)
            k2 = tl.zeros([BLOCK_N, HALF_PAD], tl.float32)
            for r0 in range(0, K, K_BLOCK):
                c = _latents(k_ptr, at_k, held, r0, K, K_BLOCK)
                k1 = tl.dot(c, _weights(up, one, half, r0, K, K_BLOCK), k1, input_precision="ieee")
                k2 = tl.dot(c, _weights(up, other, half, r0, K, K_BLOCK), k2, input_precision="ieee")
        k1, k2 = _turn(k1, k2, angles_ptr, position, held, i, num_positions, Q, dtype)
        s = tl.dot(k1, q1, input_precision="ieee")
        s = tl.dot(k2, q2, s, input_precision="ieee")
        after = j + BLOCK_N
        pages = tl.load(table + after // P, mask=after < stop, other=0)
        position = tl.load(position_ptr + pages.to(tl.int64) * position_page + after % P, mask=after < stop, other=0)
        if CAPPED:
            s = cap(s, s * (scale / softcap), softcap) * 1.4426950408889634
        else:
            s = s * factor
        seen = seen_of_few(j, held, tree, kin, at_m, context, span_row, local, window, positions_ptr, TREE, WINDOWED)
        s = tl.where(seen, s, -float("inf"))
        top, p, shrink, total = fold_columns(s, top, total)
        acc = tl.dot(v, p.to(dtype), acc * shrink[None, :], input_precision="ieee")

    peak, whole = top, total
    if SINKS and parts == 1:  # of several chunks, whoever merges them adds it
        peak, whole, _ = sink_logits(sinks_ptr, head, live, top, total, top[:, None])
    share = tl.where(total == 0.0, 0.0, tl.exp2(top - peak) / tl.where(total == 0.0, 1.0, whole))
    acc = acc * share[None, :]
    lse = peak + tl.log2(whole)
    keep = live[None, :] & (r < V)[:, None]
    if parts > 1:
        at_part = (tile.to(tl.int64) * (H // R) + group) * (ROWS * R) + m
        tl.store(part_ptr + at_part[None, :] * V + r[:, None], acc, mask=keep)
        tl.store(part_lse_ptr + at_part, lse, mask=live)
    else:
        tl.store(out_ptr + (row * out_row + head * V)[None, :] + r[:, None], acc.to(out_ptr.dtype.element_ty),
                 mask=keep)
        if WANT_LSE:
            tl.store(lse_ptr + row * H + head, lse * 0.6931471805599453, mask=live)


@jit(do_not_specialize=["table_row", "slots", "first_group", "window", "num_positions"])
def _gather_lowrank(k_ptr, v_ptr, position_ptr, k_up_ptr, v_up_ptr, angles_ptr, k_out, v_out, table_ptr, context_ptr,
                    row_start_ptr, spans_ptr, k_page, v_page, position_page, table_row, slots, first_group, window,
                    num_positions,
                    P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HALF_PAD: tl.constexpr, Q: tl.constexpr,
                    K: tl.constexpr, V: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """One block of slots of one span and KV head: latents -> turned keys and values [G, slots, D]. Slots past the
    span's end become zeros; blocks that its first row does not see (``window``; 0: none) are left out."""
    block, group, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(spans_ptr + place * 2)
    context = tl.load(context_ptr + span)
    end = context + tl.load(row_start_ptr + span + 1) - tl.load(row_start_ptr + span)
    low = tl.where(window > 0, context + 1 - window, 0)
    if (block * BLOCK < end) & ((block + 1) * BLOCK > low):
        j = block * BLOCK + tl.arange(0, BLOCK)
        held = j < end
        page = tl.load(table_ptr + span.to(tl.int64) * table_row + j // P, mask=held, other=0).to(tl.int64)
        slot = j % P
        head = (first_group + group).to(tl.int64)
        i = tl.arange(0, HALF_PAD)
        half = i < D // 2
        one, other = _halves(i, D, Q)
        up = k_up_ptr + head * (D * K)
        k1 = tl.zeros([BLOCK, HALF_PAD], tl.float32)
        k2 = tl.zeros([BLOCK, HALF_PAD], tl.float32)
        for r0 in range(0, K, RANK_BLOCK):
            c = _latents(k_ptr, page * k_page + slot * K, held, r0, K, RANK_BLOCK)
            k1 = tl.dot(c, _weights(up, one, half, r0, K, RANK_BLOCK), k1, input_precision="ieee")
            k2 = tl.dot(c, _weights(up, other, half, r0, K, RANK_BLOCK), k2, input_precision="ieee")
        position = tl.load(position_ptr + page * position_page + slot, mask=held, other=0)
        k1, k2 = _turn(k1, k2, angles_ptr, position, held, i, num_positions, Q, k_out.dtype.element_ty)
        target = ((group.to(tl.int64) * slots + tl.load(spans_ptr + place * 2 + 1) + j) * D)[:, None]
        tl.store(k_out + target + one[None, :], k1, mask=half[None, :])
        tl.store(k_out + target + other[None, :], k2, mask=half[None, :])
        d = tl.arange(0, D_PAD)
        value = tl.zeros([BLOCK, D_PAD], tl.float32)
        for r0 in range(0, V, RANK_BLOCK):
            c = _latents(v_ptr, page * v_page + slot * V, held, r0, V, RANK_BLOCK)
            w = _weights(v_up_ptr + head * (D * V), d, d < D, r0, V, RANK_BLOCK)
            value = tl.dot(c, w, value, input_precision="ieee")
        tl.store(v_out + target + d[None, :], value.to(v_out.dtype.element_ty), mask=(d < D)[None, :])


# ------------------------------------------------------------------------------------------------------------ launchers


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel for tiles of ``block_m`` columns. ``k_block``: elements of a latent that one
    product takes. ``at_once``: programs that fit on a multiprocessor; ``programs``: chunks of long work for each."""

    block_m: int
    block_n: int
    k_block: int
    warps: int
    stages: int
    at_once: int
    programs: int

    @staticmethod
    @functools.cache  # every layer asks
    def of(block_m: int, rank: int, dtype: torch.dtype) -> Shape:
        """Shape from the table of tuned numbers. ``rank``: the larger of both, a power of two."""
        found = tuned.look_up(tuned.LOWRANK_ATTENTION.value, dtype=name_of(dtype), rank=rank, block_m=block_m)
        return Shape(block_m, *found)


def padded(rank: int) -> int:
    """The width that the kernel computes with, for latents of this rank."""
    return max(16, next_power_of_2(rank))


def block_of(most: int, share: int) -> int:
    """Columns of a tile of spans of at most ``most`` rows, for the ``share`` query heads of a KV head."""
    return max(16, next_power_of_2(share), min(MOST_COLUMNS, next_power_of_2(most * share)))


def _checked(latents: Latents, dtype: torch.dtype) -> None:
    planes = latents.k, latents.v, latents.position
    size = latents.k.shape[2]
    assert size & (size - 1) == 0 and latents.v_up.shape[1] % 2 == 0, "unsupported shape"
    assert all(x.stride()[2:] == (x.shape[3], 1) for x in planes), "planes must have dense slots"
    assert latents.k.dtype == latents.v.dtype == latents.k_up.dtype == latents.v_up.dtype == dtype, "one type"
    assert latents.k_up.is_contiguous() and latents.v_up.is_contiguous(), "matrices must be dense"


def lowrank_rows_triton(
    q_THD: torch.Tensor, latents: Latents, table_TW: torch.Tensor, at_T: torch.Tensor, place_T: torch.Tensor,
    length_T: torch.Tensor, most: int, scale: float, out_THV: torch.Tensor, *, window: int | None = None,
    softcap: float | None = None, sinks_H: torch.Tensor | None = None, ancestors_TA: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None, shape: Shape | None = None,
) -> None:  # fmt: skip
    """Compute ``lowrank_attention_ref`` for consecutive spans of at most ``most`` rows, of which the host knows nothing
    else, into ``out`` [T, H, V] and ``lse`` (fp32).

    Row t stands at ``at`` [T] int32 in the cache and at ``place`` in a span of ``length`` rows (both [T] int64), with a
    table of its own, of which that of a tile's first row is read. ``ancestors_TA``: as in ``StepBatch``, for chains,
    too; None: spans are causal.
    """
    _checked(latents, q_THD.dtype)
    (count, heads, dim), device = q_THD.shape, q_THD.device
    groups, _, rank = latents.v_up.shape
    k_rank, size = latents.k.shape[3], latents.k.shape[2]
    assert heads % groups == 0 and rank <= MAX_RANK and most <= TREE_ROWS, "unsupported shape"
    assert q_THD.stride(-1) == 1 and table_TW.stride(-1) == 1 and out_THV.stride(1) == rank, "rows must be dense"
    share = heads // groups
    shape = shape or Shape.of(block_of(most, share), padded(max(rank, k_rank)), q_THD.dtype)
    rows = shape.block_m // share
    wave, budget = chunks_of(shape, groups, device)
    part = torch.empty((count + budget, groups, rows * share, rank), dtype=torch.float32, device=device)
    part_lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=device)
    cuts = torch.empty((count, 2), dtype=torch.int32, device=device)
    absent, tree = q_THD, ancestors_TA is not None  # absent: a pointer that the compiled variant never touches
    angles = latents.angles
    _lowrank_rows[(groups, count + budget)](
        q_THD, latents.k, latents.v, latents.position, latents.k_up, absent if angles is None else angles, out_THV,
        absent if lse_TH is None else lse_TH, absent if sinks_H is None else sinks_H, table_TW, at_T,
        ancestors_TA if tree else absent, positions_T if tree else absent, part, part_lse, cuts, place_T, length_T,
        q_THD.stride(0), q_THD.stride(1), latents.k.stride(0), latents.v.stride(0), latents.position.stride(0),
        out_THV.stride(0), table_TW.stride(0), ancestors_TA.stride(0) if tree else 0, window or 0, count, wave, budget,
        1 if angles is None else angles.shape[0], scale, softcap or 1.0, H=heads, R=share, P=size, D=dim,
        HALF_PAD=max(16, next_power_of_2(dim // 2)), Q=latents.turned, K=k_rank,
        K_BLOCK=min(shape.k_block, padded(k_rank)), V=rank, V_PAD=padded(rank), BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, WINDOWED=window is not None, CAPPED=softcap is not None, SINKS=sinks_H is not None,
        TREE=tree, WANT_LSE=lse_TH is not None, ROWS=rows, COUNT_PAD=max(16, next_power_of_2(count)),
        MIN_KEYS=max(SPLIT_KEYS, shape.block_n), SHORT_KEYS=SHORT_CHUNK, num_warps=shape.warps,
        num_stages=shape.stages)  # fmt: skip
    merge_tiles(part, part_lse, cuts, place_T, rows, rank, sinks_H, out_THV, lse_TH)


def gather_lowrank_triton(
    latents: Latents, k_GLD: torch.Tensor, v_GLD: torch.Tensor, table_SW: torch.Tensor, context_S: torch.Tensor,
    row_start_S: torch.Tensor, spans: torch.Tensor, blocks: int, block: int, first_group: int,
    window: int | None = None,
) -> None:  # fmt: skip
    """Make keys, turned, and values of ``spans``: as ``gather_codes_triton``."""
    _checked(latents, k_GLD.dtype)
    dim, angles = k_GLD.shape[2], latents.angles
    _gather_lowrank[(blocks, k_GLD.shape[0], spans.shape[0])](
        latents.k, latents.v, latents.position, latents.k_up, latents.v_up, latents.k if angles is None else angles,
        k_GLD, v_GLD, table_SW, context_S, row_start_S, spans, latents.k.stride(0), latents.v.stride(0),
        latents.position.stride(0), table_SW.stride(0), k_GLD.shape[1], first_group, window or 0,
        1 if angles is None else angles.shape[0], P=latents.k.shape[2], D=dim, D_PAD=max(16, next_power_of_2(dim)),
        HALF_PAD=max(16, next_power_of_2(dim // 2)), Q=latents.turned, K=latents.k.shape[3], V=latents.v.shape[3],
        RANK_BLOCK=64 if k_GLD.dtype != torch.float32 else 32, BLOCK=block, num_warps=4,
        num_stages=3 if k_GLD.dtype != torch.float32 else 1)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: ``spans`` as (start, length), ``trees`` as (span, parents of its rows), ``ranks`` of
    keys and values. ``turned``: elements of a key that turn. ``splits``: chunks of long work for a multiprocessor."""

    spans: tuple[tuple[int, int], ...]
    ranks: tuple[int, int] = (32, 32)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    turned: int = 32
    page_slots: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    trees: tuple[tuple[int, tuple[int, ...]], ...] = ()
    splits: int = 1
    k_block: int | None = None  # None: as chosen


def grid() -> Iterator[Case]:
    small = (-1, 0, 0, 1, 1, 2, 5)
    mixed = ((70, 1), (16, 1), (0, 1), (130, 1))
    yield Case(spans=((0, 1),))
    for ranks, page_slots in (((96, 32), 64), ((160, 96), 16), ((256, 256), 64), ((32, 160), 16)):
        yield Case(spans=mixed, ranks=ranks, page_slots=page_slots, splits=3)
    yield Case(spans=mixed, ranks=(160, 32), k_block=64, splits=2)
    for dim, turned in ((80, 80), (64, 16), (32, 0), (128, 128)):
        yield Case(spans=((90, 1), (3, 2)), dim=dim, turned=turned)
    for heads, kv_heads in ((1, 1), (7, 1), (12, 2), (20, 1)):
        yield Case(spans=((40, 2), (70, 1)), heads=heads, kv_heads=kv_heads, splits=2)
    yield Case(spans=((120, 4), (61, 7), (0, 2), (33, 1)), trees=((1, small),), splits=2)
    yield Case(spans=((100, 16), (3, 9)), page_slots=64, splits=2)
    yield Case(spans=((130, 3), (5, 1)), softcap=4.0, sinks=True, splits=3)
    for window in (2, 40):
        yield Case(spans=((50, 2), (161, 7), (0, 4)), window=window, trees=((1, small),), splits=2)
