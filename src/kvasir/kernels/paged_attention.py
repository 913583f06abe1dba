"""Attention of ragged spans over paged keys and values: the reference.

Legend: T rows, S spans, L rows of one span, H query heads, G KV heads, D head dim, N keys, P slots per page.
"""

from __future__ import annotations

import torch

INF = float("inf")


def tree_bits(ancestors_LA: torch.Tensor) -> torch.Tensor:
    """Unpack ``StepBatch.ancestors`` of one span: bool [L, L], true where row j is an ancestor of row i or i itself."""
    j = torch.arange(ancestors_LA.shape[0], device=ancestors_LA.device)
    return (ancestors_LA[:, j // 64] >> (j % 64)) & 1 == 1


def visible(start: int, length: int, first: int, window: int | None = None, ancestors_LA: torch.Tensor | None = None,
            positions_L: torch.Tensor | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which slots ``first .. start + length`` each row of a span sees: bool [L, start + length - first].

    A tree span (``ancestors_LA`` given, with the RoPE ``positions_L`` of its rows) sees the context and its ancestors;
    for its window a row stands at its depth, not at its slot.
    """
    keys = torch.arange(first, start + length, device=device)
    rows = torch.arange(start, start + length, device=device)
    if ancestors_LA is None:
        seen = keys <= rows[:, None]
    else:
        seen = torch.cat([torch.ones(length, start - first, dtype=torch.bool, device=device), tree_bits(ancestors_LA)], 1)
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
    """One span after the other: [T, H, D] in q's dtype and the log-sum-exp [T, H]. Reads only slots that a row sees."""
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
