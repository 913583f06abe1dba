"""The most likely alternatives of a row, in the sampler's total order (see ``kernels/sample.py``), exact under ties; and how sure they are.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from kvasir.kernels.sample import keep_top, order_keys, ordered_values

__all__ = ["keep_top", "largest", "mean_surprise"]


def largest(x_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest entries a row, in order: values [R, count] fp32 and ids [R, count] int64."""
    keys = order_keys(x_RV).topk(count).values
    return ordered_values(keys), x_RV.shape[-1] - 1 - (keys & 0xFFFFFFFF)


def mean_surprise(top_RK: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """Token confidence (Fu et al. 2025, eq. 2): minus the mean of the first ``count_R`` of a row's largest log-probabilities,
    [R] fp32. 0 where ``count_R`` is; in fp64 inside, so that a row's value does not depend on how wide its neighbours ask."""
    count_R = count_R.clamp(max=top_RK.shape[-1])
    kept = torch.arange(top_RK.shape[-1], device=top_RK.device) < count_R[:, None]
    return (-top_RK.double().masked_fill(~kept, 0.0).sum(-1) / count_R.clamp(min=1)).float()
