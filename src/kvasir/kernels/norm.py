"""RMS norm: x / rms(x) * weight, in fp32, rounded once.

Legend: E (or D) the normalised, last dimension. Any leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E] float, weight [E] or broadcastable to x. Returns x's shape and dtype.

    A row's bits do not depend on the other rows: one reduction per row, then only correctly rounded operations.
    """
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.mul_(scale).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    normed = (x * scale).mul_(weight)
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, eps_1: torch.Tensor | None = None) -> torch.Tensor:
    """The fastest plain form for the device; arguments as ``rms_norm_reference``.

    ``eps_1``: eps as an fp32 tensor [1] on x's device. It saves a CPU two calls, but a row's last bit may then depend on its
    batch: without it, it never does.
    """
    if x.is_cuda and weight.dtype == x.dtype:
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], eps=eps).mul_(weight)
    if eps_1 is None:
        return rms_norm_reference(x, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    normed = (x * torch.addcmul(eps_1, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)
