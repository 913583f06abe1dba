"""Emulate ScaleSearchAttention (arXiv:2605.12464) in plain torch and table its error: no speed is measured or claimed.

    python -m kvasir_lab.studies ssa_study RESULT.json [--keys 2048] [--heads 8] [--dim 128] [--outlier 16]

Queries, keys, values and weights are in NVFP4: E2M1 in blocks of 16 along the summed dimension, with E4M3 scales. The
arms add the published parts one after the other: scales by search, a Hadamard rotation of queries and keys, the mean of
keys and values kept apart in full precision, and the first and latest keys in full precision. The paper's split of
outliers is not public; the mean is our choice. A softmax does not change when a vector is taken from all keys, and the
mean of the values is added to the result, so the split itself is exact.

Inputs are drawn: normal numbers, with two channels of the keys shifted by ``--outlier``, and normal ones without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels.weight_codes import numbers_e2m1, quantise_nvfp4, tensor_scale_nvfp4, unpack_nibbles
from kvasir.kv.rotation import Rotation
from kvasir_lab.study import Arms, Report, study

BLOCK = 16


@dataclass(frozen=True)
class Parts:
    """The parts of the method that an arm has. ``sinks`` and ``recent``: keys in full precision."""

    search: bool = False
    rotate: bool = False
    split: bool = False
    sinks: int = 0
    recent: int = 0


ARMS = {
    "nvfp4": Parts(),
    "search": Parts(True),
    "search, rotation": Parts(True, True),
    "search, rotation, split": Parts(True, True, True),
    "scale search attention": Parts(True, True, True, 16, 128),
    "the same without search": Parts(False, True, True, 16, 128),
}


def rounded(x: torch.Tensor, search: bool) -> torch.Tensor:
    """x [..., D] as NVFP4 keeps it, blocks along the last dimension, each matrix with one fp32 scale."""
    rows = x.reshape(-1, x.shape[-1])
    unit = tensor_scale_nvfp4(rows)
    codes, scales = quantise_nvfp4(rows, unit, search)
    numbers = numbers_e2m1(unpack_nibbles(codes)).unflatten(-1, (-1, BLOCK))
    return (numbers * scales.float().unsqueeze(-1) * unit).flatten(-2).view(x.shape)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Parts | None) -> torch.Tensor:
    """Attention of the latest rows q [H, M, D] over k and v [H, N, D], fp32, N a multiple of 16; None: exact.

    Weights are rounded as the kernel has them, with the largest of a row at one, and are divided by their own sum.
    """
    scale = q.shape[-1] ** -0.5
    if parts is None:
        return (q @ k.mT * scale).softmax(-1) @ v
    count = k.shape[1]
    exact = torch.zeros(count, dtype=torch.bool)
    exact[: parts.sinks] = True
    exact[count - parts.recent :] = True
    if parts.rotate:
        rotation = Rotation(q.shape[-1], q.shape[-1], signs=True)
        q, k = rotation.apply(q), rotation.apply(k)
    mean_k = k[:, ~exact].mean(1, keepdim=True) if parts.split else torch.zeros_like(k[:, :1])
    mean_v = v[:, ~exact].mean(1, keepdim=True) if parts.split else torch.zeros_like(v[:, :1])
    k, v = k - mean_k, v - mean_v
    low_q, low_k = rounded(q, parts.search), rounded(k, parts.search)
    low_v = rounded(v.mT.contiguous(), parts.search).mT
    scores = torch.where(exact, q @ k.mT, low_q @ low_k.mT) * scale
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = torch.where(exact, weights, rounded(weights, parts.search))
    total = weights.sum(-1, keepdim=True)
    return weights @ torch.where(exact[:, None], v, low_v) / total + mean_v


def drawn(heads: int, keys: int, dim: int, outlier: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [H, 64, D], k and v [H, N, D]; two channels of the keys are shifted by ``outlier``."""
    draw = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(heads, n, dim, generator=draw) for n in (64, keys, keys))
    k[..., :2] += outlier
    return q, k, v + 0.5


@study("ssa-errors")
def main(report: Report, *, keys: int = 2048, heads: int = 8, dim: int = 128, outlier: float = 16.0) -> Arms:
    for name, shift in (("normal", 0.0), ("outliers", outlier)):
        q, k, v = drawn(heads, keys, dim, shift)
        want = attend(q, k, v, None)
        for label, parts in ARMS.items():
            error = float((attend(q, k, v, parts) - want).square().sum() / (want - want.mean()).square().sum())
            yield f"{label}, {name}", {"keys": keys}, {"relative_squared_error": round(error, 6)}
