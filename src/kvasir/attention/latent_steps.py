"""Steps over latents for the Triton backend: which spans take which kernel, and their launches.

Single rows, drafts and small trees are rows whose tiles the device derives. Spans from the crossing on are expanded
(`kvasir.kernels.latent_prompt`). The rest are tiles in the latent's basis. A step of single rows is planned from their
number alone, so that a CUDA graph of it can be replayed with other contexts. Exact mode has tiles of one shape.

Legend: T rows, S spans, B rows of a launch, H heads, R rank, Q rotary elements, D other elements of a head's key, V of
its value, X = R + Q.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.latent import UpProjection
from kvasir.kernels.dense_attention import SCRATCH_BYTES, LongSpans
from kvasir.kernels.hardware import send
from kvasir.kernels.latent_decode import (
    FORMATS,
    MAX_RANK,
    Planes,
    exact_latent_tiles,
    latent_rows_triton,
    latent_tiles_triton,
    plan_latent_tiles,
)
from kvasir.kernels.latent_prompt import can_serve, crossing, latent_prompt_triton, plan_prompts
from kvasir.kernels.paged_attention import TREE_ROWS, Tiles
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch

MOST_ROWS = 16  # of a causal span whose tiles the device derives
MOST_TOGETHER = 1024  # rows of such a launch: every program looks at all of them


@dataclass(slots=True)
class Rows:
    """Rows of short spans. ``rows``, ``spans`` [B] int64: their places in the step, and their spans (None: all rows,
    one span each). ``at`` [B] int32, ``place``, ``length`` [B] int64: as ``latent_rows_triton`` takes them. ``most``:
    rows of the longest span."""

    rows: torch.Tensor | None
    spans: torch.Tensor | None
    at: torch.Tensor
    place: torch.Tensor
    length: torch.Tensor
    most: int


@dataclass(slots=True)
class Step:
    """The launches of one kind of layer in a step. ``long_spans``: those that ``long`` computes where heads read the
    latent, and ``tiles_of`` where queries come in its basis."""

    rows: Rows | None = None
    tiles: list[Tiles] = field(default_factory=list)
    long: LongSpans | None = None
    long_spans: list[int] = field(default_factory=list)
    whole: bool = False  # every row is a long span's


class LatentSteps:
    """Plans and runs the latent layers of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._single: dict[int, Rows] = {}
        self._tiles: dict[tuple[int, int], list[Tiles]] = {}  # of exact steps of single rows

    @staticmethod
    def why_not(site: Site, spec: AttentionSpec) -> list[str]:
        """Reasons why the kernels cannot serve such layers."""
        rank, rope, reasons = spec.value_dim, spec.head_dim - spec.value_dim, []
        if site.codec_kernel not in FORMATS:
            reasons.append(f"reads latents stored as {', '.join(FORMATS)}, not '{site.codec_kernel}'")
        if spec.softcap is not None:
            reasons.append("has no softcap over latents (--attention-backend torch has)")
        if rank > MAX_RANK:
            reasons.append(f"takes latents of up to {MAX_RANK} elements, not {rank}")
        if rank % 8 or rope % 8:
            reasons.append(
                f"needs rows that are aligned to 16 bytes: kv_lora_rank ({rank}) and qk_rope_head_dim ({rope}) must be "
                "multiples of 8 (--attention-backend torch takes any)"
            )
        return reasons

    def plan(self, batch: StepBatch) -> None:
        for spec in self.site.specs:
            if spec.latent is not None:
                batch.scratch["latents", spec] = self._plan(batch, spec)

    def scratch_bytes(self, length: int) -> int:
        """Bytes of the latents, and of the keys and values of as many heads as fit into the scratch, at least one."""
        found = 0
        for spec in self.site.specs:
            if spec.latent is not None:
                size = length * self.site.dtype.itemsize
                one = size * (spec.latent.nope_dim + spec.latent.value_dim)
                heads = min(one * spec.num_heads, max(SCRATCH_BYTES, one))
                found = max(found, heads + size * (spec.head_dim + 64))
        return found

    def _plan(self, batch: StepBatch, spec: AttentionSpec) -> Step:
        starts, lengths, device, heads = batch.starts, batch.lengths, batch.input_ids.device, spec.num_heads
        if batch.together is not None:
            spans = batch.together
            return Step(Rows(None, None, batch.context, spans.place, spans.length, spans.most))
        if self.site.exact:
            if any(length != 1 for length in lengths):
                return Step(tiles=exact_latent_tiles(lengths, heads, self.site.dtype, device))
            key = len(lengths), heads
            if key not in self._tiles:
                self._tiles[key] = exact_latent_tiles(lengths, heads, self.site.dtype, device)
            return Step(tiles=self._tiles[key])
        if all(length == 1 for length in lengths):
            return Step(single_rows(batch, self._single) if lengths else None)
        plain, rope = batch.ancestors is None, spec.head_dim - spec.value_dim
        least = crossing(spec.value_dim, spec.latent.nope_dim, spec.latent.value_dim)
        expands = plain and least is not None and can_serve(self.site.dtype, rope) and _aligned(spec)
        long = [s for s, length in enumerate(lengths) if expands and length >= least]
        most = MOST_ROWS if plain else TREE_ROWS
        short = [s for s, length in enumerate(lengths) if 0 < length <= most and s not in long]
        if sum(lengths[s] for s in short) > MOST_TOGETHER:
            short = []
        rest = sorted({s for s, length in enumerate(lengths) if length} - {*short, *long})
        step = Step(some_rows(batch, short) if short else None, long_spans=long)
        step.tiles = plan_latent_tiles(starts, lengths, heads, self.site.dtype, device, rest)
        step.whole = bool(long) and not short and not rest
        if long:
            step.long = plan_prompts(starts, lengths, long, spec.latent.nope_dim, rope, device)
        return step

    # ---------------------------------------------------------------------------------------------------------- running

    def run(
        self,
        q_THX: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        out_THR: torch.Tensor,
        lse_TH: torch.Tensor | None = None,
    ) -> None:
        """Attend in the latent's basis, all spans."""
        step: Step = batch.scratch["latents", spec]
        planes = Planes.of(cache.planes, spec.value_dim, self.site.codec_kernel)
        if step.rows is not None:
            self._run_rows(q_THX, planes, cache, spec, batch, step.rows, out_THR, lse_TH)
        tiles = step.tiles
        if step.long_spans:
            made = batch.starts, batch.lengths, spec.num_heads, self.site.dtype, q_THX.device
            tiles = [*tiles, *plan_latent_tiles(*made, step.long_spans)]
        self._run_tiles(q_THX, planes, cache, spec, batch, tiles, out_THR, lse_TH)

    def run_latent(
        self,
        q_THD: torch.Tensor,
        up: UpProjection,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        out_THV: torch.Tensor,
    ) -> None:
        """Attend for heads that read the latent: long spans expanded, the others in its basis."""
        step: Step = batch.scratch["latents", spec]
        planes = Planes.of(cache.planes, spec.value_dim, self.site.codec_kernel)
        if step.rows is not None and step.rows.rows is not None and not step.tiles:
            # Only these rows are brought into the latent's basis; the others are long spans.
            inner = replace(step.rows, rows=None)
            q_BHX = up.absorb(q_THD.index_select(0, step.rows.rows))
            x_BHR = q_BHX.new_empty(*q_BHX.shape[:2], spec.value_dim)
            self._run_rows(q_BHX, planes, cache, spec, batch, inner, x_BHR, None)
            out_THV.index_copy_(0, step.rows.rows, up.project(x_BHR))
        elif not step.whole:
            q_THX = up.absorb(q_THD)
            x_THR = q_THX.new_empty(*q_THX.shape[:2], spec.value_dim)
            if step.rows is not None:
                self._run_rows(q_THX, planes, cache, spec, batch, step.rows, x_THR, None)
            self._run_tiles(q_THX, planes, cache, spec, batch, step.tiles, x_THR, None)
            up.project(x_THR, out_THV)
        if step.long is not None:
            table, ends = batch.tables[cache.group], (batch.context, batch.row_start)
            latent_prompt_triton(q_THD, planes, up.key_HDR, up.value_HVR, table, *ends, step.long, spec.scale, out_THV)

    @staticmethod
    def _run_rows(
        q_THX: torch.Tensor,
        planes: Planes,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        rows: Rows,
        out_THR: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        table, ancestors = batch.tables[cache.group], batch.ancestors
        if rows.spans is not None:
            table = table.index_select(0, rows.spans)
            if ancestors is not None:
                ancestors = ancestors_of(batch, rows)
        how = (table, rows.at, rows.place, rows.length, rows.most, spec.scale)
        if rows.rows is None:
            latent_rows_triton(q_THX, planes, *how, out_THR, ancestors_TA=ancestors, lse_TH=lse_TH)
            return
        q_BHX = q_THX.index_select(0, rows.rows)
        x_BHR = q_BHX.new_empty(*q_BHX.shape[:2], spec.value_dim)
        lse_BH = None if lse_TH is None else lse_TH.index_select(0, rows.rows)
        latent_rows_triton(q_BHX, planes, *how, x_BHR, ancestors_TA=ancestors, lse_TH=lse_BH)
        out_THR.index_copy_(0, rows.rows, x_BHR)
        if lse_TH is not None:
            lse_TH.index_copy_(0, rows.rows, lse_BH)

    @staticmethod
    def _run_tiles(
        q_THX: torch.Tensor,
        planes: Planes,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        tiles: list[Tiles],
        out_THR: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        if tiles:
            how = (batch.tables[cache.group], batch.context, batch.row_start, tiles, spec.scale)
            latent_tiles_triton(q_THX, planes, *how, out_THR, ancestors_TA=batch.ancestors, lse_TH=lse_TH)


def single_rows(batch: StepBatch, kept: dict[int, Rows]) -> Rows:
    """All rows of a step of single rows. ``kept`` holds by their number what does not depend on their contexts, since
    graphs hold its address."""
    count, device = len(batch.lengths), batch.input_ids.device
    if count not in kept:
        zeros, ones = (torch.full((count,), n, dtype=torch.int64, device=device) for n in (0, 1))
        kept[count] = Rows(None, None, batch.context, zeros, ones, 1)
    return replace(kept[count], at=batch.context)


def some_rows(batch: StepBatch, spans: list[int]) -> Rows:
    """The rows of these spans, cut out of the step with one small copy to the device."""
    first = [0, *accumulate(batch.lengths)]
    found: list[list[int]] = [[], [], [], [], []]
    for s in spans:
        length = batch.lengths[s]
        for place in range(length):
            for column, value in zip(found, (first[s] + place, s, batch.starts[s] + place, place, length)):
                column.append(value)
    rows, of, at, place, length = send(torch.tensor(found), batch.input_ids.device)
    return Rows(rows, of, at.int(), place, length, max(batch.lengths[s] for s in spans))


def ancestors_of(batch: StepBatch, rows: Rows) -> torch.Tensor:
    """Ancestor bits of these rows."""
    starts = batch.row_start.index_select(0, rows.spans.to(torch.int64)).long()
    return batch.ancestors.index_select(0, starts + rows.place)


def _aligned(spec: AttentionSpec) -> bool:
    """Whether rows of keys and values of all heads are whole 16 bytes."""
    return not (spec.latent.nope_dim % 8 or spec.latent.value_dim % 8)
