"""Long spans for the kernels of optional packages, cut out of the batch as one contiguous step of their own.

Single rows and all other spans stay with our own kernels, which a CUDA graph can hold.

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
    """The long spans of a step. ``rows``: indices [L] of their rows in the step, or a slice. On the device: ``spans``
    [B] int64, ``row_start`` [B + 1] and ``ends`` [B] int32. On the host: ``spans_host``, ``lengths_host``,
    ``ends_host``. ``longest``: rows of the longest span. ``state``: whatever the package planned."""

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
    """Cut ``spans`` out of ``batch``; two small copies to the device."""
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
