"""Attention with Q, K, V and P in NVFP4 (ScaleSearchAttention, arXiv:2605.12464), emulated in torch. Lossy; slow.

It is a backend for ``--attention-backend kvasir_lab/ssa_attention.py:search=true,...`` that shows what the method costs
in answers; no speed is measured or claimed. Pages hold plain keys and values. Whenever a row attends, its query, the
keys, the values and its weights are rounded to E2M1 in blocks of 16 along the summed dimension, with E4M3 scales:

- ``search``: scales by search instead of by the largest number.
- ``rotate``: a Hadamard rotation of queries and keys.
- ``split``: the mean of keys, and of values, is kept apart in full precision. The paper's split of outliers is not
  public. The mean is over the keys that the span knows, as in SageAttention (arXiv:2410.02367).
- ``sinks``, ``recent``: that many first keys, and latest keys of a row, are in full precision.

A row's latest values are in full precision until a block of 16 of them is complete, in all arms. All sums are in fp32.

Legend: B sequences or heads, M rows, N keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.backends import torch as reference
from kvasir.kernels.weight_codes import numbers_e2m1, quantise_nvfp4, unpack_nibbles
from kvasir.kv.codec import LayerCache
from kvasir.kv.rotation import Rotation

BLOCK = 16
UNIT = 0.0625  # scale of queries, keys and values, as in the codec nvfp4: magnitudes from 0.006 to 168
WEIGHT_UNIT = 1 / (448 * 6)  # that of weights, of which the largest is 1
ELEMENTS = 1 << 25  # weights that are computed at a time


@dataclass(frozen=True, slots=True)
class Config:
    """The parts of the method; the module says what they do."""

    search: bool = True
    rotate: bool = True
    split: bool = True
    sinks: int = 16
    recent: int = 128


def rounded(x: torch.Tensor, search: bool, unit: float = UNIT) -> torch.Tensor:
    """x [..., D] as NVFP4 keeps it, in blocks along the last dimension, fp32."""
    codes, scales = quantise_nvfp4(x.reshape(-1, x.shape[-1]), torch.tensor(unit, device=x.device), search)
    numbers = numbers_e2m1(unpack_nibbles(codes)).unflatten(-1, (-1, BLOCK))
    return (numbers * scales.float().unsqueeze(-1) * unit).flatten(-2).view(x.shape)


def emulate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, config: Config
) -> torch.Tensor:
    """Attention of q [B, M, D] over k and v [B, N, D], where ``seen`` [1 or B, M, N] bool are the keys of each row, a
    prefix of all: [B, M, D] in fp32."""
    q, k, v = q.float(), k.float(), v.float()
    if padding := -k.shape[1] % BLOCK:
        k, v, seen = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (k, v, seen.mT))
        seen = seen.mT
    if config.rotate:
        rotation = Rotation(q.shape[-1], q.shape[-1], signs=True)
        q, k = rotation.apply(q), rotation.apply(k)
    known = seen.any(1).unsqueeze(-1)  # [1 or B, N, 1]
    zero = torch.zeros_like(k[:, :1])
    mean_k, mean_v = ((x * known).sum(1, keepdim=True) / known.sum(1, keepdim=True) if config.split else zero
                      for x in (k, v))  # fmt: skip
    k, v = k - mean_k, v - mean_v
    low_k, low_v = rounded(k, config.search), rounded(v.mT.contiguous(), config.search).mT
    low_q = rounded(q, config.search)
    step = max(1, ELEMENTS // (k.shape[0] * k.shape[1]))
    parts = [
        _rows(q[:, i : i + step], low_q[:, i : i + step], k, low_k, v, low_v, seen[:, i : i + step], scale, config)
        for i in range(0, q.shape[1], step)
    ]
    return torch.cat(parts, 1) + mean_v


def _rows(
    q: torch.Tensor,
    low_q: torch.Tensor,
    k: torch.Tensor,
    low_k: torch.Tensor,
    v: torch.Tensor,
    low_v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    config: Config,
) -> torch.Tensor:
    """Some rows of ``emulate``, without the mean of the values."""
    n, end = torch.arange(k.shape[1], device=k.device), seen.sum(-1, keepdim=True)  # [1 or B, M, 1]
    exact = (n < config.sinks) | (n >= end - config.recent)
    scores = torch.where(exact, q @ k.mT, low_q @ low_k.mT) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = torch.where(exact, weights, rounded(weights, config.search, WEIGHT_UNIT))
    whole = exact | (n >= end // BLOCK * BLOCK)
    out = (weights * whole) @ v + (weights * ~whole) @ low_v
    return out / weights.sum(-1, keepdim=True)


class SSABackend(reference.TorchBackend):
    """The reference with its sums over rounded numbers."""

    exact = False
    affects_kv = True  # what deeper layers keep depends on the rounding
    reference = False
    latents = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def why_not(self, site: Site) -> list[str]:
        other = any(s.window is not None or s.softcap is not None or s.sinks or s.latent for s in site.specs)
        found = ["emulates full attention alone, without windows, caps, sinks or latents"] * other
        found += ["is not for exact mode"] * site.exact
        return found + ["needs heads of a power of two"] * any(s.head_dim & (s.head_dim - 1) for s in site.specs)

    def _part(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        part: reference._Part,
        sinks_H: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, None]:
        assert not want_lse, "no layer asks for log-sum-exps here"
        k, v = cache.codec.read(cache, part.pages, part.shared)  # [B, G, N, D]
        if part.keep is not None:
            k, v = k[:, :, part.keep], v[:, :, part.keep]
        if part.stale is not None:
            k, v = reference._clean(k, part.stale), reference._clean(v, part.stale)
        groups, share = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        q = (q_THD if part.whole else q_THD[part.rows]).view(-1, groups, share, spec.head_dim)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        if part.single:  # the heads of a group are rows
            rows = q.flatten(0, 1)
            seen = torch.ones(1, 1, k.shape[1], dtype=torch.bool, device=k.device)
            if part.seen is not None:
                seen = part.seen.flatten(0, 2).unsqueeze(1).repeat_interleave(groups, 0)
            out = emulate(rows, k, v, seen.expand(-1, share, -1), spec.scale, self.config)
            return out.unflatten(0, (-1, groups)).flatten(1, 2).to(q_THD.dtype), None
        rows = q.permute(1, 2, 0, 3).flatten(1, 2)  # [G, R * L, D]
        out = emulate(rows, k, v, part.seen.repeat(share, 1).unsqueeze(0), spec.scale, self.config)
        return out.unflatten(1, (share, -1)).permute(2, 0, 1, 3).flatten(1, 2).to(q_THD.dtype), None
