"""Rotary embedding applied to rows: dimension i of a head is paired with i + D/2 and turned by the row's angle.

Legend: T rows, H heads (queries and keys together), D head dim.
"""

from __future__ import annotations

import torch


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns a new [T, H, D] tensor in x's dtype.

    ``cos`` [T, 1, 1, D/2] and ``sin`` [T, 1, 2, D/2] are fp32, the sine with the sign of each half: see ``layers.rope``.
    """
    rows, heads, dim = x_THD.shape
    halves = x_THD.view(rows, heads, 2, dim // 2)
    if not x_THD.is_cuda and x_THD.dtype == torch.float32:  # a call fewer, and none that only moves
        turned = halves * cos
        (x, y), (x_out, y_out), (minus, plus) = halves.unbind(2), turned.unbind(2), sin.unbind(2)
        x_out.addcmul_(y, minus)
        y_out.addcmul_(x, plus)
        return turned.view(rows, heads, dim)
    return (halves * cos).add_(halves.flip(2) * sin).to(x_THD.dtype).view(rows, heads, dim)
