"""The gated delta rule: S <- exp(g) S + beta k (v - k' exp(g) S)', y = S' q, for one head's matrix S [D, V].

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), with the convolution, the L2 norms and the gates of
Qwen3-Next before it. All numbers are fp32 from the convolution on.

``recurrence`` takes row after row and is the reference. ``chunk_scan`` takes ``CHUNK`` rows at once, in the WY form of
the paper (section 3.3); its chunks end at absolute multiples of ``CHUNK``, so that a prompt that is cut there gives the
same bits. ``step_reference`` runs a step over state pages so that it may be run again.

The decay is one number a head, or one for each channel of its keys (Kimi Delta Attention, Kimi Team 2025,
arXiv:2510.26692), where exp(g) scales the rows of S. Then a row has H D decays before its strengths, not H after them.

On a GPU ``step`` walks the rows that are not folded yet, and then those of a short span: a state stays in registers,
and a row's bits depend on no cut. Rows that earlier steps left are folded while the kernel before still runs. It reads
and writes 4 D V bytes a head, and a row once for each block of values. What heads share of a page is written by a
second launch. Longer spans go to `kvasir.kernels.gated_chunks`, in exact mode row by row.

Legend: T rows, H heads of values, D key dim, V value dim, C mixed row (queries, keys, values), J taps, N decays of a
row (H, or H D), X = C + N + H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels import gated_chunks
from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.gated_chunks import CHUNK, Chunks
from kvasir.types import StepBatch

VALUES, WARPS = 32, 4  # most values of a program, whose state is in its registers, and its warps
CHANNELS = 256  # of a program that writes what heads share
L2_EPS = 1e-6  # of the norms of queries and keys, as the models were trained


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a layer that the recurrence reads: ``conv_CJ`` [C, J], ``log_decay_H`` [H] and ``bias_N`` [N] fp32,
    and the number of heads of keys."""

    conv_CJ: torch.Tensor
    log_decay_H: torch.Tensor
    bias_N: torch.Tensor
    key_heads: int

    @property
    def channelwise(self) -> bool:
        """Whether each channel of a key has a decay of its own."""
        return self.bias_N.numel() > self.log_decay_H.numel()

    @property
    def gates(self) -> tuple[int, int]:
        """Places in a row at which its strengths and its decays begin."""
        channels, heads = self.conv_CJ.shape[0], self.log_decay_H.numel()
        return (channels + self.bias_N.numel(), channels) if self.channelwise else (channels, channels + heads)


def convolve(rows_TC: torch.Tensor, tail: torch.Tensor, conv_CJ: torch.Tensor) -> torch.Tensor:
    """silu of the causal convolution of rows [T, C] that follow ``tail`` [J - 1, C]: [T, C] fp32.

    Taps are added one after the other, so that a row's bits do not depend on the other rows.
    """
    padded, taps, num_rows = torch.cat((tail, rows_TC)).float(), conv_CJ.shape[1], len(rows_TC)
    total = padded[:num_rows] * conv_CJ[:, 0].float()
    for tap in range(1, taps):
        total = total + padded[tap : tap + num_rows] * conv_CJ[:, tap].float()
    return total * sigmoid(total, exact=True)


def inputs(
    rows_TX: torch.Tensor, tail: torch.Tensor, weights: Weights, dims: tuple[int, int, int]
) -> tuple[torch.Tensor, ...]:
    """Queries and keys [T, H, D], values [T, H, V], log decays [T, H] or [T, H, D] and write strengths [T, H] of rows
    [T, X], all fp32. A row has strengths and decays before their functions. ``dims``: H, D, V."""
    heads, key_dim, value_dim = dims
    if weights.channelwise:
        mixed, a_TN, b_TH = rows_TX.split([len(weights.conv_CJ), heads * key_dim, heads], -1)
    else:
        mixed, b_TH, a_TN = rows_TX.split([len(weights.conv_CJ), heads, heads], -1)
    mixed = convolve(mixed, tail, weights.conv_CJ)
    side = weights.key_heads * key_dim
    q, k, v = mixed.split([side, side, heads * value_dim], -1)
    q, k = (_unit(x.unflatten(-1, (weights.key_heads, key_dim))) for x in (q, k))
    each = heads // weights.key_heads
    q, k = (x.repeat_interleave(each, 1) for x in (q * key_dim**-0.5, k))
    # In fp64, so that rounding hides which of its two exponentials a CPU took for a row of this batch.
    steps, rate_H = F.softplus(a_TN.double() + weights.bias_N), weights.log_decay_H.double().exp()
    decay = -rate_H.unsqueeze(-1) * steps.unflatten(-1, (heads, key_dim)) if weights.channelwise else -rate_H * steps
    return q, k, v.unflatten(-1, (heads, value_dim)), decay.float(), sigmoid(b_TH.float(), exact=True)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recurrence(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HDV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row after row: results [T, H, V] and the state [H, D, V] after the last one, in the state's dtype. The given
    state is left alone. Decays may be [T, H, D]. Shapes do not depend on the batch, and so do not a row's bits."""
    out = torch.empty_like(v_THV)
    for t in range(len(q_THD)):
        state_HDV = state_HDV * decay_TH[t].exp().view(len(state_HDV), -1, 1)
        seen = (state_HDV * k_THD[t].unsqueeze(-1)).sum(1)
        change = (v_THV[t] - seen) * beta_TH[t].unsqueeze(-1)
        state_HDV = state_HDV + k_THD[t].unsqueeze(-1) * change.unsqueeze(1)
        out[t] = (state_HDV * q_THD[t].unsqueeze(-1)).sum(1)
    return out, state_HDV


def chunk_scan(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HDV: torch.Tensor,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what ``recurrence`` does, ``CHUNK`` rows at once. ``start``: absolute position of the first row."""
    rows, parts, at, chunk = len(q_THD), [], 0, _chunk if decay_TH.dim() == 2 else _channel_chunk
    while at < rows:
        end = min(rows, at + CHUNK - (start + at) % CHUNK)
        part, state_HDV = chunk(
            *(x[at:end].transpose(0, 1) for x in (q_THD, k_THD, v_THV, decay_TH, beta_TH)), state_HDV
        )
        parts.append(part.transpose(0, 1))
        at = end
    return (torch.cat(parts) if parts else torch.empty_like(v_THV)), state_HDV


def _chunk(q_HTD, k_HTD, v_HTV, decay_HT, beta_HT, state_HDV) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: what its rows write is solved for at once, because each row reads what earlier ones wrote."""
    total_HT = decay_HT.cumsum(-1)
    lower = torch.ones(2 * (q_HTD.shape[1],), dtype=torch.bool, device=q_HTD.device).tril()
    between = (total_HT.unsqueeze(-1) - total_HT.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    keys_HTD = k_HTD * beta_HT.unsqueeze(-1)
    system = (keys_HTD @ k_HTD.mT) * between
    seen = (keys_HTD * total_HT.exp().unsqueeze(-1)) @ state_HDV
    written = torch.linalg.solve_triangular(
        system, v_HTV * beta_HT.unsqueeze(-1) - seen, upper=False, unitriangular=True
    )
    out = (q_HTD * total_HT.exp().unsqueeze(-1)) @ state_HDV + ((q_HTD @ k_HTD.mT) * between) @ written
    last = total_HT[:, -1:]
    kept = state_HDV * last.exp().unsqueeze(-1)
    return out, kept + (k_HTD * (last - total_HT).exp().unsqueeze(-1)).mT @ written


def _channel_chunk(q_HTD, k_HTD, v_HTV, decay_HTD, beta_HT, state_HDV) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk with a decay for each channel. Decays of two rows are multiplied channel by channel, never divided, so
    that none overflows."""
    total = decay_HTD.cumsum(1)
    lower = torch.ones(2 * (q_HTD.shape[1],), dtype=torch.bool, device=q_HTD.device).tril()
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(~lower[..., None], float("-inf")).exp()
    weighted = between * k_HTD.unsqueeze(1)  # [H, T, T, D]
    keys_HTD = k_HTD * beta_HT.unsqueeze(-1)
    system = (weighted @ keys_HTD.unsqueeze(-1)).squeeze(-1)
    seen = (keys_HTD * total.exp()) @ state_HDV
    written = torch.linalg.solve_triangular(
        system, v_HTV * beta_HT.unsqueeze(-1) - seen, upper=False, unitriangular=True
    )
    attention = (weighted @ q_HTD.unsqueeze(-1)).squeeze(-1)
    out = (q_HTD * total.exp()) @ state_HDV + attention @ written
    last = total[:, -1:]
    return out, state_HDV * last.exp().mT + (k_HTD * (last - total).exp()).mT @ written


# ------------------------------------------------------------------------------------------ a step over the state pages


def step_reference(
    rows_TX: torch.Tensor,
    planes: dict[str, torch.Tensor],
    pages: list[tuple[int, int]],
    starts: list[int],
    lengths: list[int],
    weights: Weights,
    exact: bool = False,
) -> torch.Tensor:
    """Results [T, H, V] fp32 of a step's rows [T, X], span after span.

    ``planes``: those of `kvasir.layers.spec.GatedDeltaSpec.state`, with pages first. ``pages``: what each span reads,
    and what it writes if it is longer than the look-ahead. A page's matrices and tail stand at its position; the rows
    from there to the span's start are folded in first. A short span leaves its own rows to the look-ahead slots. So
    the step may be run again, with these rows or others. ``exact``: row by row, whatever the length.
    """
    matrix, tails, aheads, position = (planes[name] for name in ("matrix", "tail", "ahead", "position"))
    ahead, taps, (_, *dims) = aheads.shape[1], weights.conv_CJ.shape[1], matrix.shape
    found, at = [], 0
    for (read, write), start, length in zip(pages, starts, lengths):
        rows, at = rows_TX[at : at + length], at + length
        short = length <= ahead
        if start:
            base, state, tail = int(position[read]), matrix[read].float(), tails[read]
            assert 0 <= start - base <= ahead, f"a state at {base} cannot reach {start}"
        else:  # whatever the page holds belongs to an earlier sequence
            base, state, tail = 0, torch.zeros_like(matrix[read], dtype=torch.float32), torch.zeros_like(tails[read])
        if start > base:
            state, tail = _advance(aheads[read, : start - base], state, tail, weights, dims)
        if short and (start > base or not start):
            matrix[read], tails[read], position[read] = state, tail, start
            state = matrix[read].float()  # as a step that runs again reads it
        scan = recurrence if short or exact else chunk_scan
        more = {} if scan is recurrence else {"start": start}
        out, state = scan(*inputs(rows, tail, weights, tuple(dims)), state, **more)
        found.append(out)
        if short:
            aheads[read, :length] = rows
        else:
            end = start + length
            matrix[write], tails[write], position[write] = state, rows[1 - taps :, : tails.shape[-1]], end
    return torch.cat(found)


def _advance(rows_TX, state_HDV, tail, weights: Weights, dims) -> tuple[torch.Tensor, torch.Tensor]:
    """State and tail after the rows [T, X]."""
    _, state_HDV = recurrence(*inputs(rows_TX, tail, weights, tuple(dims)), state_HDV)
    return state_HDV, torch.cat((tail, rows_TX[:, : tail.shape[1]]))[len(rows_TX) :]


# -------------------------------------------------------------------------------------------------------------- kernels


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
def _walk(rows_ptr, conv_ptr, decay_ptr, bias_ptr, matrix_ptr, tail_ptr, ahead_ptr, position_ptr, base_ptr, table_ptr,
          context_ptr, row_start_ptr, length_ptr, out_ptr, width, page_m, page_t, page_a, page_p, eps, scale,
          H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, X: tl.constexpr, C: tl.constexpr,
          STRENGTH: tl.constexpr, DECAY: tl.constexpr, TAPS: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr,
          BV: tl.constexpr, EACH: tl.constexpr, LONG: tl.constexpr, CHANNELWISE: tl.constexpr, PDL: tl.constexpr):
    """Some values of one head of one span: row after row from the base of its state. Taps are added from the oldest
    row to the newest. ``STRENGTH``, ``DECAY``: where a row has them. ``LONG``: long spans run here, too. The base is
    left to ``_settle``, which changes positions. Blocks of a head are neighbours in the grid, as in memory."""
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
    # Earlier steps left these rows, so they are folded into the state while the kernel before ends.
    row = ahead_ptr + read * page_a
    for _ in range(base, start):
        q3, k3, v3, b, a = _load_row(row, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY, CHANNELWISE)
        key = _convolved(k0, k1, k2, k3, kw0, kw1, kw2, kw3)
        value = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3)
        state = _write(state, key, value, b, a, rate, eps, CHANNELWISE)
        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3
        row += X
    if short:
        tl.store(matrix_ptr + read * page_m + cell, state, mask=in_dv)
        state = state.to(matrix_ptr.dtype.element_ty).to(tl.float32)  # as a step that runs again reads it
    if PDL:
        tl.extra.cuda.gdc_wait()
    tl.store(base_ptr + span, base, mask=is_first)
    row, out = rows_ptr + first.to(tl.int64) * X, out_ptr + (first.to(tl.int64) * H + head) * V + v
    for _ in range(0, length):
        q3, k3, v3, b, a = _load_row(row, q_at, k_at, v_at, in_d, in_v, bias, head, d, D, STRENGTH, DECAY, CHANNELWISE)
        query = _convolved(q0, q1, q2, q3, qw0, qw1, qw2, qw3)
        key = _convolved(k0, k1, k2, k3, kw0, kw1, kw2, kw3)
        value = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + eps))
        state = _write(state, key, value, b, a, rate, eps, CHANNELWISE)
        tl.store(out, tl.sum(state * query[:, None], 0), mask=in_v)
        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3
        row += X
        out += H * V
    if short == 0:
        tl.store(matrix_ptr + write * page_m + cell, state, mask=in_dv)


@jit
def _settle(rows_ptr, tail_ptr, ahead_ptr, base_ptr, position_ptr, table_ptr, context_ptr, row_start_ptr, length_ptr,
            width, page_t, page_a, page_p, X: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, AHEAD: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
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
    target = tl.where(short, read, write)
    end = tl.where(short, start, start + length)
    row = tl.arange(0, ROWS)
    position = end - (TAPS - 1) + row
    mask = (row < TAPS - 1)[:, None] & (channel < C)[None, :]
    from_tail, from_here = (position < base)[:, None], (position >= start)[:, None]
    tail = tl.load(tail_ptr + read * page_t + (position - base + TAPS - 1)[:, None] * C + channel[None, :],
                   mask=mask & from_tail & old, other=0.0)
    kept = tl.load(ahead_ptr + read * page_a + (position - base)[:, None] * X + channel[None, :],
                   mask=mask & (from_tail == 0) & (from_here == 0), other=0.0)
    here = tl.load(rows_ptr + (first + position - start)[:, None].to(tl.int64) * X + channel[None, :],
                   mask=mask & from_here, other=0.0)
    last = tl.where(from_tail, tail, tl.where(from_here, here, kept))
    tl.debug_barrier()  # slots are read before they are written
    tl.store(tail_ptr + target * page_t + row[:, None] * C + channel[None, :], last, mask=mask)
    for i in range(0, tl.where(short, length, 0)):
        value = tl.load(rows_ptr + (first + i).to(tl.int64) * X + channel, mask=channel < X, other=0.0)
        tl.store(ahead_ptr + read * page_a + i * X + channel, value, mask=channel < X)
    if tl.program_id(1) == 0:
        tl.store(position_ptr + target * page_p, end.to(tl.int64))


def step(
    rows_TX: torch.Tensor,
    planes: dict[str, torch.Tensor],
    table_SW: torch.Tensor,
    batch: StepBatch,
    weights: Weights,
    exact: bool = False,
    out_THV: torch.Tensor | None = None,
    scan: Callable[..., None] = gated_chunks.scan,
) -> torch.Tensor:
    """Compute ``step_reference``, on a GPU row by row in two launches, and with ``exact`` unset long spans by ``scan``,
    which has the arguments of ``gated_chunks.scan``, except in fp16. Short spans run without looking at what the host
    knows, so that they can be captured.

    ``table_SW``: int32, its first two columns are the pages that each span reads and writes. ``batch``: where its spans
    lie. ``out_THV``: fp32, the memory for the result; None: new memory.
    """
    if not use_triton(rows_TX) or weights.conv_CJ.shape[1] > 4:
        return _plain_step(rows_TX, planes, table_SW, batch, weights, exact, out_THV)
    matrix, tails, aheads, position = (planes[name] for name in ("matrix", "tail", "ahead", "position"))
    (_, heads, key_dim, value_dim), taps, channels = matrix.shape, weights.conv_CJ.shape[1], tails.shape[-1]
    spans, block, ahead = len(batch.context), min(VALUES, next_power_of_2(value_dim)), aheads.shape[1]
    if out_THV is None:
        out_THV = torch.empty(len(rows_TX), heads, value_dim, dtype=torch.float32, device=rows_TX.device)
    rows_TX = rows_TX.contiguous()
    base_S = torch.empty(spans, dtype=torch.int32, device=rows_TX.device)
    each, early = batch.span_lengths is not None, pdl(rows_TX.device)
    by_row = exact or not scans(rows_TX.dtype, key_dim, value_dim)
    common = table_SW, batch.context, batch.row_start, batch.span_lengths if each else batch.row_start
    chunks = None if each or by_row else Chunks.of_batch(batch, ahead)
    if chunks is not None:
        bases = position.index_select(0, table_SW[:, 0].long())
        scan(rows_TX, planes, *common[:3], bases, chunks, weights, out_THV, L2_EPS)
    _walk[(cdiv(value_dim, block), heads, spans)](
        rows_TX, weights.conv_CJ, weights.log_decay_H, weights.bias_N, matrix, tails, aheads, position, base_S, *common,
        out_THV, table_SW.stride(0), matrix.stride(0), tails.stride(0), aheads.stride(0), position.stride(0), L2_EPS,
        key_dim**-0.5, heads, weights.key_heads, key_dim, value_dim, rows_TX.shape[1], channels, *weights.gates, taps,
        ahead, next_power_of_2(key_dim), block, EACH=each, LONG=by_row, CHANNELWISE=weights.channelwise, PDL=early,
        num_warps=WARPS, launch_pdl=early)
    _settle[(spans, cdiv(rows_TX.shape[1], CHANNELS))](
        rows_TX, tails, aheads, base_S, position, *common, table_SW.stride(0), tails.stride(0), aheads.stride(0),
        position.stride(0), rows_TX.shape[1], channels, taps, ahead, next_power_of_2(taps), CHANNELS, EACH=each,
        PDL=early, num_warps=4, launch_pdl=early)
    return out_THV


def scans(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether long spans of such heads run in chunks on a GPU. In fp16, with heads that do not fill a block, the scan
    has given NaN there, and why is not known yet."""
    fill = all(size == max(16, next_power_of_2(size)) for size in (key_dim, value_dim))
    return dtype == torch.float32 or (dtype == torch.bfloat16 and fill)


def _plain_step(rows_TX, planes, table_SW, batch, weights, exact, out_THV) -> torch.Tensor:
    """``step`` in torch. The host's copies say where spans lie, or ``span_lengths`` where each row has a span; there
    padding is behind all other rows."""
    starts, lengths, pages = batch.starts, batch.lengths, [tuple(pair) for pair in table_SW[:, :2].tolist()]
    if batch.span_lengths is not None:
        lengths = batch.span_lengths.tolist()
        firsts = [row for row, length in enumerate(lengths) if length > 0]
        starts, lengths, pages = ([part[row] for row in firsts] for part in (starts, lengths, pages))
    count = sum(lengths)
    if not count:
        found_THV = torch.zeros(0, *planes["matrix"].shape[1::2], device=rows_TX.device)
    else:
        found_THV = step_reference(rows_TX, planes, pages, starts, lengths, weights, exact)
    if len(found_THV) < len(rows_TX):
        found_THV = F.pad(found_THV, (0, 0, 0, 0, 0, len(rows_TX) - len(found_THV)))
    return found_THV if out_THV is None else out_THV.copy_(found_THV)
