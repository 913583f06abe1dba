"""The chunk scans of flash-linear-attention (fla-core), where it is installed: Gated DeltaNet and Kimi Delta Attention.

Facts about the package (github.com/fla-org/flash-linear-attention, MIT, read at 0.6.0): ``chunk_gated_delta_rule`` and
``chunk_kda`` take rows of several sequences one after the other with ``cu_seqlens``, natural logarithms of decays
[1, R, H] or [1, R, H, D], and states [L, H, D, V] fp32 before and after. Chunks of 64 begin with a sequence. Kernels
are tuned for a shape when they first meet it.

Our convolution and gates come first. Each span begins with a whole chunk of ours, whose places before the state's
position change nothing, so cuts at multiples of 64 change no bit.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from kvasir.errors import install
from kvasir.kernels._triton import next_power_of_2
from kvasir.kernels.gated_chunks import gathered
from kvasir.layers.recurrence_backend import RecurrenceBackend, RecurrenceSite


class Fla(RecurrenceBackend):
    """Chunks by fla-core."""

    def why_not(self, site: RecurrenceSite) -> list[str]:
        reasons = []
        if importlib.util.find_spec("fla") is None:
            reasons.append(f"fla-core is not installed ({install('fla')})")
        if site.device != "cuda":
            reasons.append("runs on a GPU alone")
        if site.exact:
            reasons.append("exact mode runs row by row, and no scan")
        if site.dtype != torch.bfloat16:
            reasons.append(f"computes in bfloat16, not {site.dtype}")
        if any(size != max(16, next_power_of_2(size)) or size > 256 for _, *sizes in site.shapes for size in sizes):
            reasons.append("heads must be 16, 32, 64, 128 or 256 wide")
        return reasons

    def scan(self, rows_TX, planes, table_SW, context_S, row_start_S1, base_S, chunks, weights, out_THV, eps) -> None:
        if weights.channelwise:
            run = importlib.import_module("fla.ops.kda").chunk_kda
        else:
            run = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        given = gathered(rows_TX, planes, table_SW, context_S, row_start_S1, base_S, chunks, weights, eps)
        spans_L, matrix = chunks.of_span[:, 0].long(), planes["matrix"]
        pages_LW = table_SW.index_select(0, spans_L).long()
        begun_L = context_S.index_select(0, spans_L) > 0
        before = matrix.index_select(0, pages_LW[:, 0]).float().masked_fill(~begun_L[:, None, None, None], 0.0)
        found, after = run(
            *(x.unsqueeze(0) for x in given),
            scale=1.0,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=chunks.bounds,
        )
        matrix.index_copy_(0, pages_LW[:, 1], after.to(matrix.dtype))
        for row, length, place in chunks.rows:
            out_THV[row : row + length] = found[0, place : place + length]
