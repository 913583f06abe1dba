"""Triton: own kernels over the pages, on GPUs (and, for tests, in Triton's interpreter).

Single rows, long spans and the rest (drafts, trees, short chunks, layers with a window) take a kernel each: at most three
kinds of launch a layer, none of which reads back or searches at start-up. A step of single rows is planned from their
number alone, without a copy to the device, so that a CUDA graph of it may be replayed with other contexts. Lossy against
the reference only by rounding. Exact mode: one kernel and one shape of tile for all, so that a row's bits depend on its
sequence and position alone (but for the rows of draft trees).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.kernels import _triton
from kvasir.kernels.decode_attention import Rows, decode_attention_triton
from kvasir.kernels.dense_attention import LongSpans, can_serve, dense_attention_triton, plan_long, worth_it
from kvasir.kernels.gathered import GatheredSpans, gathered_attention, plan_gathered
from kvasir.kernels.paged_attention import Tiles, exact_tiles, paged_attention_triton, plan_tiles
from kvasir.kernels.quantized_decode import gather_codes_triton, quantized_decode_triton
from kvasir.kernels.quantized_qkv import FORMATS
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch


@dataclass(slots=True)
class _Step:
    """What the layers of one head layout launch: single rows, long spans, tiles of the rest."""

    rows: Rows | None
    long: LongSpans | None
    tiles: list[Tiles]
    gathered: GatheredSpans | None = None  # the rest, over a quantised cache


class TritonBackend(AttentionBackend):
    rank = 10
    graphs = True
    codec_kernels = frozenset({"plain", *FORMATS})

    def why_not(self, site: Site) -> list[str]:
        size, reasons = site.page_slots, []
        if not _triton.AVAILABLE:
            reasons.append("Triton is not installed")
        elif not site.device.startswith("cuda") and not _triton.INTERPRETED:
            reasons.append(f"needs a CUDA GPU, the device is {site.device}")
        if site.codec_kernel not in self.codec_kernels:
            reasons.append(f"reads pages of the layouts {', '.join(sorted(self.codec_kernels))}, not '{site.codec_kernel}'")
        if site.codec_kernel != "plain" and any(s.head_dim % 4 for s in site.specs):
            reasons.append("reads codes of head dims that are multiples of 4")
        if site.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"computes in float32, bfloat16 or float16, not {site.dtype}")
        if size < 16 or size & (size - 1):
            reasons.append(f"needs pages of 16, 32, 64, ... slots, not {size}")
        wide = max((s.head_dim for s in site.specs), default=0)
        if wide > 256:
            reasons.append(f"takes head dims up to 256, not {wide}")
        return reasons

    def prepare(self, site: Site) -> None:
        super().prepare(site)
        self._rows: dict[tuple[int, int], Rows] = {}
        self._tiles: dict[tuple[int, int, int], list[Tiles]] = {}

    def plan(self, batch: StepBatch) -> None:
        for key, spec in {_key(spec): spec for spec in self.site.specs}.items():
            step = batch.scratch[key] = self._plan(batch, spec)
            if self.site.codec_kernel != "plain" and step.tiles:
                rest = [s for s, length in enumerate(batch.lengths) if length]
                if not self.site.exact:
                    single_or_long = {s for s in rest if batch.lengths[s] == 1} | set(self._long(batch, spec))
                    rest = [s for s in rest if s not in single_or_long]
                step.gathered = plan_gathered(batch.starts, batch.lengths, rest, step.tiles, self.site.page_slots, batch.input_ids.device)

    def _plan(self, batch: StepBatch, spec: AttentionSpec) -> _Step:
        starts, lengths, device = batch.starts, batch.lengths, batch.input_ids.device
        if self.site.exact:
            return _Step(None, None, self._exact_tiles(lengths, spec, device))
        if all(length == 1 for length in lengths):
            return _Step(self._single_rows(len(lengths), spec.num_kv_heads, device) if lengths else None, None, [])
        share = spec.num_heads // spec.num_kv_heads
        single = [s for s, length in enumerate(lengths) if length == 1]
        long = self._long(batch, spec)
        rest = sorted(set(range(len(lengths))) - {*single, *long})
        rows = None
        if single:
            rows = self._single_rows(len(single), spec.num_kv_heads, device)
            rows = Rows(torch.tensor(single, dtype=torch.int32).to(device, non_blocking=True), rows.arrived)
        tiles = plan_tiles(starts, lengths, spec.num_heads, spec.num_kv_heads, self.site.dtype, device, rest)
        return _Step(rows, plan_long(starts, lengths, long, share, device) if long else None, tiles)

    def _long(self, batch: StepBatch, spec: AttentionSpec) -> list[int]:
        """Spans for the dense kernel."""
        if batch.ancestors is not None or spec.window is not None or not can_serve(self.site.dtype, spec.head_dim):
            return []
        return [s for s, length in enumerate(batch.lengths) if worth_it(length, spec.num_heads // spec.num_kv_heads)]

    def _exact_tiles(self, lengths: list[int], spec: AttentionSpec, device: torch.device) -> list[Tiles]:
        if any(length != 1 for length in lengths):
            return exact_tiles(lengths, spec.num_heads, spec.num_kv_heads, self.site.dtype, device)
        key = len(lengths), spec.num_heads, spec.num_kv_heads
        if key not in self._tiles:
            self._tiles[key] = exact_tiles(lengths, spec.num_heads, spec.num_kv_heads, self.site.dtype, device)
        return self._tiles[key]

    def _single_rows(self, count: int, kv_heads: int, device: torch.device) -> Rows:
        """Spans 0 .. count and their counters. Kept, since graphs hold their addresses."""
        if (count, kv_heads) not in self._rows:
            self._rows[count, kv_heads] = Rows(torch.arange(count, dtype=torch.int32, device=device),
                                               torch.zeros(count, kv_heads, dtype=torch.int32, device=device))
        return self._rows[count, kv_heads]

    def run(self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, batch: StepBatch, *,
            sinks_H: torch.Tensor | None = None, return_lse: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
        step: _Step = batch.scratch[_key(spec)]
        common = (q_THD, cache.planes["k"], cache.planes["v"], batch.tables[cache.group], batch.context, batch.row_start)
        how = {"softcap": spec.softcap, "sinks_H": sinks_H, "lse_TH": lse_TH}
        if self.site.codec_kernel != "plain":
            self._over_codes(q_THD, cache, spec, batch, step, out_THD, how)
            return (out_THD, lse_TH) if return_lse else out_THD
        if step.rows is not None:
            decode_attention_triton(*common, step.rows, spec.scale, out_THD, window=spec.window, **how)
        if step.long is not None:
            dense_attention_triton(*common, step.long, spec.scale, out_THD, **how)
        if step.tiles:
            paged_attention_triton(*common, step.tiles, spec.scale, out_THD, window=spec.window, ancestors_TA=batch.ancestors,
                                   positions_T=batch.positions, **how)
        return (out_THD, lse_TH) if return_lse else out_THD

    def _over_codes(self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, batch: StepBatch, step: _Step, out_THD: torch.Tensor,
                    how: dict) -> None:
        """The same three ways over a quantised cache: single rows read the codes, the others read numbers made of them."""
        table, format, planes = batch.tables[cache.group], self.site.codec_kernel, cache.planes

        def gather(k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, blocks: int, block: int, group: int) -> None:
            gather_codes_triton(planes, format, k, v, table, batch.context, batch.row_start, spans, blocks, block, group)

        if step.rows is not None:
            quantized_decode_triton(q_THD, planes, format, table, batch.context, batch.row_start, step.rows, spec.scale, out_THD,
                                    window=spec.window, **how)
        if step.long is not None:
            dense_attention_triton(q_THD, planes["k"], planes["v"], table, batch.context, batch.row_start, step.long, spec.scale, out_THD,
                                   gather=gather, **how)
        if step.gathered is not None:
            gathered_attention(q_THD, spec.num_kv_heads, cache.page_slots, gather, batch.context, batch.row_start, step.gathered, spec.scale,
                               out_THD, window=spec.window, ancestors_TA=batch.ancestors, positions_T=batch.positions, **how)
        cache.codec.restore(out_THD)


def _key(spec: AttentionSpec) -> tuple:
    return "triton", spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window is None
