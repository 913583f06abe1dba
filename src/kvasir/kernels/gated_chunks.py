"""The gated delta rule over long spans: ``CHUNK`` rows at once, in the WY form of Yang et al. 2024 (arXiv:2412.06464).

Five launches. Two bring what the rows of every chunk need to one place: queries, keys and values after their
convolution, then decays and write strengths. The third one compares the rows of a chunk, block by block. The fourth one
solves each chunk of each head by itself: the rows of a chunk read what earlier rows of it write, which is a unit lower
triangular system. The last one walks the chunks of a span and carries the state. Programs of the others do not depend
on each other; those of the last share neither heads nor blocks of values.

A chunk ends at an absolute multiple of ``CHUNK``, so a prompt that is cut there gives the same bits. The rows between
the position of a state and the start of its span are computed again, from the look-ahead slots. A place in a chunk that
has no row changes nothing: its key and its write strength are zero.

With a decay for each channel of a key (Kimi Delta Attention), rows of different blocks meet in products over the
decays since the later block's begin, so that no factor is above one and none overflows. Within a block the decays
since its middle are the factors; where one could overflow, rows are multiplied channel by channel.

``gathered`` brings the same chunks to where a scan of another package reads them.

With a model in fp32 all products are exact to fp32. With one of 16 bits their factors have the model's type, their sums
are fp32, and so is the solution of the system; that is how such models were trained.

Plain reference: ``chunk_scan`` of `kvasir.kernels.gated_delta`. Bytes: a row is read four times (from L2) and written
once by the first launch, D + V + 3 CHUNK elements a row and head lie between the others.

Legend: N chunks, H heads of values, K heads of keys, D key dim, V value dim, C mixed row, X row, L long spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl
from kvasir.types import StepBatch

CHUNK = 64  # rows
BLOCK = 16  # rows that are solved one after the other; the blocks of a chunk are joined by products
VALUES = 32  # most values of a program that carries a state
EXPONENT = 40.0  # a decay is made of two factors if they are within e^-40 and e^40: then their product is finite
PART, WARPS = 64, 2  # channels whose factors are multiplied at once, where each has its decay; warps for a block
STAGES = 3  # loads of chunks on their way while one is computed, with a model of 16 bits


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step's long spans and where they lie, int32 on the device. ``of_chunk`` [N, 2]: the span, and the
    absolute position of the first row. ``of_span`` [L, 3]: the span, its first chunk, and their number. ``bounds``
    [L + 1] int64: the places of chunks' rows between which a span lies. ``rows``: first row of each span in the step,
    how many there are, and the first one's place, on the host."""

    of_chunk: torch.Tensor
    of_span: torch.Tensor
    bounds: torch.Tensor
    rows: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of_batch(cls, batch: StepBatch, ahead: int) -> Chunks | None:
        """The chunks of a step, which all of its layers share."""
        if Chunks not in batch.scratch:
            batch.scratch[Chunks] = cls.of(batch.starts, batch.lengths, ahead, batch.context.device)
        return batch.scratch[Chunks]

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], ahead: int, device: torch.device) -> Chunks | None:
        """The chunks of the spans of more than ``ahead`` rows; None: there are none. The position of a state is known
        on the device alone, so a span begins with the chunk in which the earliest one can lie."""
        chunks: list[tuple[int, int]] = []
        spans: list[tuple[int, int, int]] = []
        bounds, rows, row = [0], [], 0
        for span, (start, length) in enumerate(zip(starts, lengths)):
            if length > ahead:
                first, end = max(0, start - ahead) // CHUNK, cdiv(start + length, CHUNK)
                rows.append((row, length, CHUNK * (len(chunks) - first) + start))
                spans.append((span, len(chunks), end - first))
                chunks += [(span, CHUNK * number) for number in range(first, end)]
                bounds.append(CHUNK * len(chunks))
            row += length
        if not spans:
            return None
        words = torch.tensor([word for entry in (*chunks, *spans) for word in entry], dtype=torch.int32)
        places = torch.tensor(bounds)
        if device.type == "cuda":
            words, places = (x.pin_memory().to(device, non_blocking=True) for x in (words, places))
        else:
            words, places = words.to(device), places.to(device)
        return cls(words[: 2 * len(chunks)].view(-1, 2), words[2 * len(chunks) :].view(-1, 3), places, tuple(rows))


@jit
def _rows_of(rows_ptr, ahead_ptr, channel, position, mask, base, start, first, X: tl.constexpr):
    """Channels of the rows at these positions, fp32: of this step from ``start`` on, before that from the look-ahead
    slots, which begin at ``base``. Zero where ``mask`` is not set."""
    own = (position >= start)[:, None]
    here = tl.load(rows_ptr + (first + position - start).to(tl.int64)[:, None] * X + channel[None, :],
                   mask=mask & own, other=0.0).to(tl.float32)
    kept = tl.load(ahead_ptr + (position - base)[:, None] * X + channel[None, :],
                   mask=mask & (own == 0), other=0.0).to(tl.float32)
    return tl.where(own, here, kept)


@jit
def _place(chunk_ptr, table_ptr, base_ptr, context_ptr, first_ptr, width, chunk):
    """Find a chunk: the position of its first row, the page that its span reads, the position of the state there
    (0 at the start of a sequence), and the span's start, end and first row."""
    span, begin = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    start, first = tl.load(context_ptr + span), tl.load(first_ptr + span)
    end = start + tl.load(first_ptr + span + 1) - first
    base = tl.where(start > 0, tl.load(base_ptr + span), 0).to(tl.int32)
    return begin, tl.load(table_ptr + span * width).to(tl.int64), base, start, end, first


@jit
def _convolve(rows_ptr, taps_ptr, tail_ptr, ahead_ptr, base_ptr, table_ptr, context_ptr, first_ptr, chunk_ptr,
              mixed_ptr, width, page_t, page_a, eps, scale,
              K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, X: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
              CHUNK: tl.constexpr, BW: tl.constexpr, APART: tl.constexpr):
    """One head's queries, keys or values of one chunk, after convolution and norm. Taps are added from the oldest row
    to the newest. ``APART``: all queries are stored before all keys, and these before all values."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, read, base, start, end, first = _place(
        chunk_ptr, table_ptr, base_ptr, context_ptr, first_ptr, width, chunk)
    row, w = tl.arange(0, CHUNK), tl.arange(0, BW)
    is_key = head < 2 * K
    channel = tl.where(is_key, head * D, 2 * K * D + (head - 2 * K) * V) + w
    in_w = w < tl.where(is_key, D, V)
    inside = ((begin + row >= base) & (begin + row < end))[:, None] & in_w[None, :]
    total = tl.zeros([CHUNK, BW], tl.float32)
    if begin >= start + (TAPS - 1):  # the taps meet rows of this step alone, as in nearly all chunks
        at = rows_ptr + (first + begin + row - start).to(tl.int64)[:, None] * X + channel[None, :]
        for tap in tl.static_range(TAPS):
            x = tl.load(at + (tap - (TAPS - 1)) * X, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(taps_ptr + tap * C + channel, mask=in_w, other=0.0).to(tl.float32)
            total += x * weight[None, :]
    else:
        for tap in range(TAPS):
            position = begin + row + (tap - (TAPS - 1))
            before = (position < base)[:, None]
            x = _rows_of(rows_ptr, ahead_ptr + read * page_a, channel, position, inside & (before == 0), base, start,
                         first, X)
            x += tl.load(tail_ptr + read * page_t + (position - base + TAPS - 1)[:, None] * C + channel[None, :],
                         mask=inside & before & (start > 0), other=0.0).to(tl.float32)
            weight = tl.load(taps_ptr + tap * C + channel, mask=in_w, other=0.0).to(tl.float32)
            total += x * weight[None, :]
    found = total / (1 + tl.exp(-total))
    norm = 1 / tl.sqrt(tl.sum(found * found, 1) + eps)
    norm = tl.where(is_key, norm * tl.where(head < K, scale, 1.0), 1.0)
    if APART:
        rows, side = tl.num_programs(1).to(tl.int64) * CHUNK, tl.where(is_key, K * D, C - 2 * K * D)
        before = tl.where(head < K, 0, tl.where(is_key, K * D, 2 * K * D))
        target = before * rows + (chunk * CHUNK + row)[:, None] * side + (channel - before)[None, :]
    else:
        target = (chunk * CHUNK + row)[:, None] * C + channel[None, :]
    tl.store(mixed_ptr + target, found * norm[:, None], mask=in_w[None, :])


@jit
def _gates(rows_ptr, decay_ptr, bias_ptr, ahead_ptr, base_ptr, table_ptr, context_ptr, first_ptr, chunk_ptr,
           decays_ptr, strengths_ptr, width, page_a,
           H: tl.constexpr, N: tl.constexpr, X: tl.constexpr, STRENGTH: tl.constexpr, DECAY: tl.constexpr,
           CHUNK: tl.constexpr, BN: tl.constexpr, BY_HEAD: tl.constexpr):
    """One head's ``N`` log decays and its write strength for the rows of one chunk. ``BY_HEAD``: a head's rows lie
    together, and decays are added up from the chunk's begin."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, read, base, start, end, first = _place(
        chunk_ptr, table_ptr, base_ptr, context_ptr, first_ptr, width, chunk)
    row, n = tl.arange(0, CHUNK), tl.arange(0, BN)
    position, in_n = begin + row, (n < N)[None, :]
    inside = ((position >= base) & (position < end))[:, None]
    ahead = ahead_ptr + read * page_a
    one = STRENGTH + head + tl.arange(0, 1)
    b = tl.sum(_rows_of(rows_ptr, ahead, one, position, inside, base, start, first, X), 1)
    a = _rows_of(rows_ptr, ahead, DECAY + head * N + n, position, inside & in_n, base, start, first, X)
    a += tl.load(bias_ptr + head * N + n, mask=n < N, other=0.0)[None, :]
    softplus = tl.maximum(a, 0.0) + tl.log(1 + tl.exp(-tl.abs(a)))
    decay = tl.where(inside, -tl.exp(tl.load(decay_ptr + head)) * softplus, 0.0)
    if BY_HEAD:
        cell = (chunk * H + head) * CHUNK + row
        decay = tl.cumsum(decay, 0)
    else:
        cell = (chunk * CHUNK + row) * H + head
    tl.store(decays_ptr + cell[:, None] * N + n[None, :], decay, mask=in_n)
    tl.store(strengths_ptr + cell, tl.where((position >= base) & (position < end), 1 / (1 + tl.exp(-b)), 0.0))


@jit
def _by_factors(q_at, k_at, totals, middle, strength, row, D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
                BD: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """Products of keys with keys, and of queries with keys, of the rows of one block, [BLOCK, BLOCK]. Decays are made
    of two factors around the row ``middle``. Some channels at a time: their operands fill the registers."""
    alike, within = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    for at in range(0, BD, PART):
        d = at + tl.arange(0, PART)[None, :]
        mask, rows = d < D, row[:, None] * C + d
        since = tl.load(totals + row[:, None] * D + d, mask=mask, other=0.0)
        since -= tl.load(totals + middle * D + d, mask=mask, other=0.0)
        key = tl.load(k_at + rows, mask=mask, other=0.0).to(tl.float32)
        query = tl.load(q_at + rows, mask=mask, other=0.0).to(tl.float32) * tl.exp(since)
        peer = tl.trans(key * tl.exp(-since))
        alike = tl.dot(key * tl.exp(since), peer, alike, input_precision=PRECISION)
        within = tl.dot(query, peer, within, input_precision=PRECISION)
    return alike * strength, within


@jit
def _by_channel(q_at, k_at, totals, total, strength, row, block, d, D: tl.constexpr, C: tl.constexpr,
                BLOCK: tl.constexpr):
    """Compute what ``_by_factors`` does, whatever the decays: rows are compared channel by channel, one after the
    other."""
    alike, within = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    column, mask, rows = tl.arange(0, BLOCK), (d < D)[None, :], row[:, None] * C + d[None, :]
    query = tl.load(q_at + rows, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(k_at + rows, mask=mask, other=0.0).to(tl.float32) * strength
    for i in range(0, BLOCK):
        peer = block * BLOCK + i
        later = row >= peer
        key = tl.load(k_at + peer * C + d[None, :], mask=mask, other=0.0).to(tl.float32)
        between = total - tl.load(totals + peer * D + d[None, :], mask=mask, other=0.0)
        key = key * tl.exp(tl.where(later[:, None], between, 0.0))
        here = (column[None, :] == i) & later[:, None]
        alike = tl.where(here, tl.sum(own * key, 1)[:, None], alike)
        within = tl.where(here, tl.sum(query * key, 1)[:, None], within)
    return alike, within


@jit
def _compare(mixed_ptr, total_ptr, strength_ptr, system_ptr, within_ptr,
             H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
             BLOCK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, CHANNELWISE: tl.constexpr,
             EXPONENT: tl.constexpr, PART: tl.constexpr):
    """One block of rows of one head with all rows of their chunk up to them. ``within``: the share of each row in their
    results. ``system``: its share in what they write; within their block, the inverse of 1 + that. It is solved for
    one row after the other in fp32."""
    block, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BD)
    in_d, key_head, first = (d < D)[None, :], head // (H // K), (chunk * H + head) * CHUNK
    queries = mixed_ptr + chunk * CHUNK * C + key_head * D
    keys = queries + K * D
    q_at, k_at = queries + d[None, :], keys + d[None, :]
    strength = tl.load(strength_ptr + first + row)[:, None]
    target = (first + row)[:, None] * CHUNK + column[None, :]
    earlier = column[:, None] > column[None, :]
    equal = earlier | (column[:, None] == column[None, :])
    if CHANNELWISE:
        totals = total_ptr + first * D
        middle = block * BLOCK + BLOCK // 2
        total = tl.load(totals + row[:, None] * D + d[None, :], mask=in_d, other=0.0)
        since = tl.abs(total - tl.load(totals + middle * D + d[None, :], mask=in_d, other=0.0))
        if tl.max(tl.max(since, 1), 0) < EXPONENT:
            alike, within = _by_factors(queries, keys, totals, middle, strength, row, D, C, BLOCK, BD, PART, PRECISION)
            within = tl.where(equal, within, 0.0)
        else:
            alike, within = _by_channel(queries, keys, totals, total, strength, row, block, d, D, C, BLOCK)
        if block:
            edge = tl.load(totals + (block * BLOCK - 1) * D + d[None, :], mask=in_d, other=0.0)
            grown = tl.exp(tl.minimum(total - edge, 0.0))
            q = tl.load(q_at + row[:, None] * C, mask=in_d, other=0.0).to(tl.float32) * grown
            k = tl.load(k_at + row[:, None] * C, mask=in_d, other=0.0).to(tl.float32) * strength * grown
            for i in range(0, block):
                peers = (i * BLOCK + column)[:, None]
                key = tl.load(k_at + peers * C, mask=in_d, other=0.0).to(tl.float32)
                key *= tl.exp(edge - tl.load(totals + peers * D + d[None, :], mask=in_d, other=0.0))
                key = tl.trans(key)
                tl.store(system_ptr + target + i * BLOCK, tl.dot(k, key, input_precision=PRECISION))
                tl.store(within_ptr + target + i * BLOCK, tl.dot(q, key, input_precision=PRECISION))
    else:
        q = tl.load(q_at + row[:, None] * C, mask=in_d, other=0.0)
        k = tl.load(k_at + row[:, None] * C, mask=in_d, other=0.0)
        total = tl.load(total_ptr + first + row)[:, None]
        for i in range(0, block):
            key = tl.trans(tl.load(k_at + (i * BLOCK + column)[:, None] * C, mask=in_d, other=0.0))
            between = tl.exp(total - tl.load(total_ptr + first + i * BLOCK + column)[None, :])
            alike = tl.dot(k, key, input_precision=PRECISION) * between * strength
            tl.store(system_ptr + target + i * BLOCK, alike)
            tl.store(within_ptr + target + i * BLOCK, tl.dot(q, key, input_precision=PRECISION) * between)
        key = tl.trans(k)
        between = total - tl.load(total_ptr + first + block * BLOCK + column)[None, :]
        between = tl.where(equal, tl.exp(tl.where(equal, between, 0.0)), 0.0)
        alike = tl.dot(k, key, input_precision=PRECISION) * between * strength
        within = tl.dot(q, key, input_precision=PRECISION) * between
    tl.store(within_ptr + target + block * BLOCK, within)
    alike = tl.where(earlier, alike, 0.0)
    solved = tl.where(column[:, None] == column[None, :], 1.0, 0.0)
    for i in range(0, BLOCK - 1):
        factors = tl.sum(tl.where(column[None, :] == i, alike, 0.0), 1)
        solved -= factors[:, None] * tl.sum(tl.where(column[:, None] == i, solved, 0.0), 0)[None, :]
    tl.store(system_ptr + target + block * BLOCK, solved)
    for i in range(block + 1, CHUNK // BLOCK):
        tl.store(system_ptr + target + i * BLOCK, tl.zeros([BLOCK, BLOCK], tl.float32))
        tl.store(within_ptr + target + i * BLOCK, tl.zeros([BLOCK, BLOCK], tl.float32))


@jit
def _inverse(system, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(1 + system)^-1 of a strictly lower triangular ``system`` [CHUNK, CHUNK] in fp32, whose blocks on the diagonal
    are solved: what is below them is joined by the series of a matrix whose fourth power is zero."""
    tl.static_assert(CHUNK == 4 * BLOCK)
    near = tl.arange(0, CHUNK)[:, None] // BLOCK == tl.arange(0, CHUNK)[None, :] // BLOCK
    solved = tl.where(near, system, 0.0)
    joined = tl.dot(solved, tl.where(near, 0.0, system), input_precision="tf32x3")
    both = solved + tl.dot(tl.dot(joined, joined, input_precision="tf32x3"), solved, input_precision="tf32x3")
    return both - tl.dot(joined, both, input_precision="tf32x3")


@jit
def _solve(mixed_ptr, total_ptr, strength_ptr, system_ptr, seen_ptr, given_ptr, query_ptr, key_ptr,
           H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
           BLOCK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
           CHANNELWISE: tl.constexpr):
    """One chunk of one head by itself: what its rows write is ``given`` - ``seen`` @ state. With ``CHANNELWISE``, its
    queries decayed from the chunk's begin on, and its keys decayed until its end."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, d, v = tl.arange(0, CHUNK), tl.arange(0, BD), tl.arange(0, BV)
    in_d, first = (d < D)[None, :], (chunk * H + head) * CHUNK
    cell, at = first + row, mixed_ptr + (chunk * CHUNK + row)[:, None] * C
    inverse = _inverse(tl.load(system_ptr + cell[:, None] * CHUNK + row[None, :]), CHUNK, BLOCK)
    strength = tl.load(strength_ptr + cell)[:, None]
    values = tl.load(at + 2 * K * D + head * V + v[None, :], mask=(v < V)[None, :], other=0.0)
    inverse = inverse.to(values.dtype)
    values = (values.to(tl.float32) * strength).to(inverse.dtype)
    tl.store(given_ptr + cell[:, None] * V + v[None, :], tl.dot(inverse, values, input_precision=PRECISION),
             mask=(v < V)[None, :])
    place = cell[:, None] * D + d[None, :]
    at += head // (H // K) * D + d[None, :]
    k = tl.load(at + K * D, mask=in_d, other=0.0).to(tl.float32)
    if CHANNELWISE:
        total = tl.load(total_ptr + place, mask=in_d, other=0.0)
        last = tl.load(total_ptr + (first + CHUNK - 1) * D + d[None, :], mask=in_d, other=0.0)
        tl.store(key_ptr + place, k * tl.exp(last - total), mask=in_d)
        grown = tl.exp(total)
        tl.store(query_ptr + place, tl.load(at, mask=in_d, other=0.0).to(tl.float32) * grown, mask=in_d)
    else:
        grown = tl.exp(tl.load(total_ptr + cell))[:, None]
    keys = (k * (strength * grown)).to(inverse.dtype)
    tl.store(seen_ptr + place, tl.dot(inverse, keys, input_precision=PRECISION), mask=in_d)


@jit
def _carry(mixed_ptr, query_ptr, key_ptr, total_ptr, seen_ptr, given_ptr, within_ptr, matrix_ptr, table_ptr,
           context_ptr, first_ptr, chunk_ptr, span_ptr, out_ptr, width, page_m,
           H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
           BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, CHANNELWISE: tl.constexpr):
    """Some values of one head of one span, chunk after chunk."""
    which, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span, chunk = tl.load(span_ptr + 3 * which), tl.load(span_ptr + 3 * which + 1)
    count, begin = tl.load(span_ptr + 3 * which + 2), tl.load(chunk_ptr + 2 * chunk + 1)
    start, first = tl.load(context_ptr + span), tl.load(first_ptr + span)
    end = start + tl.load(first_ptr + span + 1) - first
    read, write = tl.load(table_ptr + span * width).to(tl.int64), tl.load(table_ptr + span * width + 1).to(tl.int64)
    row, d, v = tl.arange(0, CHUNK), tl.arange(0, BD), block * BV + tl.arange(0, BV)
    in_d, in_v = d < D, v < V
    place = (head * D + d[:, None]) * V + v[None, :]
    in_dv = in_d[:, None] & in_v[None, :]
    state = tl.load(matrix_ptr + read * page_m + place, mask=in_dv & (start > 0), other=0.0).to(tl.float32)
    key_head = head // (H // K)
    for i in range(0, count):
        at = (chunk + i).to(tl.int64)
        cell = (at * H + head) * CHUNK + row
        mixed = mixed_ptr + (at * CHUNK + row)[:, None] * C
        seen = tl.load(seen_ptr + cell[:, None] * D + d[None, :], mask=in_d[None, :], other=0.0)
        if CHANNELWISE:
            q = tl.load(query_ptr + cell[:, None] * D + d[None, :], mask=in_d[None, :], other=0.0)
            k = tl.load(key_ptr + cell[:, None] * D + d[None, :], mask=in_d[None, :], other=0.0)
        else:
            q = tl.load(mixed + key_head * D + d[None, :], mask=in_d[None, :], other=0.0)
            k = tl.load(mixed + (K + key_head) * D + d[None, :], mask=in_d[None, :], other=0.0)
        given = tl.load(given_ptr + cell[:, None] * V + v[None, :], mask=in_v[None, :], other=0.0)
        within = tl.load(within_ptr + cell[:, None] * CHUNK + row[None, :])
        narrow = state.to(q.dtype)
        written = given.to(tl.float32) - tl.dot(seen, narrow, input_precision=PRECISION)
        found = tl.dot(q, narrow, input_precision=PRECISION)
        end_of_chunk = (at * H + head) * CHUNK + CHUNK - 1
        if CHANNELWISE:
            kept = tl.exp(tl.load(total_ptr + end_of_chunk * D + d, mask=in_d, other=0.0))[:, None]
        else:
            total, last = tl.load(total_ptr + cell), tl.load(total_ptr + end_of_chunk)
            found = found * tl.exp(total)[:, None]
            kept = tl.exp(last)
        found += tl.dot(within, written.to(q.dtype), input_precision=PRECISION)
        position = begin + i * CHUNK + row
        own = (position >= start) & (position < end)
        tl.store(out_ptr + ((first + position - start).to(tl.int64)[:, None] * H + head) * V + v[None, :], found,
                 mask=own[:, None] & in_v[None, :])
        if CHANNELWISE == 0:
            written = written * tl.exp(last - total)[:, None]
        state = state * kept + tl.dot(tl.trans(k), written.to(q.dtype), input_precision=PRECISION)
    tl.store(matrix_ptr + write * page_m + place, state, mask=in_dv)


def scan(rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], table_SW: torch.Tensor, context_S: torch.Tensor,
         row_start_S1: torch.Tensor, base_S: torch.Tensor, chunks: Chunks, weights: Any, out_THV: torch.Tensor,
         eps: float) -> None:
    """Compute the rows of long spans into ``out_THV`` fp32, and write the matrices after them to the pages that they
    write. The rest of those pages is left alone. ``base_S``: position of the state that each span reads."""
    matrix, aheads = planes["matrix"], planes["ahead"]
    (_, heads, key_dim, value_dim), channels = matrix.shape, weights.conv_CJ.shape[0]
    num, keys = len(chunks.of_chunk), weights.key_heads

    def empty(*shape: int, dtype: torch.dtype = rows_TX.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rows_TX.device)

    mixed = _mixed(rows_TX, planes, table_SW, context_S, row_start_S1, base_S, chunks, weights, eps)
    seen, given, within = (empty(num, heads, CHUNK, size) for size in (key_dim, value_dim, CHUNK))
    shared = table_SW, context_S, row_start_S1, chunks.of_chunk
    # A product has at least 16 columns.
    block_d, block_v = (max(16, next_power_of_2(size)) for size in (key_dim, value_dim))
    values, narrow = min(VALUES, block_v), rows_TX.dtype != torch.float32
    precision, channelwise = "tf32" if narrow else "ieee", weights.channelwise
    total, strength = _of_gates(rows_TX, aheads, base_S, shared, weights, by_head=True)
    system = empty(num, heads, CHUNK, CHUNK, dtype=torch.float32)
    _compare[(CHUNK // BLOCK, heads, num)](
        mixed, total, strength, system, within, heads, keys, key_dim, channels, CHUNK, BLOCK, block_d, precision,
        channelwise, EXPONENT, min(PART, block_d), num_warps=WARPS, num_stages=1)
    query, key = (empty(num, heads, CHUNK, key_dim) for _ in range(2)) if channelwise else (mixed, mixed)
    _solve[(heads, num)](
        mixed, total, strength, system, seen, given, query, key, heads, keys, key_dim, value_dim, channels, CHUNK,
        BLOCK, block_d, block_v, precision, channelwise, num_warps=4, num_stages=1)
    _carry[(len(chunks.of_span), heads, cdiv(value_dim, values))](
        mixed, query, key, total, seen, given, within, matrix, *shared, chunks.of_span, out_THV, table_SW.stride(0),
        matrix.stride(0), heads, keys, key_dim, value_dim, channels, CHUNK, block_d, values, precision,
        channelwise, num_warps=4, num_stages=STAGES if narrow else 1)


def _mixed(rows_TX, planes, table_SW, context_S, row_start_S1, base_S, chunks, weights, eps, apart=False):
    """Queries, keys and values of all chunks, in one piece of memory of [N * CHUNK * C]; see ``_convolve``."""
    (_, heads, key_dim, value_dim), (num, keys) = planes["matrix"].shape, (len(chunks.of_chunk), weights.key_heads)
    tails, aheads, (channels, taps) = planes["tail"], planes["ahead"], weights.conv_CJ.shape
    mixed = torch.empty(num * CHUNK * channels, dtype=rows_TX.dtype, device=rows_TX.device)
    wide = max(16, next_power_of_2(key_dim), next_power_of_2(value_dim))
    taps_JC = weights.conv_CJ.t().contiguous()  # a program reads channels that lie side by side
    _convolve[(2 * keys + heads, num)](
        rows_TX, taps_JC, tails, aheads, base_S, table_SW, context_S, row_start_S1, chunks.of_chunk, mixed,
        table_SW.stride(0), tails.stride(0), aheads.stride(0), eps, key_dim**-0.5, keys, key_dim, value_dim,
        rows_TX.shape[1], channels, taps, CHUNK, wide, apart, num_warps=8)
    return mixed


def _of_gates(rows_TX, aheads, base_S, shared, weights, by_head):
    """Log decays and strengths of all chunks, fp32; see ``_gates``."""
    heads, num = len(weights.log_decay_H), len(shared[-1])
    each = weights.bias_N.numel() // heads
    shape = (num, heads, CHUNK) if by_head else (num, CHUNK, heads)
    decays = torch.empty(*shape, each, dtype=torch.float32, device=rows_TX.device)
    strengths = torch.empty(shape, dtype=torch.float32, device=rows_TX.device)
    _gates[(heads, num)](
        rows_TX, weights.log_decay_H, weights.bias_N, aheads, base_S, *shared, decays, strengths,
        shared[0].stride(0), aheads.stride(0), heads, each, rows_TX.shape[1], *weights.gates, CHUNK,
        next_power_of_2(each), by_head, num_warps=4)
    return decays, strengths


def gathered(rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], table_SW: torch.Tensor, context_S: torch.Tensor,
             row_start_S1: torch.Tensor, base_S: torch.Tensor, chunks: Chunks, weights: Any,
             eps: float) -> tuple[torch.Tensor, ...]:
    """Queries and keys [R, K, D] and values [R, H, V] of the chunks' R = N * CHUNK rows in the model's type, log decays
    [R, H] or [R, H, D] and write strengths [R, H] fp32. Queries are scaled. A place without a row changes nothing."""
    (_, heads, key_dim, value_dim), keys = planes["matrix"].shape, weights.key_heads
    shared = table_SW, context_S, row_start_S1, chunks.of_chunk
    mixed = _mixed(rows_TX, planes, table_SW, context_S, row_start_S1, base_S, chunks, weights, eps, apart=True)
    decays, strengths = _of_gates(rows_TX, planes["ahead"], base_S, shared, weights, by_head=False)
    rows = len(chunks.of_chunk) * CHUNK
    q, k, v = mixed.split([rows * keys * key_dim] * 2 + [rows * heads * value_dim])
    sides = q.view(rows, keys, key_dim), k.view(rows, keys, key_dim), v.view(rows, heads, value_dim)
    decays = decays.view(rows, heads, -1)
    return *sides, decays if weights.channelwise else decays.squeeze(-1), strengths.view(rows, heads)
