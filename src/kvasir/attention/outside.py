"""Long spans for the kernels of optional packages: one contiguous step of their own, cut out of the batch.

Single rows and the rest stay with our own kernels, which a CUDA graph can hold.

Legend: T rows, S spans, B long spans, L their rows, H query heads, W pages of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from kvasir.kernels.hardware import send
from kvasir.types import StepBatch


@dataclass(slots=True)
class CutOut:
    """``rows``: of the step, [L] or a slice. On the device: ``spans`` [B] int64, ``row_start`` [B + 1] and ``ends`` [B]
    int32. On the host: ``spans_host``, ``lengths_host``, ``ends_host``. ``state``: what the package planned."""

    rows: slice | torch.Tensor
    spans: torch.Tensor
    row_start: torch.Tensor
    ends: torch.Tensor
    spans_host: list[int]
    lengths_host: list[int]
    ends_host: list[int]
    longest: int
    state: object = None


def cut_out(batch: StepBatch, spans: list[int]) -> CutOut:
    first = [0, *accumulate(batch.lengths)]
    lengths = [batch.lengths[s] for s in spans]
    row_start = [0, *accumulate(lengths)]
    ends = [batch.starts[s] + batch.lengths[s] for s in spans]
    device = batch.input_ids.device
    if spans == list(range(spans[0], spans[-1] + 1)):
        rows: slice | torch.Tensor = slice(first[spans[0]], first[spans[-1] + 1])
    else:
        rows = send(torch.cat([torch.arange(first[s], first[s + 1]) for s in spans]), device)
    both = send(torch.tensor([*row_start, *ends], dtype=torch.int32), device)
    return CutOut(
        rows,
        send(torch.tensor(spans), device),
        both[: len(row_start)],
        both[len(row_start) :],
        spans,
        lengths,
        ends,
        max(lengths),
    )
