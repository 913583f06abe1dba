"""FlashInfer for long spans, where it is installed; own kernels for the rest.

Facts about the package (docs.flashinfer.ai): ``BatchPrefillWithPagedKVCacheWrapper`` is planned on the host for a batch
and then run for every layer of the same head layout. It copies its plan from pinned memory of its own. Pages [N, G, P,
D] are its layout HND. The log-sum-exp is to base 2, [L, H]. Kernels are compiled at first use, which takes a CUDA
toolkit and minutes, unless `flashinfer-jit-cache` brings them.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.outside import CutOut, cut_out
from kvasir.attention.paged import PagedBackend
from kvasir.kernels._triton import cdiv
from kvasir.kernels.dense_attention import worth_it
from kvasir.types import StepBatch

WORKSPACE_BYTES = 128 << 20  # what its documentation advises


class FlashInferBackend(PagedBackend):
    """Long spans by FlashInfer, all other spans by our own kernels."""

    rank = 5

    def why_not(self, site: Site) -> list[str]:
        reasons = super().why_not(site)
        if importlib.util.find_spec("flashinfer") is None:
            reasons.append("flashinfer is not installed")
        if site.exact:
            reasons.append("its bits depend on the batch")
        if site.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"computes in bfloat16 or float16, not {site.dtype}")
        if any(s.sinks for s in site.specs):
            reasons.append("has no attention sinks here")
        if any(s.head_dim not in (64, 128, 256) for s in site.specs):
            reasons.append("takes head dims of 64, 128 and 256")
        return reasons

    def why_only_named(self) -> str:
        return (
            ""
            if importlib.util.find_spec("flashinfer_jit_cache")
            else "without flashinfer-jit-cache it compiles for minutes"
        )

    def prepare(self, site: Site) -> None:
        super().prepare(site)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[AttentionSpec, int], tuple[Any, torch.cuda.Event | None]] = {}

    def takes_long(self, spec: AttentionSpec, length: int) -> bool:
        return worth_it(length, spec.num_heads // spec.num_kv_heads)

    def plan_long(self, batch: StepBatch, spec: AttentionSpec, spans: list[int]) -> CutOut:
        """Cut the long spans out. Each cache group has its own pages, so the package's plan is made when the group's
        first layer runs."""
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.input_ids.device)
        plan = cut_out(batch, spans)
        plan.state = {}
        return plan

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
        key = table_SW.data_ptr(), spec
        if key not in plan.state:
            plan.state[key] = self._planned(plan, spec, table_SW, k_NGPD.shape[2], q_THD.dtype)
        out_LHD = out_THD[plan.rows] if isinstance(plan.rows, slice) else None  # else an index, whose rows are a copy
        found = plan.state[key].run(q_THD[plan.rows], (k_NGPD, v_NGPD), out=out_LHD, return_lse=lse_TH is not None)
        if lse_TH is not None:
            lse_TH[plan.rows] = found[1] * math.log(2)
        if out_LHD is None:
            out_THD[plan.rows] = found if lse_TH is None else found[0]

    def _planned(self, plan: CutOut, spec: AttentionSpec, table_SW: torch.Tensor, size: int, dtype: torch.dtype) -> Any:
        """A planned wrapper for these spans. Wrappers are kept from step to step: each has 8 MiB of pinned memory. All
        arguments are on the host; otherwise planning would wait for the device."""
        counts = [cdiv(end, size) for end in plan.ends_host]
        on_host = partial(torch.tensor, dtype=torch.int32)
        key, on_gpu = (spec, len(plan.state)), table_SW.is_cuda
        if key not in self._wrappers:
            wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._wrappers[key] = wrapper, torch.cuda.Event() if on_gpu else None
        wrapper, copied = self._wrappers[key]
        if copied:
            copied.synchronize()  # the pinned plan of an earlier step must not be overwritten before it was copied
        wrapper.plan(
            on_host([0, *accumulate(plan.lengths_host)]),
            on_host([0, *accumulate(counts)]),
            torch.cat([table_SW[s, :count] for s, count in zip(plan.spans_host, counts)]),
            on_host([(end - 1) % size + 1 for end in plan.ends_host]),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            size,
            causal=True,
            sm_scale=spec.scale,
            logits_soft_cap=spec.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        if copied:
            copied.record()
        return wrapper
