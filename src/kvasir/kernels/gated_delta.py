"""The gated delta rule: S <- exp(g) S + beta k (v - k' exp(g) S)', y = S' q, for one head's matrix S [D, V].

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), with the convolution, the L2 norms and the gates of
Qwen3-Next before it. All numbers are fp32 from the convolution on.

``recurrence`` takes row after row and is the reference. ``chunk_scan`` takes ``CHUNK`` rows at once, in the WY form of
the paper (section 3.3); its chunks end at absolute multiples of ``CHUNK``, so that a prompt that is cut there gives the
same bits. ``step_reference`` runs a step over state pages so that it may be run again.

Legend: T rows, H heads of values, D key dim, V value dim, C mixed row (queries, keys, values), X = C + 2 H, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvasir.kernels.activation import sigmoid

CHUNK = 64  # rows
L2_EPS = 1e-6  # of the norms of queries and keys, as the models were trained


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a layer that the recurrence reads: ``conv_CJ`` [C, J], ``log_decay_H`` and ``bias_H`` [H] fp32, and
    the number of heads of keys."""

    conv_CJ: torch.Tensor
    log_decay_H: torch.Tensor
    bias_H: torch.Tensor
    key_heads: int


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
    """Queries and keys [T, H, D], values [T, H, V], log decays [T, H] and write strengths [T, H] of rows [T, C + 2 H]
    (mixed row, then strengths and decays before their functions), all fp32. ``dims``: H, D, V."""
    heads, key_dim, value_dim = dims
    mixed, b_TH, a_TH = rows_TX.split([rows_TX.shape[1] - 2 * heads, heads, heads], -1)
    mixed = convolve(mixed, tail, weights.conv_CJ)
    side = weights.key_heads * key_dim
    q, k, v = mixed.split([side, side, heads * value_dim], -1)
    q, k = (_unit(x.unflatten(-1, (weights.key_heads, key_dim))) for x in (q, k))
    each = heads // weights.key_heads
    q, k = (x.repeat_interleave(each, 1) for x in (q * key_dim**-0.5, k))
    # In fp64, so that rounding hides which of its two exponentials a CPU took for a row of this batch.
    decay = -weights.log_decay_H.double().exp() * F.softplus(a_TH.double() + weights.bias_H)
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
    state is left alone. Shapes do not depend on the batch, and so do not a row's bits."""
    out = torch.empty_like(v_THV)
    for t in range(len(q_THD)):
        state_HDV = state_HDV * decay_TH[t].exp()[:, None, None]
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
    rows, parts, at = len(q_THD), [], 0
    while at < rows:
        end = min(rows, at + CHUNK - (start + at) % CHUNK)
        part, state_HDV = _chunk(
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
    """Results [T, H, V] fp32 of a step's rows [T, C + 2 H], span after span.

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
    """State and tail after the rows [T, C + 2 H]."""
    _, state_HDV = recurrence(*inputs(rows_TX, tail, weights, tuple(dims)), state_HDV)
    return state_HDV, torch.cat((tail, rows_TX[:, : tail.shape[1]]))[len(rows_TX) :]
