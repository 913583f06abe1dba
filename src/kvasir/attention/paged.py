"""The common base of the GPU backends: our own kernels over the pages, and a place for a faster one for long spans.

Single rows, long spans and the rest (drafts, trees, short chunks, layers with a window) take a kernel each: at most
three kinds of launch a layer. No launch reads anything back, and nothing is searched at start-up. A step of single rows
is planned from their number alone, without a copy to the device, so that a CUDA graph of it can be replayed with other
contexts. Results differ from the reference by rounding only.

Exact mode uses one kernel and one tile shape for all spans, so that a row's bits depend on its sequence and position
alone. Rows of draft trees are the exception.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from kvasir.attention.backend import AttentionBackend, AttentionSpec, Site
from kvasir.kernels import _triton
from kvasir.kernels._triton import Launches
from kvasir.kernels.decode_attention import Rows, decode_attention_triton, kinds_of
from kvasir.kernels.dense_attention import (
    SCRATCH_BYTES,
    can_serve,
    dense_attention_triton,
    plan_long,
    shape_for,
    worth_it,
)
from kvasir.kernels.hardware import multiprocessors, send
from kvasir.kernels.paged_attention import (
    TREE_ROWS,
    Tiles,
    block_of,
    exact_tiles,
    paged_attention_triton,
    paged_together_triton,
    plan_tiles,
    rows_of_small,
)
from kvasir.kernels.quantized_attention import plan_rows
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch, Together

DEEP = 4096  # positions from which on the keys of a span are read in several parts


@dataclass(slots=True)
class Step:
    """The launches of one head layout in a step: single ``rows``, ``long`` spans, ``tiles`` of the rest, ``short``
    spans over codes, and spans ``together`` in a captured step that verifies drafts."""

    rows: Rows | None
    long: Any
    tiles: list[Tiles]
    rest: list[int]  # the spans of the tiles
    short: Tiles | None = None
    together: Together | None = None
    launches: Launches = field(default_factory=Launches)


class PagedBackend(AttentionBackend):
    """Base of the GPU backends. A backend with its own kernel for long spans overrides ``takes_long``, ``plan_long``
    and ``run_long``."""

    graphs = True
    depths: tuple[int, ...] = (0, DEEP)  # positions from which on keys are read in other ways

    def why_not(self, site: Site) -> list[str]:
        size, reasons = site.page_slots, []
        specs = by_head(site.specs)
        if not _triton.AVAILABLE:
            reasons.append("Triton is not installed")
        elif not site.device.startswith("cuda") and not _triton.INTERPRETED:
            reasons.append(f"needs a CUDA GPU, the device is {site.device}")
        if site.codec_kernel not in self.codec_kernels:
            reasons.append(
                f"reads pages laid out as {', '.join(sorted(self.codec_kernels))}, not '{site.codec_kernel}'"
            )
        if site.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"computes in float32, bfloat16 or float16, not {site.dtype}")
        if size < 16 or size & (size - 1):
            reasons.append(f"needs pages of 16, 32, 64, ... slots, not {size}")
        wide, widest = max((s.head_dim for s in specs), default=0), self.widest(site)
        if wide > widest:
            reasons.append(f"takes head dims up to {widest}, not {wide}")
        return reasons

    def widest(self, site: Site) -> int:
        """The largest head dim."""
        return 256

    def prepare(self, site: Site) -> None:
        super().prepare(site)
        self._rows: dict[tuple[int, int], Rows] = {}
        self._tiles: dict[tuple[int, ...], list[Tiles]] = {}

    def scratch_bytes(self, length: int) -> int:
        """Bytes of dense keys and values for as many KV heads as fit into the scratch, at least one."""
        specs, size = by_head(self.site.specs), self.site.dtype.itemsize
        whole = max((2 * length * s.head_dim * size * s.num_kv_heads for s in specs), default=0)
        one = max((2 * length * s.head_dim * size for s in specs), default=0)
        return min(whole, max(SCRATCH_BYTES, one))

    def plan(self, batch: StepBatch) -> None:
        for key, spec in {key_of(spec): spec for spec in by_head(self.site.specs)}.items():
            batch.scratch[key] = self._plan(batch, spec)

    def together(self) -> tuple[int, ...]:
        """Two sizes: spans whose rows all fit a small tile, and spans of up to ``TREE_ROWS``. None in exact mode, whose
        tiles belong to another kernel."""
        if self.site.exact:
            return ()
        specs = by_head(self.site.specs)
        small = min((rows_of_small(s.num_heads // s.num_kv_heads) for s in specs), default=1)
        return (small, TREE_ROWS) if small > 1 else (TREE_ROWS,)

    def kinds(self, spec: AttentionSpec, max_seqs: int) -> list[list[tuple[int, int]]]:
        """Tiles of every size for every kind of short span, and long spans, each with keys in one part and in several;
        then counts of single rows."""
        share = spec.num_heads // spec.num_kv_heads
        short = list(itertools.takewhile(lambda n: not worth_it(n, share), itertools.count(2)))
        dtype, dim = self.site.dtype, spec.head_dim
        first = {(self.takes_short(spec, n), block_of(n, share, dtype, dim)): n for n in reversed(short)}
        spans = [[(start, length)] for start in self.depths for length in (*sorted(first.values()), 2 + len(short))]
        load = spec.num_kv_heads / multiprocessors(torch.device(self.site.device))
        return spans + [[(0, 1)] * count for count in kinds_of(spec.head_dim, self.site.dtype, max_seqs, share, load)]

    def _plan(self, batch: StepBatch, spec: AttentionSpec) -> Step:
        if batch.together is not None:
            return Step(None, None, [], [], together=batch.together)
        starts, lengths, device = batch.starts, batch.lengths, batch.input_ids.device
        if self.site.exact:
            return Step(
                None, None, self._exact_tiles(lengths, spec, device), [s for s, length in enumerate(lengths) if length]
            )
        if all(length == 1 for length in lengths):
            return Step(self._single_rows(len(lengths), spec.num_kv_heads, device) if lengths else None, None, [], [])
        plain = batch.ancestors is None and spec.window is None
        single = [s for s, length in enumerate(lengths) if length == 1]
        long = [s for s, length in enumerate(lengths) if plain and self.takes_long(spec, length)]
        short = [
            s for s, length in enumerate(lengths) if length > 1 and s not in long and self.takes_short(spec, length)
        ]
        rest = sorted(set(range(len(lengths))) - {*single, *long, *short})
        rows = None
        if single:
            rows = self._single_rows(len(single), spec.num_kv_heads, device)
            rows = Rows(send(torch.tensor(single, dtype=torch.int32), device), rows.arrived)
        heads = spec.num_heads, spec.num_kv_heads
        tiles = plan_tiles(starts, lengths, *heads, self.site.dtype, device, rest, spec.head_dim)
        few = plan_rows(starts, lengths, short, spec.num_heads // spec.num_kv_heads, device) if short else None
        return Step(
            rows, self.plan_long(batch, spec, long) if long else None, tiles, [s for s in rest if lengths[s]], few
        )

    def takes_short(self, spec: AttentionSpec, length: int) -> bool:
        """Whether a span of several rows reads its keys with the kernel for codes."""
        return False

    # A backend with its own kernel for long spans overrides the next three. Long spans have no window and no tree.

    def takes_long(self, spec: AttentionSpec, length: int) -> bool:
        """Whether a span of ``length`` rows goes to ``run_long``."""
        return can_serve(self.site.dtype, spec.head_dim) and worth_it(length, spec.num_heads // spec.num_kv_heads)

    def plan_long(self, batch: StepBatch, spec: AttentionSpec, spans: list[int]) -> Any:
        """Plan ``spans`` for ``run_long``, once a step."""
        share, device = spec.num_heads // spec.num_kv_heads, batch.input_ids.device
        shape = shape_for(self.site.dtype, spec.head_dim, share, device, softcap=spec.softcap, sinks=spec.sinks)
        return plan_long(batch.starts, batch.lengths, spans, share, device, shape)

    def run_long(
        self,
        common: tuple[torch.Tensor, ...],
        plan: Any,
        spec: AttentionSpec,
        out_THD: torch.Tensor,
        *,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
        lse_TH: torch.Tensor | None,
    ) -> None:
        """Write the long spans' rows of ``out`` and ``lse``. ``common``: q [T, H, D], keys and values [N, G, P, D],
        table [S, W], context [S], row_start [S + 1]."""
        dense_attention_triton(*common, plan, spec.scale, out_THD, softcap=softcap, sinks_H=sinks_H, lse_TH=lse_TH)

    def _exact_tiles(self, lengths: list[int], spec: AttentionSpec, device: torch.device) -> list[Tiles]:
        what = spec.num_heads, spec.num_kv_heads, self.site.dtype, device, spec.head_dim
        if any(length != 1 for length in lengths):
            return exact_tiles(lengths, *what)
        key = len(lengths), spec.num_heads, spec.num_kv_heads, spec.head_dim
        if key not in self._tiles:
            self._tiles[key] = exact_tiles(lengths, *what)
        return self._tiles[key]

    def _single_rows(self, count: int, kv_heads: int, device: torch.device) -> Rows:
        """Spans 0 .. count and their counters. They are kept, since graphs hold their addresses."""
        if (count, kv_heads) not in self._rows:
            self._rows[count, kv_heads] = Rows(
                torch.arange(count, dtype=torch.int32, device=device),
                torch.zeros(count, kv_heads, dtype=torch.int32, device=device),
            )
        return self._rows[count, kv_heads]

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
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out_THD is None else out_THD
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
        step: Step = batch.scratch[key_of(spec)]
        common = (
            q_THD,
            cache.planes["k"],
            cache.planes["v"],
            batch.tables[cache.group],
            batch.context,
            batch.row_start,
        )
        how = {"softcap": spec.softcap, "sinks_H": sinks_H, "lse_TH": lse_TH}
        if step.rows is not None:
            decode_attention_triton(
                *common, step.rows, spec.scale, out_THD, window=spec.window, launches=step.launches, **how
            )
        if step.long is not None:
            self.run_long(common, step.long, spec, out_THD, **how)
        if step.tiles:
            paged_attention_triton(
                *common,
                step.tiles,
                spec.scale,
                out_THD,
                window=spec.window,
                ancestors_TA=batch.ancestors,
                positions_T=batch.positions,
                launches=step.launches,
                **how,
            )
        if step.together is not None:
            spans = step.together
            paged_together_triton(
                *common[:5],
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
        return (out_THD, lse_TH) if return_lse else out_THD


def by_head(specs: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    """Those with keys and values by head; a backend that attends to latents plans these itself."""
    return tuple(spec for spec in specs if spec.latent is None)


def key_of(spec: AttentionSpec) -> tuple:
    """Key of the plan that layers like ``spec`` share."""
    return (
        "triton",
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.window is None,
        spec.softcap is None,
        spec.sinks,
    )
