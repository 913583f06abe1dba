"""Steps over low-rank keys and values for the Triton backend: which spans take which launch.

Single rows, short chains and trees read the latents (`kvasir.kernels.lowrank_decode`). All other spans, and exact mode,
read keys and values that are made of the latents in bounded scratch: a prompt makes them once for many rows. A step of
single rows is planned from their number alone, so that a CUDA graph of it can be replayed with other contexts. Layers
that the codec leaves plain are the backend's own.

Legend: T rows, B rows of a launch, H query heads, D head dim, V rank of the latents of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.attention.backend import AttentionSpec
from kvasir.attention.latent_steps import MOST_TOGETHER, Rows, ancestors_of, single_rows, some_rows
from kvasir.kernels.dense_attention import Gather, dense_attention_triton
from kvasir.kernels.gathered import GatheredSpans, gathered_attention, plan_gathered
from kvasir.kernels.lowrank_decode import Latents, gather_lowrank_triton, lowrank_rows_triton
from kvasir.kernels.paged_attention import TREE_ROWS, Tiles
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch

MOST_ROWS = 16  # of a causal span that reads latents; every tile of it makes its keys again


@dataclass(slots=True)
class Step:
    """The launches of one head layout: short spans as ``rows``, prompts as ``long``, the rest as ``gathered``."""

    rows: Rows | None = None
    long: Any = None
    gathered: GatheredSpans | None = None


class LowRankSteps:
    """Plans and runs the layers of a site that cache low-rank keys and values.

    ``tiles`` (spans of a step), ``takes_long`` (length) and ``plan_long`` (spans) are the backend's for one head
    layout, as `kvasir.attention.paged` has them."""

    def __init__(self, page_slots: int, exact: bool) -> None:
        self.page_slots, self.exact = page_slots, exact
        self._single: dict[int, Rows] = {}

    def plan(
        self,
        batch: StepBatch,
        tiles: Callable[[list[int]], list[Tiles]],
        takes_long: Callable[[int], bool],
        plan_long: Callable[[list[int]], Any],
    ) -> Step:
        """The launches of a step for one head layout."""
        lengths = batch.lengths
        if batch.together is not None:
            spans = batch.together
            return Step(Rows(None, None, batch.context, spans.place, spans.length, spans.most))
        if lengths and all(length == 1 for length in lengths) and not self.exact:
            return Step(single_rows(batch, self._single))
        most = MOST_ROWS if batch.ancestors is None else TREE_ROWS
        short = [s for s, length in enumerate(lengths) if 0 < length <= most and not self.exact]
        if sum(lengths[s] for s in short) > MOST_TOGETHER:
            short = []
        long = [s for s, n in enumerate(lengths) if not self.exact and s not in short and takes_long(n)]
        rest = [s for s, length in enumerate(lengths) if length and s not in short and s not in long]
        step = Step(some_rows(batch, short) if short else None, plan_long(long) if long else None)
        if rest:
            device = batch.input_ids.device
            step.gathered = plan_gathered(batch.starts, lengths, rest, tiles(rest), self.page_slots, device)
        return step

    def run(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        latents: Latents,
        spec: AttentionSpec,
        batch: StepBatch,
        step: Step,
        out_THD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        lse_TH: torch.Tensor | None,
    ) -> None:
        """Attend all spans of ``step`` into their rows of ``out`` and ``lse``."""
        table, ends = batch.tables[cache.group], (batch.context, batch.row_start)
        how: dict[str, Any] = {"softcap": spec.softcap, "sinks_H": sinks_H}

        def gather(k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, blocks: int, block: int, group: int) -> None:
            gather_lowrank_triton(latents, k, v, table, *ends, spans, blocks, block, group, spec.window)

        if step.rows is not None:
            self._run_rows(q_THD, cache, latents, spec, batch, step.rows, out_THD, lse_TH, how)
        if step.long is not None:
            self._run_long(q_THD, latents, spec, table, ends, step.long, gather, out_THD, lse_TH, how)
        if step.gathered is not None:
            gathered_attention(
                q_THD,
                spec.num_kv_heads,
                self.page_slots,
                gather,
                *ends,
                step.gathered,
                spec.scale,
                out_THD,
                window=spec.window,
                ancestors_TA=batch.ancestors,
                positions_T=batch.positions,
                lse_TH=lse_TH,
                **how,
            )

    @staticmethod
    def _run_long(
        q_THD: torch.Tensor,
        latents: Latents,
        spec: AttentionSpec,
        table: torch.Tensor,
        ends: tuple[torch.Tensor, torch.Tensor],
        long: Any,
        gather: Gather,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
        how: dict[str, Any],
    ) -> None:
        # Only the number of heads is read of the pages where keys and values are gathered.
        heads = [plane.expand(-1, spec.num_kv_heads, -1, -1) for plane in (latents.k, latents.v)]
        dense_attention_triton(
            q_THD, *heads, table, *ends, long, spec.scale, out_THD, gather=gather, lse_TH=lse_TH, **how
        )

    @staticmethod
    def _run_rows(
        q_THD: torch.Tensor,
        cache: LayerCache,
        latents: Latents,
        spec: AttentionSpec,
        batch: StepBatch,
        rows: Rows,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
        how: dict[str, Any],
    ) -> None:
        table, ancestors, positions = batch.tables[cache.group], batch.ancestors, batch.positions
        q_BHD, lse_BH = q_THD, lse_TH
        if rows.rows is not None:
            table, q_BHD = table.index_select(0, rows.spans), q_THD.index_select(0, rows.rows)
            positions = positions.index_select(0, rows.rows)
            ancestors = None if ancestors is None else ancestors_of(batch, rows)
            lse_BH = None if lse_TH is None else lse_TH.index_select(0, rows.rows)
        x_BHV = q_BHD.new_empty(*q_BHD.shape[:2], latents.v.shape[3])
        lowrank_rows_triton(
            q_BHD,
            latents,
            table,
            rows.at,
            rows.place,
            rows.length,
            rows.most,
            spec.scale,
            x_BHV,
            window=spec.window,
            ancestors_TA=ancestors,
            positions_T=positions,
            lse_TH=lse_BH,
            **how,
        )
        result = cache.codec.results(cache, x_BHV)
        if rows.rows is None:
            out_THD.copy_(result)
            return
        out_THD.index_copy_(0, rows.rows, result)
        if lse_TH is not None:
            lse_TH.index_copy_(0, rows.rows, lse_BH)
