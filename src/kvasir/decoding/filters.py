"""The most likely alternatives of a row, in the sampler's total order (see ``kernels/sample.py``), exact under ties.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from kvasir.kernels.sample import keep_top, order_keys, ordered_values

__all__ = ["keep_top", "largest"]


def largest(x_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest entries of each row, in order: values [R, count] fp32 and ids [R, count] int64."""
    keys = order_keys(x_RV).topk(count).values
    return ordered_values(keys), x_RV.shape[-1] - 1 - (keys & 0xFFFFFFFF)
