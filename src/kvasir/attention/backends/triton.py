"""Triton: the paged kernel of ``kernels/paged_attention.py``, on GPUs (and, for tests, in Triton's interpreter).

Two launches a layer at most, one for short spans and one for long ones; no read back, no autotuning at start-up. Lossy
against the reference only by rounding; a row's bits depend on the splits that the batch got, so exact mode is refused.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.kernels import _triton
from kvasir.kernels.paged_attention import paged_attention_triton, plan_tiles
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch


class TritonBackend(AttentionBackend):
    rank = 10

    def why_not(self, site: Site) -> list[str]:
        size, reasons = site.page_slots, []
        if not _triton.AVAILABLE:
            reasons.append("Triton is not installed")
        elif not site.device.startswith("cuda") and not _triton.INTERPRETED:
            reasons.append(f"needs a CUDA GPU, the device is {site.device}")
        if site.exact:
            reasons.append("a row's bits depend on its batch here; batch_invariant needs attention_backend=torch")
        if site.codec_kernel != "plain":
            reasons.append(f"reads pages of the plain codec, not '{site.codec_kernel}'")
        if site.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"computes in float32, bfloat16 or float16, not {site.dtype}")
        if size < 16 or size & (size - 1):
            reasons.append(f"needs pages of 16, 32, 64, ... slots, not {size}")
        wide = max((s.head_dim for s in site.specs), default=0)
        if wide > 256:
            reasons.append(f"takes head dims up to 256, not {wide}")
        return reasons

    def plan(self, batch: StepBatch) -> None:
        for heads, groups in {(s.num_heads, s.num_kv_heads) for s in self.site.specs}:
            batch.scratch["tiles", heads // groups] = plan_tiles(batch.starts, batch.lengths, heads, groups, self.site.dtype, batch.input_ids.device)

    def run(self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, batch: StepBatch, *,
            sinks_H: torch.Tensor | None = None, return_lse: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out_THD, lse_TH = paged_attention_triton(
            q_THD, cache.planes["k"], cache.planes["v"], batch.tables[cache.group], batch.context, batch.row_start,
            batch.scratch["tiles", spec.num_heads // spec.num_kv_heads], spec.scale, window=spec.window, softcap=spec.softcap,
            sinks_H=sinks_H, ancestors_TA=batch.ancestors, positions_T=batch.positions, return_lse=return_lse)
        return (out_THD, lse_TH) if return_lse else out_THD
