"""Cutting the keys of a step of single rows into chunks, and merging the chunks' results. The decode kernels share it.

The device derives the length of a chunk from the contexts alone. Short work is cut into as many chunks as the GPU runs
at once (``wave``); long work into several times as many (``budget``), so that the last ones end together. Sequences of
nearly one length that fill the GPU stay whole: a chunk costs about as much as reading a hundred keys. A sequence's
chunks start at a block. The program that arrives last merges a sequence's partial results, always in the order of the
keys.

The rows of a span that verifies drafts share the read of its keys. There the keys of a *tile* of such rows are cut, and
another kernel merges, since one program would have too many rows to merge.

Legend: B single rows, C chunks, H query heads, G KV heads, R = H / G, D head dim.
"""

from __future__ import annotations

from kvasir import tuned
from kvasir.kernels._triton import jit, next_power_of_2, tl
from kvasir.kernels.softmax_block import sink_logits

MIN_CHUNK, SHORT_CHUNK = tuned.MIN_CHUNK.value, tuned.SHORT_CHUNK.value  # keys
MERGED_ELEMENTS = 64  # of partial results that a thread of the merging program holds at a time, in registers


def merged_at_once(share: int, dim_pad: int, warps: int) -> int:
    """Chunks that ``merge_chunks`` holds at a time, for the ``share`` = R query heads of a KV head."""
    return max(1, min(32, MERGED_ELEMENTS * 32 * warps // (next_power_of_2(share) * dim_pad)))


@jit
def find_chunk(item, context_ptr, spans_ptr, count, wave, budget, window, BLOCK_N: tl.constexpr,
               COUNT_PAD: tl.constexpr,
               MIN_KEYS: tl.constexpr, SHORT_KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Locate chunk ``item``: its row among the ``count`` single rows (``count``: there is no such chunk), the row's
    first chunk, its number of chunks, and the keys of a chunk."""
    b = tl.arange(0, COUNT_PAD)
    ends = tl.load(context_ptr + tl.load(spans_ptr + b, mask=b < count, other=0), mask=b < count, other=-1) + 1
    keys = ends
    if WINDOWED:
        keys = ends - tl.maximum(ends - window, 0) // BLOCK_N * BLOCK_N
    return cut_keys(item, b, keys, count, count, wave, budget, BLOCK_N, MIN_KEYS, SHORT_KEYS)


@jit
def find_tile_chunk(item, at_ptr, place_ptr, length_ptr, count, wave, budget, window, ROWS: tl.constexpr,
                    BLOCK_N: tl.constexpr,
                    COUNT_PAD: tl.constexpr, MIN_KEYS: tl.constexpr, SHORT_KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Locate chunk ``item`` as ``find_chunk`` does, for tiles of up to ``ROWS`` rows of one span, known by their first
    rows. The ``count`` rows of a step stand at ``at`` in the cache, at ``place`` in a span of ``length`` rows. Every
    tile of a span reads to the span's end."""
    b = tl.arange(0, COUNT_PAD)
    place = tl.load(place_ptr + b, mask=b < count, other=0).to(tl.int32)
    length = tl.load(length_ptr + b, mask=b < count, other=0).to(tl.int32)
    context = tl.load(at_ptr + b, mask=b < count, other=0) - place
    begins = (place % ROWS == 0) & (length > 0)
    keys = context + length
    if WINDOWED:  # the span's first row is the one that sees furthest back
        keys -= tl.maximum(context + 1 - window, 0) // BLOCK_N * BLOCK_N
    tiles = tl.sum(begins.to(tl.int32), 0)
    return cut_keys(item, b, tl.where(begins, keys, 0), count, tiles, wave, budget, BLOCK_N, MIN_KEYS, SHORT_KEYS)


@jit
def cut_keys(item, b, keys, count, readers, wave, budget, BLOCK_N: tl.constexpr, MIN_KEYS: tl.constexpr,
             SHORT_KEYS: tl.constexpr):
    """Cut the ``keys`` of places ``b`` < ``count``, of which ``readers`` have any: see ``find_chunk``."""
    total_keys = tl.sum(keys, 0)
    short = tl.cdiv(total_keys, wave)
    chunk = tl.maximum(tl.where(short <= SHORT_KEYS, short, tl.cdiv(total_keys, budget)), MIN_KEYS)
    longest = tl.max(keys, 0)
    # cutting would cost more than it evens out
    whole = (longest * 4 <= chunk * 5) | ((readers <= wave) & (longest * 2 <= short * 3))
    chunk = tl.cdiv(tl.where(whole, longest, chunk), BLOCK_N) * BLOCK_N
    chunks = tl.cdiv(keys, chunk)
    after = tl.cumsum(chunks, 0)
    which = tl.minimum(tl.sum((after <= item).to(tl.int32), 0), count)
    first = tl.sum(tl.where(after <= item, chunks, 0), 0)
    parts = tl.sum(tl.where(b == which, chunks, 0), 0)
    return which, first, parts, chunk


@jit
def keys_of(which, place, chunk, context_ptr, row_start_ptr, spans_ptr, window, BLOCK_N: tl.constexpr,
            WINDOWED: tl.constexpr):
    """Span, row, lowest visible key, first key and end of chunk number ``place`` of a row."""
    span = tl.load(spans_ptr + which)
    end = tl.load(context_ptr + span) + 1
    row = tl.load(row_start_ptr + span).to(tl.int64)
    low = 0
    if WINDOWED:
        low = tl.maximum(end - window, 0)
    start = low // BLOCK_N * BLOCK_N + place * chunk
    return span, row, low, start, tl.minimum(start + chunk, end)


@jit
def arrive(part_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, sinks_ptr, which, first, parts, row, group, out_row,
           H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R_PAD: tl.constexpr,
           MERGE: tl.constexpr,
           SINKS: tl.constexpr, WANT_LSE: tl.constexpr):
    """Count a chunk as done, once its partial results are stored (``part`` [C, G, R, D] fp32, ``part_lse`` [C, G, R] in
    base 2). The last chunk of a row to arrive merges them."""
    tl.debug_barrier()  # every thread's stores come before the arrival, which releases them to the last one
    counter = arrived_ptr + which * (H // R) + group
    if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        tl.store(counter, 0)
        merge_chunks(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first, parts, row, group, 0, R, out_row,
                     H, R, D, D_PAD, R_PAD, MERGE, SINKS, WANT_LSE)


@jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["place_ptr"])
def _merge_tiles(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, cuts_ptr, place_ptr, out_row, columns,
                 H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R_PAD: tl.constexpr,
                 ROWS: tl.constexpr,
                 MERGE: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr):
    """Merge the chunks of one row's tile, for one KV head. ``cuts`` [T, 2] int32 holds, for every tile's first row, its
    first chunk and their number; ``part`` [C, G, columns, D] fp32. A tile of one chunk has been written directly."""
    group, row = tl.program_id(0), tl.program_id(1)
    local = tl.load(place_ptr + row).to(tl.int32) % ROWS
    first = tl.load(cuts_ptr + 2 * (row - local))
    parts = tl.load(cuts_ptr + 2 * (row - local) + 1)
    if parts > 1:
        merge_chunks(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first, parts, row.to(tl.int64), group,
                     local * R, columns, out_row, H, R, D, D_PAD, R_PAD, MERGE, SINKS, WANT_LSE)


@jit
def merge_chunks(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first, parts, row, group, column, columns,
                 out_row,
                 H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R_PAD: tl.constexpr,
                 MERGE: tl.constexpr,
                 SINKS: tl.constexpr, WANT_LSE: tl.constexpr):
    """Merge the chunks ``first .. first + parts`` of one row and KV head, each weighted by its share of the
    denominator. The row's heads begin at ``column`` of the ``columns`` of a chunk."""
    c, r, d = tl.arange(0, MERGE), tl.arange(0, R_PAD), tl.arange(0, D_PAD)
    head = group * R + r
    live = r < R
    top = tl.full([R_PAD], -float("inf"), tl.float32)
    total = tl.zeros([R_PAD], tl.float32)
    acc = tl.zeros([R_PAD, D_PAD], tl.float32)
    for c0 in range(0, parts, MERGE):
        held = ((c0 + c) < parts)[:, None] & live[None, :]
        at = ((first + c0 + c).to(tl.int64)[:, None] * (H // R) + group) * columns + column + r[None, :]
        lse = tl.load(part_lse_ptr + at, mask=held, other=-float("inf"))
        part = tl.load(part_ptr + at[:, :, None] * D + d[None, None, :], mask=held[:, :, None] & (d < D)[None, None, :],
                       other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        # the others of a tile may see keys that this row does not
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        share = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        total = total * shrink + tl.sum(share, 0)
        top = new_top
    if SINKS:
        top, total, acc = sink_logits(sinks_ptr, head, live, top, total, acc)
    out = acc / tl.where(live, total, 1.0)[:, None]
    tl.store(out_ptr + row * out_row + head[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty),
             mask=live[:, None] & (d < D)[None, :])
    if WANT_LSE:
        tl.store(lse_ptr + row * H + head, (top + tl.log2(total)) * 0.6931471805599453, mask=live)
