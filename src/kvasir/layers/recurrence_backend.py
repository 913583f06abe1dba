"""The seam of recurrence backends: the code that runs the delta rule over long spans of a prompt.

Short spans, and all spans in exact mode, run row by row in our own kernels whatever the backend. A GPU runs longer
spans in chunks (`kvasir.kernels.gated_chunks`), and that part may come from another package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvasir.kernels.gated_chunks import Chunks
from kvasir.technique import Technique

RECURRENCES = "kvasir.layers.recurrences"


@dataclass(frozen=True, slots=True)
class RecurrenceSite:
    """The place where a backend is asked to run. ``shapes``: heads, key dim and value dim of each kind of layer."""

    device: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, int, int], ...]
    exact: bool = False


class RecurrenceBackend(Technique):
    """Runs chunks of the delta rule, with a decay for each head or for each channel of its keys."""

    # Results are rounded in the order of the backend.
    exact = False
    affects_kv = False
    # Preference of ``auto``: of equally fast backends it takes the highest rank.
    rank = 0

    def why_not(self, site: RecurrenceSite) -> list[str]:
        """Reasons why this backend cannot serve ``site``; empty means it can."""
        return []

    def scan(
        self,
        rows_TX: torch.Tensor,
        planes: dict[str, torch.Tensor],
        table_SW: torch.Tensor,
        context_S: torch.Tensor,
        row_start_S1: torch.Tensor,
        base_S: torch.Tensor,
        chunks: Chunks,
        weights: Any,
        out_THV: torch.Tensor,
        eps: float,
    ) -> None:
        """Compute what `kvasir.kernels.gated_chunks.scan` does: the rows of long spans into ``out_THV`` fp32, and the
        matrices after them into the pages that they write."""
        raise NotImplementedError
