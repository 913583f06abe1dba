"""The tile that one program of an attention kernel computes: its rows, its keys, and the keys that a row sees.

The attention kernels share these steps, which the compiler makes part of the kernel that calls them. What rows and keys
hold is the kernel's own matter.

Legend: M rows x heads of a tile, N keys of a block, R query heads that share a KV head, P slots per page.
"""

from __future__ import annotations

from kvasir.kernels._triton import jit, tl


@jit
def planned_tile(item_ptr, context_ptr, row_start_ptr):
    """Load a tile of the host's plan: its span, its first row in the span, and what ``planned_span`` says of the
    span."""
    span = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    context, span_row, length = planned_span(span, context_ptr, row_start_ptr)
    return span, first_row, context, span_row, length


@jit
def planned_span(span, context_ptr, row_start_ptr):
    """Load a span's context, its first row in the step, and its length."""
    context = tl.load(context_ptr + span)
    span_row = tl.load(row_start_ptr + span)
    return context, span_row, tl.load(row_start_ptr + span + 1) - span_row


@jit
def derived_tile(row, tile, first, parts, at_ptr, place_ptr, length_ptr, cuts_ptr):
    """Return what ``planned_tile`` does, except the span, for a tile that the device found (``find_tile_chunk``), which
    is known by its first row in the step. Store its cuts for the kernel that merges its chunks."""
    if tile == first:  # of every KV head alike
        tl.store(cuts_ptr + row * 2, first)
        tl.store(cuts_ptr + row * 2 + 1, parts)
    first_row = tl.load(place_ptr + row).to(tl.int32)
    context = tl.load(at_ptr + row) - first_row
    return first_row, context, row - first_row, tl.load(length_ptr + row).to(tl.int32)


@jit
def rows_of_tile(m, group, first_row, span_row, length, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Locate each place ``m`` of a tile: the row's place in its span, the query head, whether there is such a row, and
    the row in the step."""
    local = first_row + m // R
    head = group * R + m % R
    live = (m < (BLOCK_M // R) * R) & (local < length)
    return local, head, live, (span_row + local).to(tl.int64)


@jit
def is_tree(ancestors_ptr, span_row, words, TREE: tl.constexpr):
    """Whether the span that begins at ``span_row`` is a tree."""
    tree = False
    if TREE:  # any bit in the span's first row: a causal span of a step with trees has none
        tree = tl.load(ancestors_ptr + span_row.to(tl.int64) * words) != 0
    return tree


@jit
def keys_of_tile(tile, split, num_splits, first, chunk, tree, first_row, context, length, local, row, live, window,
                 positions_ptr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TREE: tl.constexpr,
                 WINDOWED: tl.constexpr, SPLIT: tl.constexpr, CHUNKED: tl.constexpr, ROWS: tl.constexpr):
    """Find the program's keys: the positions [M] that the rows' windows count from, the lowest key that a row sees, the
    key below which all rows see all keys, and the keys [start, stop) of this chunk or split. Only windows over trees
    need ``positions``."""
    end = context + tl.minimum(first_row + BLOCK_M // R, length)
    full = context + first_row + 1
    at_m = context + local
    low = 0
    if TREE:  # noqa: SIM102  (compile time, then run time)
        if tree:
            end = context + length
            full = context
            if WINDOWED:
                at_m = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int32)
    if WINDOWED:
        low = tl.maximum(full - window, 0)  # for a tree, the root's row is the one that sees furthest back
        if TREE:
            low = tl.where(tree, tl.maximum(context + 1 - window, 0), low)
    start = (low // BLOCK_N) * BLOCK_N
    stop = end
    if ROWS > 0:
        start += (tile - first) * chunk
        stop = tl.minimum(start + chunk, end)
    elif CHUNKED > 0:
        start = tl.maximum(start, split * CHUNKED)
        stop = tl.minimum((split + 1) * CHUNKED, end)
    elif SPLIT:
        share = tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_splits) * BLOCK_N
        start = start + split * share
        stop = tl.minimum(start + share, end)
    return at_m, low, full, start, stop


@jit
def load_pages(table, j0, j, stop, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page ids of the keys ``j`` [N] from ``j0`` on; one id for all, where a block lies in one page."""
    if BLOCK_N <= P:
        pages = tl.load(table + j0 // P, mask=j0 < stop, other=0)
    else:
        pages = tl.load(table + j // P, mask=j < stop, other=0)
    return pages


@jit
def seen_keys(j, held, tree, at_m, context, span_row, local, row, live, window, words, ancestors_ptr, positions_ptr,
              TREE: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask [M, N] of the keys ``j`` that each row sees: those up to the row itself, or in a tree the context and the
    row's ancestors, within its window."""
    at_n = j
    seen = held[None, :] & (j[None, :] <= (context + local)[:, None])
    if TREE:  # noqa: SIM102
        if tree:
            i = j - context  # the key's row in the span; negative: context
            drafted = held & (i >= 0)
            word = tl.load(ancestors_ptr + row[:, None] * words + (i // 64)[None, :],
                           mask=live[:, None] & drafted[None, :], other=0)
            bit = tl.where(drafted, i % 64, 0).to(tl.int64)
            seen = held[None, :] & ((i < 0)[None, :] | (((word >> bit[None, :]) & 1) != 0))
            if WINDOWED:
                at_n = tl.load(positions_ptr + span_row + i, mask=drafted, other=0).to(tl.int32)
                at_n = tl.where(drafted, at_n, j)
    if WINDOWED:
        seen = seen & (at_n[None, :] > at_m[:, None] - window)
    return seen


@jit
def seen_of_few(j, held, tree, kin, at_m, context, span_row, local, window, positions_ptr, TREE: tl.constexpr,
                WINDOWED: tl.constexpr):
    """Mask [N, M] of the keys that each row sees, as ``seen_keys`` makes it, for spans of at most 64 rows. ``kin`` [M]
    holds a row and its ancestors, a bit each."""
    at_n = j
    seen = held[:, None] & (j[:, None] <= (context + local)[None, :])
    if TREE:  # noqa: SIM102
        if tree:
            i = j - context  # the key's row in the span; negative: context
            bit = tl.maximum(i, 0).to(tl.int64)
            seen = held[:, None] & ((i < 0)[:, None] | (((kin[None, :] >> bit[:, None]) & 1) != 0))
            if WINDOWED:
                drafted = held & (i >= 0)
                at_n = tl.where(drafted, tl.load(positions_ptr + span_row + i, mask=drafted, other=0).to(tl.int32), j)
    if WINDOWED:
        seen = seen & (at_n[:, None] > at_m[None, :] - window)
    return seen
