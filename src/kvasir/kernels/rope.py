"""Rotary embedding applied to rows: dimension i of a head is paired with i + D/2 and turned by the row's angle.

Legend: T rows, H heads (queries and keys together), D head dim.
"""

from __future__ import annotations

import torch


def rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Returns a new [T, H, D] tensor in x's dtype.

    ``cos_T1D`` and ``sin_T1D`` are fp32, the angle's cosine twice over and its sine as [-sin, sin]: see ``layers.rope``.
    """
    half = x_THD.shape[-1] // 2
    swapped = x_THD.roll(half, -1)
    return (x_THD * cos_T1D).add_(swapped * sin_T1D).to(x_THD.dtype)
