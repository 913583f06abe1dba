"""Triton: our own kernels over plain and quantised pages, on GPUs and, for tests, in Triton's interpreter.

Over a quantised cache, single rows and short spans (drafts, trees) read the codes. All other spans read keys and values
that are decoded into scratch first.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.latent import UpProjection
from kvasir.attention.latent_steps import LatentSteps
from kvasir.attention.lowrank_steps import LowRankSteps
from kvasir.attention.lowrank_steps import Step as LowRankStep
from kvasir.attention.paged import DEEP, PagedBackend, Step, by_head, key_of
from kvasir.kernels.decode_attention import count_pad
from kvasir.kernels.dense_attention import dense_attention_triton
from kvasir.kernels.gathered import gathered_attention, plan_gathered
from kvasir.kernels.paged_attention import MAX_DIM, Tiles, plan_tiles
from kvasir.kernels.quantized_attention import (
    most_rows,
    quantized_attention_triton,
    quantized_together_triton,
    worth_it,
)
from kvasir.kernels.quantized_decode import gather_codes_triton, quantized_decode_triton
from kvasir.kernels.quantized_qkv import FORMATS
from kvasir.kv.codec import LayerCache
from kvasir.kv.latents import LatentLayer
from kvasir.types import StepBatch


class TritonBackend(PagedBackend):
    """All spans by our own kernels, over plain and quantised pages."""

    rank = 20
    latents = True
    codec_kernels = frozenset({"plain", "latents", *FORMATS})

    def why_not(self, site: Site) -> list[str]:
        reasons = super().why_not(site)
        for spec in site.specs:
            if spec.latent is not None:
                reasons += [reason for reason in LatentSteps.why_not(site, spec) if reason not in reasons]
        if site.codec_kernel in FORMATS and any(s.head_dim % 4 for s in by_head(site.specs)):
            reasons.append("reads codes of head dims that are multiples of 4")
        if (
            site.codec_kernel == "fp8"
            and site.device == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability() < (8, 9)
        ):
            reasons.append(
                "makes fp8 codes on GPUs of compute capability 8.9 and up (--kv-codec int8 takes as many bytes)"
            )
        return reasons

    def widest(self, site: Site) -> int:
        return MAX_DIM if site.codec_kernel == "plain" else super().widest(site)

    def prepare(self, site: Site) -> None:
        super().prepare(site)
        self._latents = LatentSteps(site) if any(spec.latent is not None for spec in site.specs) else None
        self._lowrank = LowRankSteps(site.page_slots, site.exact) if site.codec_kernel == "latents" else None
        if site.codec_kernel in FORMATS:
            # The parts of a short span's keys are merged 16, 32 or 64 at a time.
            self.depths = 0, DEEP, 5 * DEEP // 4, 9 * DEEP // 4
        # Exact rows over codes are gathered by a plan that depends on the step's contexts.
        self.graphs = site.codec_kernel == "plain" or not site.exact

    def takes_short(self, spec: AttentionSpec, length: int) -> bool:
        return self.site.codec_kernel in FORMATS and worth_it(length, spec.num_heads // spec.num_kv_heads)

    def together(self) -> tuple[int, ...]:
        """One tile size for codes. A span too long to read codes (``most_rows``) is decoded into scratch, and
        such steps are launched one by one."""
        if self.site.codec_kernel not in FORMATS or self.site.exact or self._latents is not None:
            return super().together()
        most = min(most_rows(s.num_heads // s.num_kv_heads) for s in self.site.specs)
        return (most,) if most > 1 else ()

    def plan(self, batch: StepBatch) -> None:
        super().plan(batch)
        if self._latents is not None:
            self._latents.plan(batch)
        if self._lowrank is not None:
            for key, spec in {key_of(spec): spec for spec in by_head(self.site.specs)}.items():
                batch.scratch["lowrank", key] = self._plan_lowrank(batch, spec)
        if self.site.codec_kernel not in FORMATS:
            return
        for key in {key_of(spec) for spec in by_head(self.site.specs)}:
            step: Step = batch.scratch[key]
            if step.tiles:
                batch.scratch["gathered", key] = plan_gathered(
                    batch.starts, batch.lengths, step.rest, step.tiles, self.site.page_slots, batch.input_ids.device
                )

    def _plan_lowrank(self, batch: StepBatch, spec: AttentionSpec) -> LowRankStep:
        """The plan of layers like ``spec`` that cache low-rank keys and values."""
        heads, device, plain = (spec.num_heads, spec.num_kv_heads), batch.input_ids.device, batch.ancestors is None

        def tiles(spans: list[int]) -> list[Tiles]:
            if self.site.exact:
                return self._exact_tiles(batch.lengths, spec, device)
            made = batch.starts, batch.lengths, *heads, self.site.dtype, device, spans, spec.head_dim
            return plan_tiles(*made)

        def takes_long(length: int) -> bool:
            return plain and spec.window is None and self.takes_long(spec, length)

        return self._lowrank.plan(batch, tiles, takes_long, lambda spans: self.plan_long(batch, spec, spans))

    def scratch_bytes(self, length: int) -> int:
        latents = 0 if self._latents is None else self._latents.scratch_bytes(length)
        return max(latents, super().scratch_bytes(length))

    def kinds(self, spec: AttentionSpec, max_seqs: int) -> list[list[tuple[int, int]]]:
        """Steps over latents: single rows of every count that has a kernel, drafts, a short prompt, a long one."""
        if spec.latent is None:
            return super().kinds(spec, max_seqs)
        counts = sorted({min(count_pad(count), max_seqs) for count in range(1, max_seqs + 1)})
        return [*([(0, 1)] * count for count in counts), [(DEEP, 4), (0, 1)], [(DEEP, 64)], [(DEEP, 1024)]]

    def run_latent(
        self,
        q_THD: torch.Tensor,
        up: UpProjection,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        out_THV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out_THV is None:
            out_THV = q_THD.new_empty(*q_THD.shape[:2], spec.mixed_dim)
        self._latents.run_latent(q_THD, up, cache, spec, batch, out_THV)
        return out_THV

    def run(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        sinks_H: torch.Tensor | None = None,
        return_lse: bool = False,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if spec.latent is not None:
            if out_THD is None:
                out_THD = q_THD.new_empty(*q_THD.shape[:2], spec.result_dim)
            lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
            self._latents.run(q_THD, cache, spec, batch, out_THD, lse_TH)
            return (out_THD, lse_TH) if return_lse else out_THD
        if self._lowrank is not None and isinstance(cache.codec, LatentLayer):
            out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
            lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
            step, latents = batch.scratch["lowrank", key_of(spec)], cache.codec.latents_of(cache)
            self._lowrank.run(q_THD, cache, latents, spec, batch, step, out_THD, sinks_H, lse_TH)
            return (out_THD, lse_TH) if return_lse else out_THD
        if self.site.codec_kernel not in FORMATS:
            return super().run(q_THD, cache, spec, batch, sinks_H=sinks_H, return_lse=return_lse, out_THD=out_THD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out_THD is None else out_THD
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
        step: Step = batch.scratch[key_of(spec)]
        table, format, planes = batch.tables[cache.group], self.site.codec_kernel, cache.planes
        how = {"softcap": spec.softcap, "sinks_H": sinks_H, "lse_TH": lse_TH}

        def gather(k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, blocks: int, block: int, group: int) -> None:
            gather_codes_triton(
                planes, format, k, v, table, batch.context, batch.row_start, spans, blocks, block, group, spec.window
            )

        if step.rows is not None:
            quantized_decode_triton(
                q_THD,
                planes,
                format,
                table,
                batch.context,
                batch.row_start,
                step.rows,
                spec.scale,
                out_THD,
                window=spec.window,
                **how,
            )
        if step.short is not None:
            quantized_attention_triton(
                q_THD,
                planes,
                format,
                table,
                batch.context,
                batch.row_start,
                step.short,
                spec.scale,
                out_THD,
                window=spec.window,
                ancestors_TA=batch.ancestors,
                positions_T=batch.positions,
                **how,
            )
        if step.together is not None:
            spans = step.together
            quantized_together_triton(
                q_THD,
                planes,
                format,
                table,
                batch.context,
                spans.place,
                spans.length,
                batch.ancestors,
                batch.positions,
                spans.most,
                spec.scale,
                out_THD,
                window=spec.window,
                **how,
            )
        if step.long is not None:
            dense_attention_triton(
                q_THD,
                planes["k"],
                planes["v"],
                table,
                batch.context,
                batch.row_start,
                step.long,
                spec.scale,
                out_THD,
                gather=gather,
                **how,
            )
        if step.tiles:
            gathered_attention(
                q_THD,
                spec.num_kv_heads,
                cache.page_slots,
                gather,
                batch.context,
                batch.row_start,
                batch.scratch["gathered", key_of(spec)],
                spec.scale,
                out_THD,
                window=spec.window,
                ancestors_TA=batch.ancestors,
                positions_T=batch.positions,
                **how,
            )
        cache.codec.restore(out_THD)
        return (out_THD, lse_TH) if return_lse else out_THD
