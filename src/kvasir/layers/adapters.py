"""Low-rank adapters of one product: y += B A x, by the slot that each row's variant names.

Slots are stacked buffers of a fixed shape, so that a captured step reads whatever adapter a slot holds when it is
replayed. On a CPU, steps of few rows make calls that depend on shapes alone, which a tape may repeat; in exact mode
the rows of each slot go through the product that gives a row the same bits in any batch.

Legend: T rows, K inputs, N outputs, S slots, P parts (matrices that read the same inputs), R rank of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.activation import ACTIVATIONS
from kvasir.kernels.gemv import Config, adapters_fit
from kvasir.kernels.lora import (
    MAX_ROWS,
    Pairs,
    Shrunk,
    expand,
    lora_reference,
    lora_static,
    shrink,
    sort_few_rows,
    sort_rows,
    wide_of,
)
from kvasir.layers.norm import RMSNorm
from kvasir.layers.weights import Placement
from kvasir.types import StepBatch

# Most rows of a step on a CPU that makes calls that depend on shapes alone: the most that a tape has.
STATIC_ROWS = 32
SORTED = "rows by variant"  # key of ``StepBatch.scratch``


@dataclass(frozen=True, slots=True)
class HostPair:
    """An adapter's matrices for one product, in host memory. ``a_PRK``: zeros for a part that it leaves alone;
    ``b_NR``: times the scale; ``columns_PR`` int32: the columns that one-hot rows of A pick, or None where A is
    dense. R is the adapter's own rank."""

    a_PRK: torch.Tensor
    b_NR: torch.Tensor
    columns_PR: torch.Tensor | None = None


class LowRank:
    """The resident adapters of one product with ``num_inputs`` inputs and parts of these ``widths``."""

    def __init__(self, num_slots: int, rank: int, num_inputs: int, widths: tuple[int, ...], place: Placement) -> None:
        parts = len(widths)

        def zeros(*shape: int, dtype: torch.dtype = place.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=place.device)

        self.exact = place.exact
        self.pairs = Pairs(
            zeros(num_slots, parts * rank, num_inputs),
            zeros(num_slots, sum(widths), rank),
            torch.full((num_slots, parts * rank), -1, dtype=torch.int32, device=place.device),
            zeros(num_slots, dtype=torch.int32),
            widths,
        )

    def put(self, slot: int, pair: HostPair | None) -> None:
        """Fill slot ``slot`` (0-based) with an adapter's matrices; None: it leaves this product alone. On a GPU with
        pinned matrices nothing waits: the copies are behind the work that was launched before."""
        pairs = self.pairs
        a_PRK = pairs.a_SCK[slot].view(len(pairs.widths), pairs.rank, -1)
        b_NR, columns_PR = pairs.b_SNR[slot], pairs.columns_SC[slot].view(len(pairs.widths), pairs.rank)
        rank = 0 if pair is None else pair.b_NR.shape[1]
        if pair is not None:
            a_PRK[:, :rank].copy_(pair.a_PRK, non_blocking=True)
            b_NR[:, :rank].copy_(pair.b_NR, non_blocking=True)
        a_PRK[:, rank:].zero_()
        b_NR[:, rank:].zero_()
        columns_PR.fill_(-1)
        if pair is not None and pair.columns_PR is not None:
            columns_PR[:, :rank].copy_(pair.columns_PR, non_blocking=True)
        pairs.ranks_S[slot] = rank

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN, so that a read of a stale adapter shows."""
        self.pairs.a_SCK[slot].fill_(torch.nan)
        self.pairs.b_SNR[slot].fill_(torch.nan)

    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor, batch: StepBatch, product: Callable) -> None:
        """Add to ``y_TN`` what the batch's variants say about ``x_TK``. ``product(x, weight)``: the exact product."""
        slots_T, pairs = batch.variants, self.pairs
        if use_triton(x_TK):
            expand(self.shrink(x_TK, batch), y_TN)
        elif self.exact:
            self._add_exact(x_TK, y_TN, slots_T, product)
        elif len(x_TK) <= STATIC_ROWS:
            lora_static(x_TK, y_TN, pairs, slots_T)
        else:
            lora_reference(x_TK, y_TN, pairs, slots_T)

    def add_gated(self, x_TK: torch.Tensor, y_TN: torch.Tensor, batch: StepBatch, activation: str) -> torch.Tensor:
        """Return the activation [T, N / 2] of gate and up ``y_TN`` with what variants add, in x's dtype: one kernel."""
        out_TO = x_TK.new_empty(len(y_TN), y_TN.shape[1] // 2)
        return expand(self.shrink(x_TK, batch), y_TN, ACTIVATIONS[activation], out_TO)

    def fits(self, config: Config) -> bool:
        """Whether a product that runs so may end in adding what ``shrink`` returns."""
        return not self.exact and adapters_fit(self.pairs, config)

    def shrink(self, x_TK: torch.Tensor, batch: StepBatch, norm: RMSNorm | None = None) -> Shrunk:
        """A x of each row's variant; with ``norm``, that of the normed rows up to their factor 1 / rms(x)."""
        rows, fresh, by_slot = len(x_TK), False, None
        if not self.exact and rows > 0:
            by_slot = batch.scratch.get(SORTED)
            if by_slot is None:
                fresh, sort = True, sort_few_rows if rows <= MAX_ROWS else sort_rows
                by_slot = batch.scratch[SORTED] = sort(batch.variants, len(self.pairs.ranks_S))
        scale_K = None if norm is None else norm.parameters[0]
        return shrink(x_TK, self.pairs, batch.variants, by_slot, scale_K, early=False if fresh else None)

    def _add_exact(self, x_TK: torch.Tensor, y_TN: torch.Tensor, slots_T: torch.Tensor, product: Callable) -> None:
        wide, pairs = wide_of(x_TK), self.pairs
        for slot in sorted(set(slots_T.tolist()) - {0}):
            rows = (slots_T == slot).nonzero()[:, 0]
            shrunk = product(x_TK[rows].to(wide), pairs.a_SCK[slot - 1].to(wide)).split(pairs.rank, 1)
            parts = zip(shrunk, pairs.b_SNR[slot - 1].to(wide).split(pairs.widths))
            delta = torch.cat([product(s.contiguous(), b) for s, b in parts], 1)
            y_TN[rows] = (y_TN[rows].to(wide) + delta).to(y_TN.dtype)
