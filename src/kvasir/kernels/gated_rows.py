"""Rows of the delta rule by short spans, on a GPU: the kernels of ``gated_delta.step`` that walk row after row.

``_walk`` has some values of one head of one span. The state stays in registers, and a row's bits depend on no cut. The
state is read once a step and written once in ``waiting`` steps: until then rows wait in the look-ahead slots of their
page, and every step folds them again. That should pay where a step waits for bytes, so with many sequences. In exact
mode each step writes the state, because the code for many spans is compiled apart. ``_settle`` then writes what heads
share of a page.

Programs are short and wait for memory, so a row is asked for before the one ahead of it is computed with.

Legend: T rows, H heads of values, D key dim, V value dim, C mixed row, J taps, X numbers of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.types import StepBatch

VALUES, WARPS = 32, 4  # most values of a program, whose state is in its registers, and its warps
CHANNELS = 256  # of a program that writes what heads share
# Rows that wait before a state is written, and the spans of a step from which on any wait. With few spans a row that
# waits costs latency and saves bytes that nobody waits for. On an H200 with 64 spans, waiting for three rows is slower
# than for one; one and two lie too close to tell (docs/log.md). MANY_SPANS is an estimate from the compiled code,
# not measured.
WAITING, MANY_SPANS = 2, 16


@jit
def _load_tap(tail_ptr, conv_ptr, channel, mask, old, tap: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr):
    """One of four taps and the row of the tail that it meets first, both fp32; zeros if there are fewer taps."""
    place: tl.constexpr = tap - (4 - TAPS)
    weight = tl.load(conv_ptr + channel * TAPS + place, mask=mask & (place >= 0), other=0.0)
    row = tl.load(tail_ptr + place * C + channel, mask=mask & old & (place >= 0) & (place < TAPS - 1), other=0.0)
    return weight.to(tl.float32), row.to(tl.float32)


@jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """The convolution of four rows, from the oldest to the newest, and its activation."""
    x = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    return x / (1 + tl.exp(-x))


@jit
def _load_row(row_ptr, q_at, k_at, v_at, in_d, in_v, bias, head, d, D: tl.constexpr, STRENGTH: tl.constexpr,
              DECAY: tl.constexpr, CHANNELWISE: tl.constexpr):
    """Query, key and value of a row before the convolution, and inputs of its write strength and decay, fp32."""
    q = tl.load(row_ptr + q_at, mask=in_d, other=0.0).to(tl.float32)
    k = tl.load(row_ptr + k_at, mask=in_d, other=0.0).to(tl.float32)
    v = tl.load(row_ptr + v_at, mask=in_v, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + STRENGTH + head).to(tl.float32)
    if CHANNELWISE:
        a = tl.load(row_ptr + DECAY + head * D + d, mask=in_d, other=0.0).to(tl.float32) + bias
    else:
        a = tl.load(row_ptr + DECAY + head).to(tl.float32) + bias
    return q, k, v, b, a


@jit
def _write(state, key, value, b, a, rate, eps, CHANNELWISE: tl.constexpr):
    """The state after a row."""
    key = key / tl.sqrt(tl.sum(key * key, 0) + eps)
    decay = tl.exp(-rate * (tl.maximum(a, 0.0) + tl.log(1 + tl.exp(-tl.abs(a)))))
    if CHANNELWISE:
        state = state * decay[:, None]
    else:
        state = state * decay
    change = (value - tl.sum(state * key[:, None], 0)) / (1 + tl.exp(-b))
    return state + key[:, None] * change[None, :]


@jit
def _span(context_ptr, row_start_ptr, length_ptr, span, EACH: tl.constexpr):
    """Start, first row and length of a span. ``EACH``: there is a span for each row of the step, and ``length_ptr`` has
    the lengths of those that begin there, 0 for other rows and -1 for padding."""
    start = tl.load(context_ptr + span)
    if EACH:
        return start, span, tl.load(length_ptr + span).to(tl.int32)
    else:
        first = tl.load(row_start_ptr + span)
        return start, first, tl.load(row_start_ptr + span + 1) - first


@jit
def _stays(start, base, length, waiting, AHEAD: tl.constexpr):
    """Whether a short span leaves the page's state as it is, and its own rows behind those that wait there."""
    waits = start - base
    return (start > 0) & (waits < waiting) & (waits + length <= AHEAD)


@jit
def _walk(rows_ptr, conv_ptr, decay_ptr, bias_ptr, matrix_ptr, tail_ptr, ahead_ptr, position_ptr, base_ptr, table_ptr,
          context_ptr, row_start_ptr, length_ptr, out_ptr, width, row_x, page_m, page_t, page_a, page_p, eps, scale,
          waiting, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, X: tl.constexpr, C: tl.constexpr,
          STRENGTH: tl.constexpr, DECAY: tl.constexpr, TAPS: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr,
          BV: tl.constexpr, EACH: tl.constexpr, LONG: tl.constexpr, CHANNELWISE: tl.constexpr, MANY: tl.constexpr,
          PDL: tl.constexpr):
    """Some values of one head of one span: row after row from the base of its state. Taps are added from the oldest
    row to the newest. ``STRENGTH``, ``DECAY``: where a row has them. ``LONG``: long spans run here, too. ``MANY``: so
    many programs that most start after the kernel before. The base is left to ``_settle``, which changes positions.
    Blocks of a head are neighbours in the grid, as in memory."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    read, write = tl.load(table_ptr + span * width).to(tl.int64), tl.load(table_ptr + span * width + 1).to(tl.int64)
    start, first, length = _span(context_ptr, row_start_ptr, length_ptr, span, EACH)
    d, v = tl.arange(0, BD), block * BV + tl.arange(0, BV)
    in_d, in_v = d < D, v < V
    old = start > 0
    base = tl.where(old, tl.load(position_ptr + read * page_p), 0).to(tl.int32)
    is_first = (head == 0) & (block == 0) & (length > 0)
    if length <= 0 or (length > AHEAD and not LONG):
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(base_ptr + span, base, mask=is_first)
        padding = in_v & (length < 0)  # gets numbers that later layers can compute with
        tl.store(out_ptr + (first.to(tl.int64) * H + head) * V + v, tl.zeros([BV], tl.float32), mask=padding)
        return
    short = length <= AHEAD
    q_at, k_at = head // (H // K) * D + d, (K + head // (H // K)) * D + d
    v_at = 2 * K * D + head * V + v
    in_dv = in_d[:, None] & in_v[None, :]
    cell = (head * D + d[:, None]) * V + v[None, :]
    state = tl.load(matrix_ptr + read * page_m + cell, mask=in_dv & old, other=0.0).to(tl.float32)
    tail = tail_ptr + read * page_t
    qw0, q0 = _load_tap(tail, conv_ptr, q_at, in_d, old, 0, TAPS, C)
    qw1, q1 = _load_tap(tail, conv_ptr, q_at, in_d, old, 1, TAPS, C)
    qw2, q2 = _load_tap(tail, conv_ptr, q_at, in_d, old, 2, TAPS, C)
    qw3, q3 = _load_tap(tail, conv_ptr, q_at, in_d, old, 3, TAPS, C)
    kw0, k0 = _load_tap(tail, conv_ptr, k_at, in_d, old, 0, TAPS, C)
    kw1, k1 = _load_tap(tail, conv_ptr, k_at, in_d, old, 1, TAPS, C)
    kw2, k2 = _load_tap(tail, conv_ptr, k_at, in_d, old, 2, TAPS, C)
    kw3, k3 = _load_tap(tail, conv_ptr, k_at, in_d, old, 3, TAPS, C)
    vw0, v0 = _load_tap(tail, conv_ptr, v_at, in_v, old, 0, TAPS, C)
    vw1, v1 = _load_tap(tail, conv_ptr, v_at, in_v, old, 1, TAPS, C)
    vw2, v2 = _load_tap(tail, conv_ptr, v_at, in_v, old, 2, TAPS, C)
    vw3, v3 = _load_tap(tail, conv_ptr, v_at, in_v, old, 3, TAPS, C)
    rate = tl.exp(tl.load(decay_ptr + head))
    if CHANNELWISE:
        bias = tl.load(bias_ptr + head * D + d, mask=in_d, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    # Every row is asked for before the last one is computed with, the first ones before the state is there.
    row, here = ahead_ptr + read * page_a, rows_ptr + first.to(tl.int64) * row_x
    q3, k3, v3, b, a = _load_row(row, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY, CHANNELWISE)
    if MANY:
        if PDL:
            tl.extra.cuda.gdc_wait()
        xq, xk, xv, xb, xa = _load_row(here, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY,
                                       CHANNELWISE)
    # Earlier steps left these rows, so they can be folded into the state while the kernel before ends.
    for i in range(base, start):
        row += tl.where(i < start - 1, X, 0)
        nq, nk, nv, nb, na = _load_row(row, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY,
                                       CHANNELWISE)
        key = _convolved(k0, k1, k2, k3, kw0, kw1, kw2, kw3)
        value = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3)
        state = _write(state, key, value, b, a, rate, eps, CHANNELWISE)
        q0, q1, q2, q3 = q1, q2, q3, nq
        k0, k1, k2, k3 = k1, k2, k3, nk
        v0, v1, v2, v3 = v1, v2, v3, nv
        b, a = nb, na
    if short and not _stays(start, base, length, waiting, AHEAD):
        tl.store(matrix_ptr + read * page_m + cell, state, mask=in_dv)
        state = state.to(matrix_ptr.dtype.element_ty).to(tl.float32)  # as a step that runs again reads it
    if not MANY:
        if PDL:
            tl.extra.cuda.gdc_wait()
        xq, xk, xv, xb, xa = _load_row(here, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY,
                                       CHANNELWISE)
    tl.store(base_ptr + span, base, mask=is_first)
    out = out_ptr + (first.to(tl.int64) * H + head) * V + v
    for i in range(0, length):
        here += tl.where(i < length - 1, row_x, 0)
        nq, nk, nv, nb, na = _load_row(here, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY,
                                       CHANNELWISE)
        query = _convolved(q0, q1, q2, xq, qw0, qw1, qw2, qw3)
        key = _convolved(k0, k1, k2, xk, kw0, kw1, kw2, kw3)
        value = _convolved(v0, v1, v2, xv, vw0, vw1, vw2, vw3)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + eps))
        state = _write(state, key, value, xb, xa, rate, eps, CHANNELWISE)
        tl.store(out, tl.sum(state * query[:, None], 0), mask=in_v)
        q0, q1, q2, xq = q1, q2, xq, nq
        k0, k1, k2, xk = k1, k2, xk, nk
        v0, v1, v2, xv = v1, v2, xv, nv
        xb, xa = nb, na
        out += H * V
    if short == 0:
        tl.store(matrix_ptr + write * page_m + cell, state, mask=in_dv)


@jit
def _settle(rows_ptr, tail_ptr, ahead_ptr, base_ptr, position_ptr, table_ptr, context_ptr, row_start_ptr, length_ptr,
            width, row_x, page_t, page_a, page_p, waiting, X: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
            AHEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    """Write some channels of what a span leaves: the convolution's last rows, look-ahead slots, the position."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    span, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read, write = tl.load(table_ptr + span * width).to(tl.int64), tl.load(table_ptr + span * width + 1).to(tl.int64)
    start, first, length = _span(context_ptr, row_start_ptr, length_ptr, span, EACH)
    if length <= 0:
        return
    old = start > 0
    base = tl.where(old, tl.load(base_ptr + span), 0).to(tl.int32)
    short = length <= AHEAD
    stays = short & _stays(start, base, length, waiting, AHEAD)
    target = tl.where(short, read, write)
    end = tl.where(short, start, start + length)
    row = tl.arange(0, ROWS)
    position = end - (TAPS - 1) + row
    mask = (row < TAPS - 1)[:, None] & (channel < C)[None, :] & (stays == 0)
    from_tail, from_here = (position < base)[:, None], (position >= start)[:, None]
    tail = tl.load(tail_ptr + read * page_t + (position - base + TAPS - 1)[:, None] * C + channel[None, :],
                   mask=mask & from_tail & old, other=0.0)
    kept = tl.load(ahead_ptr + read * page_a + (position - base)[:, None] * X + channel[None, :],
                   mask=mask & (from_tail == 0) & (from_here == 0), other=0.0)
    here = tl.load(rows_ptr + (first + position - start)[:, None].to(tl.int64) * row_x + channel[None, :],
                   mask=mask & from_here, other=0.0)
    last = tl.where(from_tail, tail, tl.where(from_here, here, kept))
    tl.debug_barrier()  # slots are read before they are written
    tl.store(tail_ptr + target * page_t + row[:, None] * C + channel[None, :], last, mask=mask)
    slot = ahead_ptr + read * page_a + tl.where(stays, start - base, 0) * X + channel
    for i in range(0, tl.where(short, length, 0)):
        value = tl.load(rows_ptr + (first + i).to(tl.int64) * row_x + channel, mask=channel < X, other=0.0)
        tl.store(slot + i * X, value, mask=channel < X)
    if (tl.program_id(1) == 0) & (stays == 0):
        tl.store(position_ptr + target * page_p, end.to(tl.int64))


def walk(rows_TX: torch.Tensor, planes: dict[str, torch.Tensor], table_SW: torch.Tensor, batch: StepBatch, weights: Any,
         out_THV: torch.Tensor, eps: float, long: bool, waiting: int | None = None) -> None:
    """The short spans of ``gated_delta.step``, and with ``long`` the others, into ``out_THV``. What long spans that are
    computed elsewhere leave of a page beside its matrices is written here, too.

    ``rows_TX``: rows whose numbers are neighbours. ``waiting``: as in ``gated_delta.step_reference``; None: as suits
    the number of spans. It may differ from step to step.
    """
    matrix, tails, aheads, position = (planes[name] for name in ("matrix", "tail", "ahead", "position"))
    (_, heads, key_dim, value_dim), taps, channels = matrix.shape, weights.conv_CJ.shape[1], tails.shape[-1]
    spans, block, ahead = len(batch.context), min(VALUES, next_power_of_2(value_dim)), aheads.shape[1]
    assert rows_TX.stride(1) == 1, "the numbers of a row are neighbours"
    many, each, early = not long and spans >= MANY_SPANS, batch.span_lengths is not None, pdl(rows_TX.device)
    waiting = (WAITING if many else 1) if waiting is None else waiting
    base_S = torch.empty(spans, dtype=torch.int32, device=rows_TX.device)
    common = table_SW, batch.context, batch.row_start, batch.span_lengths if each else batch.row_start
    width, strides = rows_TX.shape[1], [x.stride(0) for x in (tails, aheads, position)]
    _walk[(cdiv(value_dim, block), heads, spans)](
        rows_TX, weights.conv_CJ, weights.log_decay_H, weights.bias_N, matrix, tails, aheads, position, base_S, *common,
        out_THV, table_SW.stride(0), rows_TX.stride(0), matrix.stride(0), *strides, eps, key_dim**-0.5, waiting, heads,
        weights.key_heads, key_dim, value_dim, width, channels, *weights.gates, taps, ahead, next_power_of_2(key_dim),
        block, EACH=each, LONG=long, CHANNELWISE=weights.channelwise, MANY=many, PDL=early, num_warps=WARPS,
        launch_pdl=early)
    _settle[(spans, cdiv(width, CHANNELS))](
        rows_TX, tails, aheads, base_S, position, *common, table_SW.stride(0), rows_TX.stride(0), *strides, waiting,
        width, channels, taps, ahead, next_power_of_2(taps), CHANNELS, EACH=each, PDL=early, num_warps=4,
        launch_pdl=early)
