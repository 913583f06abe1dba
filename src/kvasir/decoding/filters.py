"""Which tokens may still be drawn: top-k, top-p and min-p, and the most likely alternatives. Exact under ties.

Every comparison uses one total order: the larger value first, the lower id first among equals. It is written as a distinct
64-bit key per entry, so a threshold cuts at exactly the same place on every device and in every batch.

Legend: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch

_LOW = 0x7FFFFFFF


def order_keys(x_RV: torch.Tensor) -> torch.Tensor:
    """[R, V] int64 keys, distinct within a row: larger fp32 value first, lower id first among equals."""
    bits = (x_RV + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal
    ordered = bits ^ ((bits >> 31) & _LOW)
    last = x_RV.shape[-1] - 1
    return (ordered.long() << 32) | torch.arange(last, -1, -1, device=x_RV.device)


def _values(keys: torch.Tensor) -> torch.Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & _LOW)).view(torch.float32)


def largest(x_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest entries a row, in order: values [R, count] fp32 and ids [R, count] int64."""
    keys = order_keys(x_RV).topk(count).values
    return _values(keys), x_RV.shape[-1] - 1 - (keys & 0xFFFFFFFF)


def keep_top(x_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, most: int) -> torch.Tensor:
    """Mask [R, V] bool of what top-k, and then top-p over what top-k left, keep.

    ``x_RV`` fp32 are log-weights whose row maximum is 0; ``top_k_R`` int64 in [1, V]; ``top_p_R`` float64, ``inf`` where
    off; ``most``: the largest ``top_k_R`` (known to the host, so that nothing is read back). top-p keeps the shortest run
    of tokens, in order, whose mass reaches p; the first is always kept.
    """
    keys = order_keys(x_RV)
    ranked = keys.topk(most).values if most < x_RV.shape[-1] else keys.sort(dim=-1, descending=True).values
    within = torch.arange(ranked.shape[-1], device=x_RV.device) < top_k_R[:, None]
    # fp64 sums: zeros appended for a neighbour's larger k change no bit.
    weight = _values(ranked).exp().double().masked_fill(~within, 0.0)
    mass = weight.cumsum(-1)
    kept = (within & (mass - weight < top_p_R[:, None] * mass[:, -1:])).sum(-1, keepdim=True).clamp_(min=1)
    return keys >= ranked.gather(-1, kept - 1)
