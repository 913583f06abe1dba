"""The gated delta rule: S <- exp(g) S + beta k (v - k' exp(g) S)', y = S' q, for one head's matrix S [D, V].

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), with the convolution, the L2 norms and the gates of
Qwen3-Next before it. All numbers are fp32 from the convolution on.

``recurrence`` takes row after row and is the reference. ``chunk_scan`` takes ``CHUNK`` rows at once, in the WY form of
the paper (section 3.3); its chunks end at absolute multiples of ``CHUNK``, so that a prompt that is cut there gives the
same bits. ``step_reference`` runs a step over state pages so that it may be run again.

The decay is one number a head, or one for each channel of its keys (Kimi Delta Attention, Kimi Team 2025,
arXiv:2510.26692), where exp(g) scales the rows of S. Then a row has H D decays before its strengths, not H after them.

On a GPU ``step`` gives short spans, and in exact mode all, to `kvasir.kernels.gated_rows`, and longer ones to
`kvasir.kernels.gated_chunks`.

Legend: T rows, H heads of values, D key dim, V value dim, C mixed row (queries, keys, values), J taps, N decays of a
row (H, or H D), X = C + N + H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels import gated_chunks
from kvasir.kernels._triton import next_power_of_2, use_triton
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.gated_chunks import CHUNK, Chunks
from kvasir.kernels.gated_rows import walk
from kvasir.types import StepBatch

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
    waiting: int = 1,
) -> torch.Tensor:
    """Results [T, H, V] fp32 of a step's rows [T, X], span after span.

    ``planes``: those of `kvasir.layers.spec.GatedDeltaSpec.state`, with pages first. ``pages``: what each span reads,
    and what it writes if it is longer than the look-ahead. A page's matrices and tail stand at its position; the rows
    from there to the span's start are folded in first. A short span leaves its own rows to the look-ahead slots. So
    the step may be run again, with these rows or others. ``exact``: row by row, whatever the length. ``waiting``: with
    fewer folded rows a short span leaves the page as it is and its rows behind these, where there are slots for them.
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
        waits = start - base
        if waits:
            state, tail = _advance(aheads[read, :waits], state, tail, weights, dims)
        stays = bool(start) and waits < waiting and waits + length <= ahead
        if short and not stays:
            matrix[read], tails[read], position[read] = state, tail, start
            state = matrix[read].float()  # as a step that runs again reads it
        scan = recurrence if short or exact else chunk_scan
        more = {} if scan is recurrence else {"start": start}
        out, state = scan(*inputs(rows, tail, weights, tuple(dims)), state, **more)
        found.append(out)
        if short:
            first = waits if stays else 0
            aheads[read, first : first + length] = rows
        else:
            end = start + length
            matrix[write], tails[write], position[write] = state, rows[1 - taps :, : tails.shape[-1]], end
    return torch.cat(found)


def _advance(rows_TX, state_HDV, tail, weights: Weights, dims) -> tuple[torch.Tensor, torch.Tensor]:
    """State and tail after the rows [T, X]."""
    _, state_HDV = recurrence(*inputs(rows_TX, tail, weights, tuple(dims)), state_HDV)
    return state_HDV, torch.cat((tail, rows_TX[:, : tail.shape[1]]))[len(rows_TX) :]


def step(
    rows_TX: torch.Tensor,
    planes: dict[str, torch.Tensor],
    table_SW: torch.Tensor,
    batch: StepBatch,
    weights: Weights,
    exact: bool = False,
    out_THV: torch.Tensor | None = None,
    scan: Callable[..., None] = gated_chunks.scan,
    waiting: int | None = None,
) -> torch.Tensor:
    """Compute ``step_reference``, on a GPU row by row in two launches, and with ``exact`` unset long spans by ``scan``,
    which has the arguments of ``gated_chunks.scan``, except in fp16. Short spans run without looking at what the host
    knows, so that they can be captured.

    ``table_SW``: int32, its first two columns are the pages that each span reads and writes. ``batch``: where its spans
    lie. ``out_THV``: fp32, the memory for the result; None: new memory. ``waiting``: as in
    ``gated_rows.walk``.
    """
    if not use_triton(rows_TX) or weights.conv_CJ.shape[1] > 4:
        return _plain_step(rows_TX, planes, table_SW, batch, weights, exact, out_THV, waiting or 1)
    heads, key_dim, value_dim = planes["matrix"].shape[1:]
    if out_THV is None:
        out_THV = torch.empty(len(rows_TX), heads, value_dim, dtype=torch.float32, device=rows_TX.device)
    by_row = exact or not scans(rows_TX.dtype, key_dim, value_dim)
    alone = by_row or batch.span_lengths is not None
    chunks = None if alone else Chunks.of_batch(batch, planes["ahead"].shape[1])
    if chunks is not None:
        bases = planes["position"].index_select(0, table_SW[:, 0].long())
        rows_TX = rows_TX.contiguous()
        scan(rows_TX, planes, table_SW, batch.context, batch.row_start, bases, chunks, weights, out_THV, L2_EPS)
    walk(rows_TX, planes, table_SW, batch, weights, out_THV, L2_EPS, by_row, waiting)
    return out_THV


def scans(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether long spans of such heads run in chunks on a GPU. In fp16, with heads that do not fill a block, the scan
    has given NaN there, and why is not known yet."""
    fill = all(size == max(16, next_power_of_2(size)) for size in (key_dim, value_dim))
    return dtype == torch.float32 or (dtype == torch.bfloat16 and fill)


def _plain_step(rows_TX, planes, table_SW, batch, weights, exact, out_THV, waiting) -> torch.Tensor:
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
        found_THV = step_reference(rows_TX, planes, pages, starts, lengths, weights, exact, waiting=waiting)
    if len(found_THV) < len(rows_TX):
        found_THV = F.pad(found_THV, (0, 0, 0, 0, 0, len(rows_TX) - len(found_THV)))
    return found_THV if out_THV is None else out_THV.copy_(found_THV)
