"""FlashAttention 3 for long spans, where ``flash_attn_interface`` is installed; own kernels for the rest.

Facts about the package (github.com/Dao-AILab/flash-attention, folder hopper): ``flash_attn_with_kvcache`` reads pages
[N, P, G, D] of any strides and size through a table; rows of several sequences lie one after the other, bottom-right
causal; the log-sum-exp is natural, [H, L]. No attention sinks. FlashAttention 2 (``flash_attn``) reads pages of 256
slots only."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.outside import CutOut, cut_out
from kvasir.attention.paged import PagedBackend
from kvasir.kernels.dense_attention import worth_it
from kvasir.types import StepBatch


class FlashAttentionBackend(PagedBackend):
    """Long spans by FlashAttention 3, all other spans by our own kernels."""

    rank = 10

    def why_not(self, site: Site) -> list[str]:
        reasons = super().why_not(site)
        if importlib.util.find_spec("flash_attn_interface") is None:
            older = (
                "" if importlib.util.find_spec("flash_attn") is None else "; flash_attn 2 reads pages of 256 slots only"
            )
            reasons.append(f"FlashAttention 3 (flash_attn_interface) is not installed{older}")
        if site.exact:
            reasons.append("its bits depend on the batch")
        if site.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"computes in bfloat16 or float16, not {site.dtype}")
        if any(s.sinks for s in site.specs):
            reasons.append("has no attention sinks")
        return reasons

    def takes_long(self, spec: AttentionSpec, length: int) -> bool:
        return worth_it(length, spec.num_heads // spec.num_kv_heads)

    def plan_long(self, batch: StepBatch, spec: AttentionSpec, spans: list[int]) -> CutOut:
        return cut_out(batch, spans)

    def run_long(
        self,
        common: tuple[torch.Tensor, ...],
        plan: CutOut,
        spec: AttentionSpec,
        out_THD: torch.Tensor,
        *,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
        lse_TH: torch.Tensor | None,
    ) -> None:
        q_THD, k_NGPD, v_NGPD, table_SW, *_ = common
        found: Any = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
            q_THD[plan.rows],
            k_NGPD.transpose(1, 2),
            v_NGPD.transpose(1, 2),
            cache_seqlens=plan.ends,
            page_table=table_SW[plan.spans],
            cu_seqlens_q=plan.row_start,
            max_seqlen_q=plan.longest,
            softmax_scale=spec.scale,
            causal=True,
            softcap=softcap or 0.0,
            return_softmax_lse=lse_TH is not None,
        )
        if lse_TH is not None:
            lse_TH[plan.rows] = found[1].transpose(0, 1)
        out_THD[plan.rows] = found if isinstance(found, torch.Tensor) else found[0]
