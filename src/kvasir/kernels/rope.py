"""Rotary embedding applied to rows: dimension i of a head is paired with i + D/2 and turned by the row's angle.

Legend: T rows, H heads (queries and keys together), D head dim.
"""

from __future__ import annotations

import torch


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns a new [T, H, D] tensor in x's dtype.

    ``cos`` [T, 1, 1, D/2] and ``sin`` [T, 1, 2, D/2] are fp32, the sine with the sign of each half: see
    ``layers.rope``. Where they are narrower, the first dimensions are turned and the others are kept.
    """
    rows, heads, dim = x_THD.shape
    turned = 2 * cos.shape[-1]
    if turned < dim:
        return torch.cat((rotate(x_THD[..., :turned].contiguous(), cos, sin), x_THD[..., turned:]), -1)
    halves = x_THD.view(rows, heads, 2, dim // 2)
    return (halves * cos).add_(halves.flip(2) * sin).to(x_THD.dtype).view(rows, heads, dim)
